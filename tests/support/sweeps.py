"""``agentrl sweep`` as a subprocess on a small task, and records of sweeps that never ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from agentrl.runs.folder import RunFolder
from agentrl.sweep.record import SweepRecord, TrialRow, read_record, write_record
from agentrl.sweep.space import Dimension

_AGENTS = Path(__file__).parent / "train_agents.py"


class SmallSweep:
    """A sweep of an agent of ``train_agents``: runs of 3 steps of 2 groups of 2 rollouts."""

    def __init__(self, folder: Path, agent: str = "mixed", **sweep: Any) -> None:
        self.root, self.file = folder / "runs", folder / "sweep.toml"
        (folder / "tasks.jsonl").write_text("".join(f"{json.dumps({'n': n})}\n" for n in range(20)))
        settings = {
            "agent": {"entrypoint": f"{_AGENTS}:{agent}", "tasks": str(folder / "tasks.jsonl")},
            "rollouts": {"batch_size": 2, "group_size": 2, "runners": 1, "lease": 2},
            "run": {"folder": str(self.root), "steps": 3},
            "sweep": sweep,
        }
        self.file.write_text(tomli_w.dumps(settings))

    def start(self, name: str = "small") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "agentrl", "sweep", "--config", self.file, "--name", name],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def record(self, name: str = "small") -> SweepRecord:
        return read_record(self.root, name)

    def trainings(self) -> list[int]:
        """Return the processes that train a trial now."""
        table = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True
        )
        lines = [line.split(None, 1) for line in table.stdout.splitlines()]
        mine = ("agentrl.sweep.process", str(self.root))
        return [int(pid) for pid, said in lines if all(part in said for part in mine)]


def record_sweep(root: Path, name: str = "known") -> SweepRecord:
    """Write the record of a sweep of 12 trials: complete, pruned, and one of each other state."""
    space = [
        Dimension("learning.learning_rate", low=1e-4, high=1e-2, log=True),
        Dimension("learning.rank", choices=(4, 8)),
        Dimension("algorithm.loss", choices=("ppo", "<script>window.hacked = 1</script>")),
    ]
    rows: list[TrialRow] = []
    for number in range(12):
        params = {
            one.name: one.choices[number % 2] if one.choices else 1e-4 * 1.5**number
            for one in space
        }
        state = "pruned" if number > 7 else "complete"
        runs = [f"{name}-{number:03d}"]
        rows.append(TrialRow(number, state, params, runs, number / 12, 0.01, step=4))
    rows[10].state, rows[10].value, rows[10].reason = "failed", None, "error: <b>no memory</b>"
    rows[11].state = "running"
    record = SweepRecord(
        name, "eval/accuracy", "maximize", 12, [one.recorded() for one in space], rows,
        {"learning.learning_rate": 0.8, "learning.rank": 0.2}, f"agentrl train --config {name}",
    )  # fmt: skip
    folder = RunFolder(root / name)
    folder.root.mkdir(parents=True)
    write_record(folder, record)
    return record
