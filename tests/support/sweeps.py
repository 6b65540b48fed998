"""``agentrl sweep`` as a subprocess on a small task, and studies of sweeps that never ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from agentrl.config.commands import SweepConfig
from agentrl.runs.folder import RunFolder
from agentrl.sweep.study import SweepResults, open_study, read_results

_AGENTS = Path(__file__).parent / "train_agents.py"


def sweep_config(space: dict[str, Any], steps: int = 9, **sweep: Any) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            "agent": {"entrypoint": "agent.py:agent", "tasks": "tasks.jsonl"},
            "learning": {"alpha": 16},
            "run": {"name": "mine", "steps": steps},
            "sweep": {"space": space, **sweep},
        }
    )


def opened(folder: Path, how: SweepConfig) -> Any:
    folder.mkdir(exist_ok=True)
    return open_study(RunFolder(folder), how, how.run.steps or 0)


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

    def results(self, name: str = "small") -> SweepResults:
        return read_results(self.root, name)

    def trainings(self) -> list[int]:
        """Return the processes that train a trial now."""
        table = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True
        )
        lines = [line.split(None, 1) for line in table.stdout.splitlines()]
        mine = ("agentrl.sweep.process", str(self.root))
        return [int(pid) for pid, said in lines if all(part in said for part in mine)]


def record_sweep(root: Path, name: str = "known") -> SweepResults:
    """Record the study of a sweep of 12 trials: complete, pruned, and one of each other state."""
    rates = {"low": 1e-4, "high": 1e-2, "log": True}
    losses = ["ppo", "<script>window.hacked = 1</script>"]
    space = {"learning.learning_rate": rates, "learning.rank": [4, 8], "algorithm.loss": ["ppo"]}
    kinds = [FloatDistribution(**rates), *map(CategoricalDistribution, ([4, 8], losses))]
    study = opened(root / name, sweep_config(space, trials=12))
    states = [*["COMPLETE"] * 8, "PRUNED", "PRUNED", "FAIL", "RUNNING"]
    for number, state in enumerate(states):
        about = {"runs": [f"{name}-{number:03d}"], "spread": 0.01}
        about |= {"reason": "error: <b>no memory</b>"} if state == "FAIL" else {}
        values = [1e-4 * 1.5**number, 4 + 4 * (number % 2), losses[number % 2]]
        trial = create_trial(
            state=TrialState[state], value=number / 12 if number < 10 else None, user_attrs=about,
            params=dict(zip(space, values, strict=True)), intermediate_values={4: number / 12},
            distributions=dict(zip(space, kinds, strict=True)),
        )  # fmt: skip
        study.add_trial(trial)
    return read_results(root, name)
