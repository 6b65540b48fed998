"""What all sides share: options, the clock, memory, and the line of JSON that they print."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks.coding_agents.workload import SHAPES, Shape


def options_of(about: str | None) -> tuple[argparse.Namespace, Shape]:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, default=6, help="calls that a slow peer is timed on")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    options = parser.parse_args()
    return options, SHAPES[options.shape]


def timed(work: Callable[[], object]) -> dict[str, float]:
    cpu, started = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}


def finish(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def spread(items: list[Any], count: int) -> list[Any]:
    """Return ``count`` of the items, evenly spread, the first and the last among them."""
    count = min(count, len(items))
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]
