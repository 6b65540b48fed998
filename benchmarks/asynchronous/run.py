"""Synchronous against asynchronous training of an agent whose tools take time, in one run.

    python benchmarks/asynchronous/run.py                        # K = 0, 1, 2; three seeds each
    python benchmarks/asynchronous/run.py --steps 4 --seeds 1    # to see that it works

Everything but ``max_staleness`` is equal: tasks, seeds, steps, runners. Modes take turns seed by
seed, so that a machine that slows down slows all of them down. Prints one JSON line a run, then a
table: seconds a step (evaluation and start left out), how long the trainer waited for rollouts, how
much of them ran beside it, how stale the tokens were, and what was learned. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
HELLO = HERE.parents[1] / "examples" / "hello"
_STEP = ("rollouts", "update", "checkpoint", "publish")


def train(
    max_staleness: int, seed: int, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    name = f"k{max_staleness}-seed{seed}"
    settings: dict[str, Any] = {
        "tasks": HELLO / "train.jsonl",
        "eval_tasks": HELLO / "held_out.jsonl",
        "runs": folder,
        "name": name,
        "runners": options.runners,
        "rollouts.concurrency": options.concurrency,
        "batch_size": 8,
        "group_size": 8,
        "steps": options.steps,
        "evaluation.every": options.steps,
        "max_tokens": 32,
        "max_staleness": max_staleness,
        "seed": seed,
    }
    if max_staleness:
        settings["rollouts.stale"] = options.stale
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    subprocess.run(
        [sys.executable, "-m", "agentrl", "train", f"{HERE / 'agent.py'}:agent", *flags],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "AGENTRL_BENCH_LATENCY": str(options.latency), "OMP_NUM_THREADS": "1"},
    )
    run = folder / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    summary = json.loads((run / "summary.json").read_text())
    spent = summary["seconds"]
    return {
        "max_staleness": max_staleness,
        "seed": seed,
        "seconds_a_step": sum(spent.get(part, 0.0) for part in _STEP) / len(steps),
        "waited_a_step": fmean(row["seconds/rollouts"] for row in steps),
        "overlapped_a_step": fmean(row["seconds/overlapped"] for row in steps),
        "staleness": fmean(row["staleness/mean"] for row in steps),
        "staleness_max": max(row["staleness/max"] for row in steps),
        "carried_over": sum(row["groups/carried_over"] for row in steps),
        "reward_last_third": _mean(row["reward/mean"] for row in steps[-max(len(steps) // 3, 1) :]),
        "held_out": summary["held_out"][-1][1],
        "adds_up": summary["calls"]["adds_up"],
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are: a step in which nothing was rewarded has no mean reward."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--latency", type=float, default=1.0, help="mean seconds of a rollout's tool"
    )
    parser.add_argument("--runners", type=int, default=4)
    parser.add_argument(
        "--concurrency", type=int, default=16, help="rollouts at a time in a runner"
    )
    parser.add_argument("--stale", choices=["correct", "drop", "wait"], default="correct")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for bound in options.max_staleness:
                results.append(train(bound, seed, options, Path(folder)))
                print(json.dumps(results[-1]), flush=True)
    columns = [key for key in results[0] if key not in ("max_staleness", "seed", "adds_up")]
    print("\n| K | " + " | ".join(name.replace("_", " ") for name in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for bound in options.max_staleness:
        own = [result for result in results if result["max_staleness"] == bound]
        means = (_mean(result[name] for result in own) for name in columns)
        shown = ("–" if value is None else f"{value:.2f}" for value in means)
        print(f"| {bound} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
