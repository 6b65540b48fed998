"""agentrl beside TRL's GRPOTrainer, from process start to a held-out accuracy of 0.95.

    python benchmarks/end_to_end/run.py --trl-python /path/to/python [--seeds 0 1 2]

Runs both on the hello task, one after the other and in turns, and writes what it found to
``results/``. See README.md for what is equal and what is not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl_trainer.models.sources import resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reporting import machine, write_json  # noqa: E402

HELLO = ROOT / "examples" / "hello"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Run:
    tool: str
    seed: int
    steps: int
    accuracy: float  # held out, at the end
    wall: float  # seconds, from process start to the end of the last held-out evaluation
    ended: float  # seconds, from process start to its end
    cpu: float  # seconds, of the process and all its descendants
    per_step: float  # seconds of wall clock: generate, learn, and pass the weights on
    held_out: list[list[float]]  # (step, accuracy), from before the first step on


def measured(command: list[str], log: Path, threads: int) -> tuple[float, float, float]:
    """When a command began, and its (wall, CPU) seconds with all its descendants, also those it has
    orphaned."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began, started = time.time(), time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=ROOT)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    wall = time.perf_counter() - started
    while True:  # orphans are ours (we are the subreaper): wait for them, so that they count
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code:
        raise SystemExit(f"{command[:3]} ended with {code}:\n{log.read_text()[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return began, wall, cpu


def run_trl(options: argparse.Namespace, seed: int, folder: Path) -> Run:
    return run_script("TRL", options.trl_python, "trl_hello.py", options, seed, folder)


def run_client(options: argparse.Namespace, seed: int, folder: Path) -> Run:
    return run_script("agentrl", sys.executable, "client_hello.py", options, seed, folder)


def run_script(
    tool: str, python: str, script: str, options: argparse.Namespace, seed: int, folder: Path
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    began, wall, cpu = measured(
        [
            python, str(HERE / script),
            "--model", resolve_model(options.model),
            "--tasks", str(HELLO / "train.jsonl"),
            "--eval-tasks", str(HELLO / "held_out.jsonl"),
            "--learning-rate", str(options.learning_rate),
            "--seed", str(seed),
            "--steps", str(options.steps),
            "--stop-at", str(options.stop_at),
            "--eval-every", str(options.eval_every),
            "--out", str(folder),
        ],
        folder.with_suffix(".log"),
        options.threads,
    )  # fmt: skip
    found = json.loads((folder / "figures.json").read_text())
    return Run(
        tool, seed, found["steps"], found["held_out"][-1][1], found["evaluated_at"] - began, wall,
        cpu, found["seconds_per_step"], found["held_out"],
    )  # fmt: skip


def run_agentrl(options: argparse.Namespace, seed: int, folder: Path) -> Run:
    command = [
        str(Path(sys.executable).with_name("agentrl")), "train", f"{HELLO / 'agent.py'}:agent",
        "--tasks", str(HELLO / "train.jsonl"),
        "--eval-tasks", str(HELLO / "held_out.jsonl"),
        "--evaluation.every", str(options.eval_every),
        "--model", options.model,
        "--runners", str(options.runners),
        "--rollouts-per-process", str(options.rollouts_per_process),
        "--learning-rate", str(options.learning_rate),
        "--seed", str(seed),
        "--steps", str(options.steps),
        "--max-tokens", "32",
        "--runs", str(folder.parent), "--name", folder.name,
    ]  # fmt: skip
    if options.stop_at <= 1:
        command += ["--evaluation.stop-at", str(options.stop_at)]
    began, wall, cpu = measured(command, folder.with_suffix(".log"), options.threads)
    found = json.loads((folder / "summary.json").read_text())
    if not found["calls"]["adds_up"]:
        raise SystemExit(f"agentrl lost calls: {found['calls']}")
    loop = sum(found["seconds"][k] for k in ("rollouts", "update", "checkpoint", "publish"))
    steps = found["steps"]
    accuracy = found["held_out"][-1][1]
    to_goal = (folder / "metrics.jsonl").stat().st_mtime - began  # its last row
    return Run(
        "agentrl", seed, steps, accuracy, to_goal, wall, cpu, loop / steps, found["held_out"]
    )


def table_of(runs: list[Run], title: str) -> Table:
    table = Table(title=title)
    for name in ("tool", "seed", "steps", "held-out", "wall s", "to the end", "CPU s", "s/step"):
        table.add_column(name, justify="left" if name == "tool" else "right")
    for r in runs:
        table.add_row(
            r.tool, str(r.seed), str(r.steps), f"{r.accuracy:.2f}", f"{r.wall:.2f}",
            f"{r.ended:.2f}", f"{r.cpu:.2f}", f"{r.per_step:.3f}",
        )  # fmt: skip
    return table


def means(runs: list[Run]) -> dict[str, dict[str, float]]:
    tools = dict.fromkeys(r.tool for r in runs)
    return {
        tool: {
            name: statistics.fmean(getattr(r, name) for r in runs if r.tool == tool)
            for name in ("steps", "wall", "ended", "cpu", "per_step")
        }
        for tool in tools
    }


def markdown(runs: list[Run], about: dict[str, object]) -> str:
    lines = [
        f"{about['machine']}, {about['model']}, "
        f"learning rate {about['learning_rate']}, "
        f"{about['runners']} runners, {about['agent']}.",
        "",
        "| tool | seed | steps | held-out accuracy | wall s | to its end | CPU s | wall s / step |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    costs = ("wall", "ended", "cpu", "per_step")

    def row(name: str, seed: str, steps: str, accuracy: str, values: list[float]) -> str:
        return f"| {' | '.join([name, seed, steps, accuracy, *(f'{v:.2f}' for v in values)])} |"

    lines += [
        row(r.tool, str(r.seed), str(r.steps), f"{r.accuracy:.2f}", [getattr(r, c) for c in costs])
        for r in runs
    ]
    mean = means(runs)
    lines += [
        row(f"**{tool}, mean**", "", f"{m['steps']:.1f}", "", [m[c] for c in costs])
        for tool, m in mean.items()
    ]
    if len(mean) == 2:
        ours, theirs = mean["agentrl"], mean["TRL"]
        lines.append(row("**agentrl / TRL**", "", "", "", [ours[c] / theirs[c] for c in costs]))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trl-python", help="python of the venv that has TRL")
    parser.add_argument("--only", choices=["agentrl", "trl"])
    parser.add_argument(
        "--without-agent", action="store_true", help="agentrl: a loop over its client API, as TRL"
    )
    parser.add_argument("--model", default="smollm2-135m", help="or agentrl-tiny")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--eval-every", type=int, default=1)
    parser.add_argument("--runners", type=int, default=32)
    parser.add_argument(
        "--rollouts-per-process", type=int, default=1, help="agentrl: 1 is a fresh process each"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--stop-at", type=float, default=0.95, help="above 1: never, for a fixed number of steps"
    )
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.only != "agentrl" and not options.trl_python:
        parser.error("--trl-python is needed: see requirements.txt")

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shared = f"{options.rollouts_per_process} rollouts per process"
    agent = "a fresh process per rollout" if options.rollouts_per_process == 1 else shared
    about: dict[str, object] = {
        "machine": f"{machine(options.threads)}, Python {platform.python_version()}",
        "model": options.model,
        "learning_rate": options.learning_rate,
        "runners": options.runners,
        "agent": "a loop over the client API" if options.without_agent else agent,
        "steps_at_most": options.steps,
        "stop_at": options.stop_at,
    }
    folder = options.keep or Path(tempfile.mkdtemp(prefix="agentrl-benchmark-"))
    folder.mkdir(parents=True, exist_ok=True)
    console, runs = Console(), []
    for seed in options.seeds:
        ours = run_client if options.without_agent else run_agentrl
        for name, run in (("agentrl", ours), ("trl", run_trl)):
            if options.only in (None, name):
                place = folder / f"{name}-{seed}"
                runs.append(run(options, seed, place))
                console.print(runs[-1])
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)

    console.print(table_of(runs, "To the goal" if options.stop_at <= 1 else "Fixed steps"))
    stem = "to_goal" if options.stop_at <= 1 else f"fixed_{options.steps}_steps"
    record = {"about": about, "runs": [asdict(r) for r in runs], "means": means(runs)}
    write_json(options.results / f"{stem}.json", record)
    (options.results / f"{stem}.md").write_text(markdown(runs, about))
    console.print(markdown(runs, about), markup=False)


if __name__ == "__main__":
    main()
