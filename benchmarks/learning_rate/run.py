"""Does the best learning rate depend on the LoRA rank? Our default does not.

    python benchmarks/learning_rate/run.py [--jobs 2]

Trains agentrl-tiny on the hello task, by the loop of ``end_to_end/client_hello.py``, with each
rank, rate and seed, and writes tables and a picture to ``results/``. See README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

HERE = Path(__file__).parent
HELLO = HERE.parent.parent / "examples" / "hello"
sys.path.insert(0, str(HERE.parent / "end_to_end"))
from client_hello import learn  # noqa: E402  (it sets the number of threads before torch comes)


@dataclass(frozen=True)
class Case:
    rank: int
    multiple: float  # of the default learning rate
    seed: int


@dataclass(frozen=True)
class Sweep:
    default: float  # learning rate
    steps: int  # at most
    eval_every: int
    goal: float  # held-out accuracy


@dataclass(frozen=True)
class Run:
    case: Case
    learning_rate: float
    steps: int | None  # to the goal; None: not reached
    held_out: list[tuple[int, float]]  # (step, accuracy)
    seconds: float

    def accuracy_at(self, step: int) -> float:
        """One that has reached the goal stopped there."""
        return [accuracy for at, accuracy in self.held_out if at <= step][-1]


def default_rate() -> float:
    from agentrl_trainer.learner.optimizers import default_learning_rate
    from agentrl_trainer.models.loading import load_base

    model = load_base("agentrl-tiny", device="cpu").model
    return default_learning_rate(sum(p.numel() for p in model.parameters()))


def train(case: Case, sweep: Sweep) -> Run:
    import torch

    torch.set_num_threads(1)
    rate, began = sweep.default * case.multiple, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="agentrl-learning-rate-") as folder:
        found = learn(
            Path(folder),
            model="agentrl-tiny",
            tasks=HELLO / "train.jsonl",
            eval_tasks=HELLO / "held_out.jsonl",
            learning_rate=rate,
            seed=case.seed,
            rank=case.rank,
            steps=sweep.steps,
            eval_every=sweep.eval_every,
            stop_at=sweep.goal,
        )
    reached = found["steps"] if found["held_out"][-1][1] >= sweep.goal else None
    return Run(case, rate, reached, found["held_out"], time.perf_counter() - began)


class Grid:
    """The runs by rank and multiple, each cell the seeds'."""

    def __init__(self, runs: Sequence[Run], sweep: Sweep) -> None:
        self.sweep = sweep
        self.ranks = sorted({run.case.rank for run in runs})
        self.multiples = sorted({run.case.multiple for run in runs})
        self._cells: dict[tuple[int, float], list[Run]] = {}
        for run in sorted(runs, key=lambda run: run.case.seed):
            self._cells.setdefault((run.case.rank, run.case.multiple), []).append(run)

    def cell(self, rank: int, multiple: float) -> list[Run]:
        return self._cells[rank, multiple]

    def steps(self, rank: int, multiple: float) -> list[float]:
        """To the goal; one and a half times as many as there were stand for: not reached."""
        beyond = 1.5 * self.sweep.steps
        return [beyond if run.steps is None else run.steps for run in self.cell(rank, multiple)]

    def shown(self, steps: float) -> str:
        return f"{steps:g}" if steps <= self.sweep.steps else "–"

    def table(self, cell: Callable[[int, float], str]) -> list[str]:
        rates = "".join(f" ×{m:g} ({self.sweep.default * m:.2g}) |" for m in self.multiples)
        return [
            f"| rank |{rates}",
            "|--:|" + "--:|" * len(self.multiples),
            *(
                f"| {rank} | " + " | ".join(cell(rank, m) for m in self.multiples) + " |"
                for rank in self.ranks
            ),
        ]

    def markdown(self) -> str:
        def steps(rank: int, multiple: float) -> str:
            each = self.steps(rank, multiple)
            seeds = ", ".join(map(self.shown, each))
            return f"**{self.shown(median(each))}** ({seeds})"

        middle = self.sweep.steps // 2
        best = [
            min(self.multiples, key=lambda m: median(self.steps(rank, m))) for rank in self.ranks
        ]
        lines = [
            f"Steps to {self.sweep.goal} held-out accuracy, looked at every "
            f"{self.sweep.eval_every}: median of the seeds (each). –: not in {self.sweep.steps}.",
            "",
            *self.table(steps),
            "",
            f"Held-out accuracy after {middle} steps, mean of the seeds.",
            "",
            *self.table(
                lambda rank, multiple: (
                    f"{fmean(run.accuracy_at(middle) for run in self.cell(rank, multiple)):.2f}"
                )
            ),
            "",
            "Fewest steps: "
            + "; ".join(f"rank {r} at ×{m:g}" for r, m in zip(self.ranks, best, strict=True))
            + ".",
        ]
        return "\n".join(lines) + "\n"

    def draw(self, path: Path) -> None:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        rates = [self.sweep.default * multiple for multiple in self.multiples]
        for rank in self.ranks:
            steps = [self.steps(rank, multiple) for multiple in self.multiples]
            [line] = axes.plot(rates, list(map(median, steps)), marker="o", label=f"rank {rank}")
            low, high = list(map(min, steps)), list(map(max, steps))
            axes.fill_between(rates, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        axes.axvline(self.sweep.default, color="black", linestyle=":", label="our default")
        axes.axhline(self.sweep.steps, color="grey", linewidth=0.8, linestyle="--")
        axes.set(
            xscale="log",
            xlabel="learning rate (alpha 32)",
            ylabel=f"steps to the goal (above {self.sweep.steps}: not reached)",
            title="agentrl-tiny, hello: median and range of the seeds",
        )
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument(
        "--multiples", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4, 8, 16, 32]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="at most")
    parser.add_argument("--eval-every", type=int, default=1)
    parser.add_argument("--goal", type=float, default=0.95, help="held-out accuracy to stop at")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of one thread each")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    sweep = Sweep(default_rate(), options.steps, options.eval_every, options.goal)
    cases = [
        Case(rank, multiple, seed)
        for seed in options.seeds
        for rank in options.ranks
        for multiple in options.multiples
    ]
    load, began = os.getloadavg()[0], time.perf_counter()
    runs: list[Run] = []
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        for done in as_completed([pool.submit(train, case, sweep) for case in cases]):
            runs.append(run := done.result())
            print(
                f"{len(runs)}/{len(cases)}  rank {run.case.rank}  ×{run.case.multiple:g}  "
                f"seed {run.case.seed}: {run.held_out[-1][1]:.2f} after {run.held_out[-1][0]} "
                f"steps  ({run.seconds:.1f} s)",
                flush=True,
            )
    about = (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {platform.machine()}, load "
        f"before the run {load:.1f}; {len(runs)} runs in {time.perf_counter() - began:.0f} s."
    )
    grid = Grid(runs, sweep)
    options.results.mkdir(parents=True, exist_ok=True)
    record = {"about": about, "sweep": asdict(sweep), "runs": [asdict(run) for run in runs]}
    (options.results / "learning_rate.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.results / "learning_rate.md").write_text(f"{about}\n\n{grid.markdown()}")
    grid.draw(options.results / "learning_rate.png")
    print(f"{about}\n\n{grid.markdown()}")


if __name__ == "__main__":
    main()
