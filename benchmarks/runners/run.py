"""What runners cost: time to ready, rollouts per second of an instant agent, CPU per rollout.

    python benchmarks/runners/run.py --agentlightning-python /path/to/its-venv/bin/python

A stand-in for the gateway takes the spans and rewards, as cheaply as it can: what is measured is
the runners. The last row is the whole command: ``agentrl train`` until eight runners that import
CrewAI have work. Writes results/runners.md and .json. Figures of a busy machine are worthless.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpu import cpu_seconds

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))
from fake_gateway import FakeGateway  # the runners' tests have one

from agentrl.runner.pool_client import start_pool
from agentrl.runner.protocol import RunnerConfig
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import NewRollout, Purpose
from agentrl_tracer.store import Store

HERE = Path(__file__).parent
Row = dict[str, Any]

INSTANT = "def agent(task):\n    return float(task['n'])\n"
CREWAI = (
    "import time\n"
    "from crewai import Agent, Crew, Flow, Task\n"
    "from crewai.flow.flow import start\n"
    "def agent(task):\n    time.sleep(1.0)\n    return float(task['n'])\n"
)
PATIENCE_S = 300.0
CREWAI_RUNNERS = 8


def measure(runners: int, rollouts: int, per_process: int) -> Row:
    """A pool of its own: seconds until every runner has had work, then what rollouts cost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agents.py").write_text(INSTANT)
        store = Store(str(folder / "store.db"))
        gateway = FakeGateway(store)
        run_id = store.create_run("bench", "train", {})
        [task] = store.add_tasks(run_id, "train", [{"n": 1}])
        started = time.perf_counter()
        pool = start_pool(
            RunnerConfig(
                store=store.url,
                gateways=[gateway.url],
                run_id=run_id,
                agent=f"{folder / 'agents.py'}:agent",
                model="policy",
                logs=str(folder / "logs"),
                runners=runners,
                timeout_s=600.0,
                lease_s=15.0,
                rollouts_per_process=per_process,
            )
        )

        def execute(count: int) -> list[str]:
            new = [NewRollout(task, "g", Purpose.TRAIN, 0, i, i) for i in range(count)]
            ids = store.enqueue(run_id, new)
            deadline = time.perf_counter() + PATIENCE_S
            while store.unfinished_ids(run_id, Purpose.TRAIN):
                if time.perf_counter() > deadline:
                    raise TimeoutError(pool.log_tail())
                time.sleep(0.01)
            return ids

        try:
            seen: set[str] = set()
            while len(seen) < runners:
                seen |= {attempt.runner for attempt in store.attempts(execute(runners))}
                if time.perf_counter() - started > PATIENCE_S:
                    raise TimeoutError(f"{len(seen)} of {runners} work\n{pool.log_tail()}")
            ready = time.perf_counter() - started
            before, began = cpu_seconds(pool.pid), time.perf_counter()
            execute(rollouts)
            seconds = time.perf_counter() - began
            used = cpu_seconds(pool.pid) - before
        finally:
            pool.stop()
            gateway.close()
            store.close()
        return {
            "ready_s": round(ready, 2),
            "rollouts_per_s": round(rollouts / seconds, 1),
            "cpu_ms_per_rollout": round(used * 1000 / rollouts, 1),
        }


def agentlightning(python: str, runners: int, rollouts: int) -> Row:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["AGENTRL_BENCHMARK_START"] = str(time.time())
    with tempfile.TemporaryDirectory() as folder:  # it leaves a log where it runs
        done = subprocess.run(
            [python, str(HERE / "agentlightning_instant.py"), str(runners), str(rollouts)],
            capture_output=True, text=True, check=False, timeout=600, env=env, cwd=folder,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"Agent-lightning measured nothing:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def from_train_to_crewai() -> Row:
    """Seconds from ``agentrl train`` until eight CrewAI runners have an attempt under way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agents.py").write_text(CREWAI)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(8)))
        settings = {
            "--tasks": tasks, "--runs": folder, "--name": "run", "--runners": CREWAI_RUNNERS,
            "--steps": 1, "--batch-size": 8, "--group-size": 4,
        }  # fmt: skip
        flags = (part for flag, value in settings.items() for part in (flag, str(value)))
        started = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", "train", f"{folder / 'agents.py'}:agent", *flags],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        run = RunFolder(folder / "run")
        store = Store(str(run.store))
        ids = [rollout.id for rollout in store.rollouts(run.run_id.read_text())]
        first: dict[str, float] = {}
        for attempt in sorted(store.attempts(ids), key=lambda one: one.started_at):
            # A runner that retires, for newly learned modules, goes on under another pid.
            first.setdefault(attempt.runner.rsplit("-", 1)[1], attempt.started_at - started)
        store.close()
        if len(first) < CREWAI_RUNNERS:
            raise RuntimeError(f"{len(first)} runners worked:\n{done.stdout}{done.stderr}")
        return {
            "first_runner_s": round(min(first.values()), 1),
            "ready_s": round(max(first.values()), 1),
        }


def table(rows: list[Row], about: Row) -> str:
    lines = [
        f"{about['date']}, {about['cores']} cores, {about['machine']}, Python {about['python']}, "
        f"load average before the run {about['load']}; {about['rollouts']} rollouts of an agent "
        "that returns at once.",
        "",
        "| runners | what | ready s | rollouts/s | CPU ms a rollout | × rollouts/s | × CPU |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    ours = {row["runners"]: row for row in rows if row["what"] == FRESH}
    for row in rows:
        if "rollouts_per_s" not in row:
            continue
        base = ours[row["runners"]]
        lines.append(
            f"| {row['runners']} | {row['what']} | {row['ready_s']} | {row['rollouts_per_s']} "
            f"| {row['cpu_ms_per_rollout']} "
            f"| {base['rollouts_per_s'] / row['rollouts_per_s']:.2f} "
            f"| {row['cpu_ms_per_rollout'] / base['cpu_ms_per_rollout']:.2f} |"
        )
    lines += ["", f"×: how many times better `{FRESH}` is in the same run.", ""]
    for row in rows:
        if "first_runner_s" in row:
            lines.append(
                f"`agentrl train` with {row['runners']} runners that import CrewAI: the first "
                f"works after {row['first_runner_s']} s, all after {row['ready_s']} s."
            )
    return "\n".join(lines) + "\n"


FRESH, SHARED, OTHER = "agentrl", "agentrl, processes reused", "Agent-lightning 0.3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runners", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--agentlightning-python", help="interpreter of a venv that has it")
    parser.add_argument("--no-crewai", action="store_true", help="leave out the last row")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    about: Row = {
        "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "rollouts": options.rollouts,
    }
    rows: list[Row] = []

    def note(what: str, runners: int, found: Row) -> None:
        rows.append({"what": what, "runners": runners} | found)
        print(json.dumps(rows[-1]), flush=True)

    for runners in options.runners:
        note(FRESH, runners, measure(runners, options.rollouts, 1))
        note(SHARED, runners, measure(runners, options.rollouts, 100))
        if options.agentlightning_python:
            found = agentlightning(options.agentlightning_python, runners, options.rollouts)
            note(OTHER, runners, found)
    if not options.no_crewai:
        note("agentrl train, CrewAI", CREWAI_RUNNERS, from_train_to_crewai())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "runners.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    (options.out / "runners.md").write_text(table(rows, about))
    print(f"\n{table(rows, about)}")


if __name__ == "__main__":
    main()
