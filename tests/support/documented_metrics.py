"""docs/metrics.md as a set of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> list[str]:
    """What stands in the first column of its tables; ``<x>`` is any word."""
    names: list[str] = []
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names += re.findall(r"`([^`]+)`", line.split("|")[1])
    return names


def undocumented(
    rows: Iterable[Mapping[str, Any]], adapters: Collection[str] = ()
) -> dict[str, Any]:
    """What rows hold that the page does not know, with a value of each."""
    known = [re.sub(r"<\w+>", r"\\w+", name) for name in documented()]
    pattern = re.compile("|".join(known))
    prefix = re.compile("|".join(f"{name}/" for name in adapters) or r"\Z\A")
    return {
        name: value
        for row in rows
        for name, value in row.items()
        if not pattern.fullmatch(prefix.sub("", name, count=1) if adapters else name)
    }
