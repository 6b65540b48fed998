"""Secrets that a configuration names and does not hold: variables of the environment hold them.

A text names one by ``os.environ/NAME``, anywhere in it, as in LiteLLM's own configuration:
``Bearer os.environ/TEAM_TOKEN``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
# Under a name that ends like this there is a secret. (``max_tokens`` is none, nor is
# ``prompt_cache_key``: a key is one in a header only.)
_SECRET = re.compile(
    r"(authorization|cookie|password|secret|credentials?|[-_]token|^token|api[-_]?key|"
    r"secret[-_]access[-_]key)$"
)
_SECRET_HEADER = re.compile(rf"{_SECRET.pattern}|[-_]?key$")


def check_variable(name: str) -> str:
    """Return the name of an environment variable that is set.

    Raises:
        ValueError: it is not set, or empty.
    """
    if not os.environ.get(name):
        raise ValueError(f"the environment variable {name} is not set")
    return name


def check_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return LiteLLM parameters that hold no secret and name only variables that are set.

    Raises:
        ValueError: names the parameter and the fix.
    """
    for name in params:
        if name in ("model", "api_base", "api_key_env", "timeout", "num_retries", "fallbacks"):
            raise ValueError(f"{name} belongs beside params, not into it")
        if name == "api_key":
            raise ValueError("a key must not be in the file: name its variable in api_key_env")
    for path, text in _texts(params):
        in_header = any(name.endswith(("header", "headers")) for name in path[:-1])
        secret = (_SECRET_HEADER if in_header else _SECRET).search(path[-1].lower())
        if secret and text and not _NAMED.search(text):
            raise ValueError(
                f"{'.'.join(path)} is a secret, which must not be in the file: write "
                "os.environ/NAME in its place, where NAME is the environment variable that holds it"
            )
    for name in variables_in(params):
        check_variable(name)
    return params


def variables_in(settings: object) -> list[str]:
    """Return the variables that settings name, in their order."""
    return [name for _, text in _texts(settings) for name in _NAMED.findall(text)]


def filled(settings: Any, environment: Mapping[str, str]) -> Any:
    """Return settings with the values of the variables that they name."""
    if isinstance(settings, str):
        return _NAMED.sub(lambda found: environment[found[1]], settings)
    if isinstance(settings, dict):
        return {key: filled(value, environment) for key, value in settings.items()}
    if isinstance(settings, list):
        return [filled(value, environment) for value in settings]
    return settings


def _texts(settings: object, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each text and the names that lead to it; a list's texts are under the list's name."""
    if isinstance(settings, str):
        yield path, settings
    elif isinstance(settings, dict):
        for key, value in settings.items():
            yield from _texts(value, *path, str(key))
    elif isinstance(settings, list):
        for value in settings:
            yield from _texts(value, *path)
