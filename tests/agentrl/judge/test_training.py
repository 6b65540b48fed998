"""A training that panel judges alone reward: its own model, and one that is always broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_run import Run

from agentrl.scoring.trace import read_traces

JUDGES = """
from agentrl.judge import Pairwise, Panel, Relative

cut_off = Relative("agentrl-tiny", name="cut_off", max_tokens=1)
judge = Panel(Pairwise("agentrl-tiny", explain=False), cut_off)
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


def test_a_judge_of_no_known_model_is_refused_at_the_start(judges: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, "thankless", rewards=f"{judges}:unknown").finish(code=2)
    assert "judge relative_gpt_5: got model 'gpt-5', which is none of agentrl-tiny" in run.output
    assert "Traceback" not in run.output
