"""What all samplers are asked, and how each is timed. Plain Python: runs in every environment."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 49_152
"""Of SmolLM2. Random tokens: how long it takes does not depend on what they say."""
PROMPTS, ANSWERS = (32, 512), (32, 256)


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    lengths: list[int]
    """Tokens of each answer."""


def workload(requests: int, seed: int = 0) -> Workload:
    draw = random.Random(seed)
    sizes = [draw.randint(*PROMPTS) for _ in range(requests)]
    prompts = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in sizes]
    return Workload(prompts, [draw.randint(*ANSWERS) for _ in range(requests)])


def warm_up(asked: Workload) -> Workload:
    """Return a small part of the work: what comes first costs more than what follows."""
    return Workload(asked.prompts[:4], [16 for _ in asked.prompts[:4]])


def side_options(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--folder", type=Path, required=True, help="the prepared models")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--passes", type=int, required=True)
    return parser


def time_passes(run: Callable[[Workload], list[int]], options: argparse.Namespace) -> None:
    """Print each pass as a line of JSON as soon as it is done.

    ``run`` answers everything and returns how many tokens each answer has.
    """
    asked = workload(options.requests)
    run(warm_up(asked))
    for _ in range(options.passes):
        cpu, started = time.process_time(), time.perf_counter()
        found = run(asked)
        seconds = time.perf_counter() - started
        assert found == asked.lengths, "some answers are shorter than asked"
        cpu = time.process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu}), flush=True)
