"""Read the settings that a run has recorded, in ``config.json`` and in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def recorded(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a recorded setting by its dotted name; ``default`` if the run has none."""
    found: Any = config
    for key in name.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return default if found is None else found


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; the tables ``models`` and ``adapters`` stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        whole = not isinstance(value, Mapping) or (not prefix and key in ("models", "adapters"))
        flat |= {prefix + key: value} if whole else flattened(value, f"{prefix}{key}.")
    return flat
