"""Run callbacks when a module is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import wrapt

logger = logging.getLogger("agentrl")


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback`` with module ``name`` once it is imported, at once if it already is.

    An exception in the callback is logged: patching must not break the agent's import.
    """

    def guarded(module: ModuleType) -> None:
        try:
            callback(module)
        except Exception:
            logger.warning("agentrl cannot instrument %s", name, exc_info=True)

    wrapt.register_post_import_hook(guarded, name)
