"""Read settings that a run has recorded (``config.json``, the store), nested or, before, flat."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from agentrl.config.renamed_settings import RENAMED


def recorded(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a recorded setting by its dotted name; ``default`` if the run has none."""
    found: Any = config
    for key in name.split("."):
        if not isinstance(found, Mapping) or key not in found:
            found = config.get(_flat_names().get(name, name))
            break
        found = found[key]
    return default if found is None or (isinstance(found, Mapping) and "." in name) else found


@cache
def _flat_names() -> dict[str, str]:
    return {places[0]: old for old, places in RENAMED.items()}


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; the tables ``models`` and ``adapters`` stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        whole = not isinstance(value, Mapping) or (not prefix and key in ("models", "adapters"))
        flat |= {prefix + key: value} if whole else flattened(value, f"{prefix}{key}.")
    return flat
