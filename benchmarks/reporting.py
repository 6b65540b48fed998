"""What the benchmarks' reports share: the machine, tables in Markdown, and files of results."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any


def machine(threads: int) -> str:
    """Describe when and where a measurement ran; call it before the measurement."""
    names = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(": ")[1] for x in names if x.startswith("model name")), "")
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores ({model or platform.machine()})"
        f", {threads} threads, load before {os.getloadavg()[0]:.1f}"
    )


def table(heads: list[str], lines: list[list[str]]) -> list[str]:
    ruler = "|".join("---" if i == 0 else "--:" for i in range(len(heads)))
    return [f"| {' | '.join(heads)} |", f"|{ruler}|", *(f"| {' | '.join(x)} |" for x in lines)]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
