"""Measure what each stage before RL gains, over several seeds: the table of README.md.

    python examples/before_rl/figures.py                                    # agentrl-tiny
    python examples/before_rl/figures.py --model smollm2-135m --recipe real

Stages are commands of agentrl, whose runs stand in --runs. A stage that has ended is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

HERE = Path(__file__).parent
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a 95 % interval, by the number of seeds."""


@dataclass(frozen=True)
class Recipe:
    collect: str
    """Of the run whose rollouts the other stages learn from."""
    sft: str
    prefer: str
    taste: str
    rl: str


COMMON = "--rollouts-per-process 50 --max-tokens 32"
RECIPES = {
    "tiny": Recipe(
        collect=f"--steps 6 --batch-size 16 --group-size 8 {COMMON}",
        sft="--epochs 4 --batch-size 8",
        prefer="--epochs 4 --batch-size 8",
        taste="--epochs 2 --batch-size 16",
        rl=f"--steps 12 --batch-size 8 --group-size 8 {COMMON}",
    ),
    "real": Recipe(
        collect=f"--steps 2 --batch-size 48 --group-size 8 --runners 32 {COMMON}",
        sft="--epochs 2 --batch-size 16",
        prefer="--epochs 2 --batch-size 8",
        taste="--epochs 2 --batch-size 16 --learning-rate 5e-4",
        rl=f"--steps 8 --batch-size 8 --group-size 8 --runners 32 {COMMON}",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="agentrl-tiny")
    parser.add_argument("--recipe", choices=RECIPES, default="tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/before-rl"))
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    found = [measure(given, RECIPES[given.recipe], seed) for seed in given.seeds]
    print(f"\n{given.model}, seeds {given.seeds}: mean over seeds, 95 % interval of the mean\n")
    print("| | " + " | ".join(f"seed {seed}" for seed in given.seeds) + " | mean |")
    print("|---|" + "---|" * (len(found) + 1))
    for name in found[0]:
        values = [one[name] for one in found]
        print(f"| {name} | " + " | ".join(f"{x:.3f}" for x in values) + f" | {interval(values)} |")


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_975[len(values)] * stdev(values) / sqrt(len(values))
    return f"{fmean(values):.3f} ± {half:.3f}"


def measure(given: argparse.Namespace, recipe: Recipe, seed: int) -> dict[str, float]:
    """Run the stages of a seed; return the held-out figures by name."""

    def stage(name: str, command: str, **environment: str) -> Path:
        """Run a command that makes a run folder, unless that is finished; return the folder."""
        folder = given.runs / f"{name}-{seed}"
        if not (folder / "summary.json").exists():
            old = ["--resume", str(folder)]
            new = ["--runs", str(given.runs), "--name", folder.name, "--seed", str(seed)]
            words = [*command.split(), *(old if folder.exists() else new)]
            execute(given, folder.name, words, **environment)
        return folder

    tasks, held_out = write_tasks(given.runs)
    true, judged = f"{HERE}/player.py:rewarded", f"{HERE}/player.py:unrewarded"
    by_taste = f"--rewards {HERE}/taste.py:taste --evaluation.tasks {held_out}"
    collect = stage("collect", f"train {true} --tasks {tasks} {recipe.collect}")
    good = stage("sft", f"sft --from-run {collect} --where reward>=1 --best-of 2 {recipe.sft}")
    preferred = stage("prefer", f"prefer --from-run {collect} --held-out 0.25 {recipe.prefer}")
    kl = "--algorithm.kl.coef 0.01"
    by_truth = stage("true", f"train {true} --tasks {tasks} {kl} {recipe.rl}")
    scores = f"--from-run {by_truth} --loss regression --held-out 0.25"
    model = stage("taste", f"reward-model {scores} {recipe.taste}")
    judging = f"train {judged} --tasks {tasks} {by_taste} {kl} {recipe.rl}"
    by_model = stage("judged", judging, TASTE=str(model))
    adapters = {
        "base": "base", "collect": collect, "sft": good, "prefer": preferred, "true": by_truth,
        "judged": by_model,
    }  # fmt: skip
    evaluated = evaluate(given, seed, held_out, adapters)
    base, most = evaluated["base"], evaluated["true"]
    return {
        "base model": base,
        "the run that gives the examples": evaluated["collect"],
        "SFT on its good rollouts, fresh adapter": evaluated["sft"],
        "DPO on its pairs, fresh adapter": evaluated["prefer"],
        "DPO: held-out pairs told apart": last(preferred, "eval/rewards/accuracies"),
        "reward model: held-out pairs told apart": last(model, "eval/rewards/accuracies"),
        "GRPO on the true reward": most,
        "GRPO from the base on the reward model alone": evaluated["judged"],
        "(reward model - base) / (true - base)": (evaluated["judged"] - base) / (most - base),
    }


def evaluate(
    given: argparse.Namespace, seed: int, tasks: Path, adapters: Mapping[str, object]
) -> dict[str, float]:
    """Return the held-out accuracy of each adapter, by its name."""
    runs = given.runs / f"eval-{seed}"
    if not (found := compared(runs)):
        command = f"eval {HERE}/player.py:rewarded --tasks {tasks} --runs {runs} {COMMON}".split()
        paths = [word for path in adapters.values() for word in ("--adapter-path", str(path))]
        execute(given, runs.name, [*command, *paths])
        found = compared(runs)
    rates = (one["accuracy"][0] for one in found)
    return dict(zip(adapters, rates, strict=True))


def compared(runs: Path) -> list[dict]:
    """Return the comparison of an evaluation that has ended; empty before."""
    summaries = (json.loads(path.read_text()) for path in runs.glob("*/summary.json"))
    return next((one["compared"] for one in summaries if "compared" in one), [])


def execute(given: argparse.Namespace, name: str, words: list[str], **environment: str) -> None:
    began, model = time.perf_counter(), ["--model", given.model]
    with (given.runs / f"{name}.log").open("a") as log:
        command = [sys.executable, "-m", "agentrl", *words, *model]
        variables = os.environ | environment
        subprocess.run(command, check=True, stdout=log, stderr=log, env=variables)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def write_tasks(folder: Path) -> tuple[Path, Path]:
    """Write numbers to train on, and labeled ones that are held out."""
    tasks, held_out = folder / "tasks.jsonl", folder / "held_out.jsonl"
    tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(100, 1000)))
    rows = ({"n": n, "labeled": True} for n in range(1000, 1048))
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks, held_out


def last(folder: Path, name: str) -> float:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row][-1]


if __name__ == "__main__":
    main()
