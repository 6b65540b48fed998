"""A training that panel judges alone reward: its own model, and one that is always broken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from training_run import Run

import agentrl
from agentrl.config.errors import ConfigError
from agentrl.scoring.trace import read_traces

JUDGES = """
from agentrl.judge import Pairwise, Panel, Relative, Rubric

cut_off = Relative("agentrl-tiny", name="cut_off", max_tokens=1)
tournament = Pairwise("agentrl-tiny", explain=False)
judge = Panel(tournament, cut_off)
rubric = Rubric("agentrl-tiny", {"It says a number.": 1.0}, explain=False)
unknown = Relative("gpt-5")
"""


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    file = tmp_path / "judges.py"
    file.write_text(JUDGES)
    return file


def test_judges_train_and_the_books_balance(judges: Path, tmp_path: Path) -> None:
    more = {"eval_tasks": None, "batch_size": 2, "group_size": 3, "lease": 10}
    run = Run(tmp_path, "thankless", rewards=f"{judges}:judge", **more).finish()
    accounting = run.accounting()
    assert accounting.trained > 0
    answers = [*map(json.loads, (run.folder.root / "judgments.jsonl").read_text().splitlines())]
    assert accounting.skipped["no_rollout"] == len(answers)
    assert sum(row["judge/cut_off/broken"] for row in run.steps()) >= 4
    assert sum(row["judge/pairwise_agentrl_tiny/calls"] for row in run.steps()) >= 4
    assert run.output.count("larger max_tokens") == 1
    with run.store() as store:
        traces = read_traces(store, store.rollouts(run.run_id))
        assert len(traces) == 2 * 2 * 3
        for trace in traces:
            [reward] = trace.rewards
            note = trace.notes["judge.panel"]
            assert reward.value == note["score"] == note["judges"]["pairwise_agentrl_tiny"]
            assert note["judges"]["cut_off"] is None
            assert all(store.call(call_id) for call_id in note["calls"])
    rescore(run, judges)


def rescore(run: Run, judges: Path) -> None:
    """Judge the recorded rollouts: again, which asks for nothing, and by another judge."""
    again, other = f"{judges}:tournament", f"{judges}:rubric"
    command = ["runs", "rescore", str(run.folder.root), "--rewards", again, "--rewards", other]
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_judge = Counter(
        json.loads(line)["judge"]
        for line in (run.folder.root / "judgments.jsonl").read_text().splitlines()
    )
    with run.store() as store:
        for trace in read_traces(store, store.rollouts(run.run_id)):
            earned = {reward.name: reward.value for reward in trace.rewards}
            assert earned["tournament"] == earned["judge"]
            assert earned.get("rubric") == trace.notes["judge.rubric_agentrl_tiny"]["score"]
    asked = sum(row["judge/pairwise_agentrl_tiny/calls"] for row in run.steps())
    assert by_judge["pairwise_agentrl_tiny"] == asked
    assert by_judge["rubric_agentrl_tiny"] > 0
    assert run.accounting().skipped["no_rollout"] == by_judge.total()


def test_a_judge_of_no_known_model_is_refused_at_the_start(judges: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, "thankless", rewards=f"{judges}:unknown")
    said = "judge relative_gpt_5: got model 'gpt-5', which is none of agentrl-tiny"
    with pytest.raises(ConfigError, match=said):
        agentrl.train(*run.arguments[1:])
