"""The command line: a module for each command; those that serve are in ``servers``."""

from typing import Annotated

from cyclopts import Parameter

Tokens = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
"""Arguments that a command with settings reads itself, see ``agentrl.config.loading``."""
