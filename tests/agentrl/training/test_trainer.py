"""The loop as a class with replaceable stages, and functions of users in a whole run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from training_run import SUPPORT, Run

import agentrl
from agentrl.config.errors import ConfigError
from agentrl.training.loop import Trainer

pytestmark = pytest.mark.timeout(600)
OWN = """
def numbers(seed):
    return ({"n": seed + n} for n in range(7))

def doubled(rewards, members):
    mean = sum(rewards) / len(rewards)
    return [[2 * (r - mean)] * len(m.turns) for r, m in zip(rewards, members)]

def loss(tokens):
    return -tokens.log_ratio.exp() * tokens.advantages

def weigh(task, rate):
    return 1 + task["n"] % 3 + rate
"""


def own_run(folder: Path, **settings: Any) -> Run:
    folder.mkdir()
    file = folder / "own.py"
    file.write_text(OWN)
    given = {
        "tasks": f"{file}:numbers", "loss": f"{file}:loss", "estimator": f"{file}:doubled",
        "curriculum.weights": f"{file}:weigh", "steps": 3, "batch_size": 2, "runners": 1,
        "rollouts_per_process": 50, "eval_tasks": None, "success_reward": 2.0,
    }  # fmt: skip
    return Run(folder, "mixed", **given | settings)


@pytest.mark.kills
def test_a_killed_run_with_functions_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    whole, killed = own_run(tmp_path / "whole").finish(), own_run(tmp_path / "killed")
    killed.kill_at("rollouts", 3)
    killed.finish()
    assert killed.weights() == whole.weights()
    assert killed.curve() == whole.curve()
    assert [row["tasks/seen"] for row in whole.steps()][-1] >= 3
    for run in (whole, killed):
        assert run.accounting().trained
        settings = run.folder.read_config()
        assert settings["algorithm"]["loss"].endswith("own.py:loss")
        with run.store() as store:  # the generator gave no more than it has
            assert [task["n"] for task in store.tasks(run.run_id, "train")] == list(range(6))


class Selective(Trainer):
    """Learns from the better half, and leaves out short trajectories."""

    seen: ClassVar[list[Any]] = []

    def advantages(self, rewards: Any, members: Any) -> Any:
        middle = sorted(rewards)[len(rewards) // 2]
        return [max(reward - middle, 0.0) for reward in rewards]

    def update(self, step: int, name: str, batch: Any, timer: Any) -> Any:
        self.seen += [(step, name, min(min(row.advantages) for row in batch.rows))]
        return super().update(step, name, batch, timer)


class Loses(Trainer):
    def trajectories(self, calls: Any, rules: Any) -> Any:
        built = super().trajectories(calls, rules)
        return type(built)(built.trajectories[1:], built.skipped)


def arguments(folder: Path, **more: str) -> list[str]:
    (folder / "own.py").write_text(OWN)
    given = {
        "tasks": f"{folder / 'own.py'}:numbers", "steps": "1", "batch-size": "2",
        "group-size": "4", "runners": "1", "rollouts-per-process": "50", "runs": str(folder),
    } | more  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    return [f"{SUPPORT / 'train_agents.py'}:sides", *flags]


def test_stages_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")
    summary = agentrl.train(*arguments(tmp_path), trainer=Selective)
    assert (summary.steps, summary.accounting.adds_up) == (1, True)
    assert [(step, name) for step, name, _ in Selective.seen] == [(1, "policy")]
    assert Selective.seen[0][2] == 0.0  # nothing is pushed down
    [row] = [row for row in summary.folder.read_metrics() if "reward/mean" in row]
    assert row["reward/mean"] == pytest.approx(0)
    assert row["reward/mean/white"] == -row["reward/mean/black"] != 0
    assert row["groups/used"] + row["groups/skipped"] == 4  # white's and black's of two tasks
    assert row["calls/trained"] == 4 * row["groups/used"] > 0
    # A run goes on in this process, where it was started, and leaves the caller where it was.
    folder = summary.folder.root
    monkeypatch.chdir(folder)
    again = agentrl.train("--resume", str(folder), "--steps", "2", trainer=Selective)
    assert (again.steps, Path.cwd()) == (2, folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"Loses: 16 calls of step 1 neither train nor have a"):
        agentrl.train(*arguments(tmp_path, name="loses"), trainer=Loses)


def test_what_does_not_fit_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss: .* defines no 'lost'"):
        agentrl.train(*arguments(tmp_path, loss=f"{tmp_path / 'own.py'}:lost"))
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]
