"""What both sides measure, and how. Plain Python and torch."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.trainer.cases import CASES


def side_options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON of the figures, log-probs included")
    return parser


def measured(warm_up: Callable[[], object], whole: Callable[[], object]) -> dict[str, Any]:
    """Time ``whole`` after a warm-up on a part of the work; memory is that of both."""
    memory = PeakMemory()
    warm_up()
    cpu, wall = time.process_time(), time.perf_counter()
    whole()
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "megabytes_on_top_of_the_model": memory.megabytes(),
        "threads": torch.get_num_threads(),
    }


def report(found: dict[str, Any], logprobs: list[float], out: Path | None) -> None:
    """Print a line of JSON; ``logprobs`` of all trained tokens, in the order of the rollouts."""
    print(json.dumps(found))
    if out:
        out.write_text(json.dumps(found | {"logprobs": logprobs}))


class PeakMemory:
    """How far resident memory rises above what it is now, whatever it has been before."""

    def __init__(self) -> None:
        gc.collect()
        # Loading may have taken more than what is measured: Linux forgets the peak on request.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def megabytes(self) -> float:
        return _status("VmHWM") - self._before


def _status(field: str) -> float:
    """A size of this process in MB, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
