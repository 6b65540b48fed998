"""What runners cost: time to ready, and rollouts per second of an instant agent.

    python benchmarks/runners/run.py --runners 1 8 32 64 --rollouts 200 \\
        --agentlightning-python /path/to/agentlightning-venv/bin/python --crewai

A stand-in for the gateway takes the spans and rewards, as cheaply as it can: what is measured is
the runners. Prints JSON lines. Figures of a busy machine are worthless; CPU-seconds less so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/agentrl"))
from test_runner import FakeGateway  # the runners' tests have one

from agentrl.runner import RunnerConfig, start_pool
from agentrl_tracer.schemas import NewRollout, Purpose
from agentrl_tracer.store import Store

INSTANT = "def agent(task):\n    return float(task['n'])\n"
CREWAI = (
    "from crewai import Agent, Crew, Flow, Task\n"
    "from crewai.flow.flow import start\n"
    "def agent(task):\n    return 1.0\n"
)


def measure(source: str, runners: int, rollouts: int, **settings: object) -> dict[str, float]:
    """Starts a pool: seconds until every runner has had work, then rollouts per second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agents.py").write_text(source)
        store = Store(str(folder / "store.db"))
        gateway = FakeGateway(store)
        run_id = store.create_run("bench", "train", {})
        [task] = store.add_tasks(run_id, "train", [{"n": 1}])

        def execute(count: int, patience_s: float = 300.0) -> float:
            new = [NewRollout(task, "g", Purpose.TRAIN, 0, i, i) for i in range(count)]
            started = time.perf_counter()
            ids = store.enqueue(run_id, new)
            while store.unfinished(ids):
                if time.perf_counter() - started > patience_s:
                    raise TimeoutError(pool.log_tail())
                time.sleep(0.01)
            return time.perf_counter() - started

        started = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        pool = start_pool(
            RunnerConfig(
                store=store.url,
                gateway=gateway.url,
                run_id=run_id,
                agent=f"{folder / 'agents.py'}:agent",
                model="policy",
                logs=str(folder / "logs"),
                runners=runners,
                **settings,  # type: ignore[arg-type]
            )
        )
        try:
            execute(4 * runners)  # ready: each has had the time to run one
            ready = time.perf_counter() - started
            seconds = execute(rollouts)
        finally:
            pool.stop()
            gateway.close()
            store.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "ready_s": round(ready, 2),
            "rollouts_per_s": round(rollouts / seconds, 1),
            "cpu_s_in_all": round(cpu, 2),
        }


def agentlightning(python: str, runners: int, rollouts: int) -> dict[str, float]:
    script = Path(__file__).with_name("agentlightning_instant.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(script), str(runners), str(rollouts)],
        capture_output=True, text=True, check=False, timeout=600, env=env,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"Agent-lightning measured nothing:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runners", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--agentlightning-python")
    parser.add_argument("--crewai", action="store_true", help="time until 8 CrewAI runners work")
    options = parser.parse_args()
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count()}), flush=True)
    for runners in options.runners:
        for shared in (1, 100):
            found = measure(INSTANT, runners, options.rollouts, rollouts_per_process=shared)
            what = {"what": "agentrl", "runners": runners, "rollouts_per_process": shared}
            print(json.dumps(what | found), flush=True)
        if options.agentlightning_python:
            found = agentlightning(options.agentlightning_python, runners, options.rollouts)
            print(json.dumps({"what": "agentlightning", "runners": runners} | found), flush=True)
    if options.crewai:
        found = measure(CREWAI, 8, 16)
        print(json.dumps({"what": "agentrl, CrewAI imported", "runners": 8} | found), flush=True)


if __name__ == "__main__":
    main()
