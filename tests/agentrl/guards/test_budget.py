"""What a run has spent, over resumes, and the step that does not fit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from call_records import make
from store_records import claimed, start_run

from agentrl.config.settings.run import GuardSettings
from agentrl.guards.budget import Budget, BudgetSpentError, Spent
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Call, Purpose
from agentrl_tracer.store import Store

PRICED = {"usage": {"total_tokens": 30}, "cost": 0.25}


def call(name: str, prompt: int, sampled: int, **changes: Any) -> Call:
    return make(name, [1] * prompt, [2] * sampled, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    return folder


def budget(folder: RunFolder, store: Any = None, run_id: str = "run", **limits: Any) -> Budget:
    notes: list[str] = []
    made = Budget(
        GuardSettings(**limits), folder, store, run_id,
        started=time.perf_counter(), ahead=0, note=notes.append,
    )  # fmt: skip
    made.begin(0, evaluated=False)
    made.notes = notes  # type: ignore[attr-defined]
    return made


def test_tokens_and_dollars_count_once_and_over_resumes(folder: RunFolder) -> None:
    first = budget(folder, max_run_tokens=100)
    # Two choices of one prompt, and what another model answered.
    calls = [call("a", 10, 5), call("a#1", 10, 3, choice=1), call("b", 0, 0, seq=1, params=PRICED)]
    first.settle(Purpose.TRAIN, 1, calls)
    spent = budget(folder).spent()
    assert (spent.tokens, spent.dollars) == (18, 0.25)
    assert spent.hours > 0
    assert json.loads(folder.spent.read_text())["tokens"] == 18


def test_a_step_that_would_not_fit_is_not_begun(folder: RunFolder) -> None:
    run = budget(folder, max_run_tokens=100)
    assert run.why_no_step() is None
    run.settle(Purpose.EVAL, 0, [call("a", 10, 10)])
    run.settle(Purpose.TRAIN, 1, [call("b", 10, 20)])
    assert run.why_no_step() is None  # 50 are spent; 30 and 20 may come
    run.settle(Purpose.TRAIN, 2, [call("c", 10, 21)])
    guard, sentence = run.why_no_step() or ("", "")
    assert guard == "guards.max_run_tokens"
    assert sentence == "81 of 100 tokens are spent, and one more step may take 51"


def test_hours_before_a_resume_count(folder: RunFolder, store: Store) -> None:
    folder.spent.write_text('{"hours": 1.5}')
    assert budget(folder, max_hours=1.6).why_no_step() is None
    assert (budget(folder, max_hours=1.4).why_no_step() or [""])[0] == "guards.max_hours"
    with pytest.raises(BudgetSpentError):
        budget(folder, store, max_hours=1.4).watch()
    assert json.loads(folder.spent.read_text())["hours"] >= 1.5


def test_rollouts_under_way_are_given_up_at_the_limit(folder: RunFolder, store: Store) -> None:
    run_id = start_run(store, rollouts=2)  # of step 1
    run = budget(folder, store, run_id, max_run_tokens=40)
    claim = claimed(store)
    of_attempt = {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt_id, "run_id": run_id}
    store.write_calls("boot", [], [call("a", 20, 10, **of_attempt)], 1)
    run.watch()
    store.write_calls("boot", [], [call("b", 20, 10, seq=1, **of_attempt)], 2)
    run.watch()  # too soon for another look
    run._next_look = 0.0
    with pytest.raises(BudgetSpentError) as caught:
        run.watch()
    guard, sentence = caught.value.args
    assert (guard, sentence[:19]) == ("guards.max_run_tokens", "40 tokens are spent")
    # They are counted; and those of a step that is settled are not counted again.
    assert run.spent().tokens == json.loads(folder.spent.read_text())["tokens"] == 60
    run._spent = Spent()
    run.settle(Purpose.TRAIN, 1, [])
    run._next_look = 0.0
    run.watch()


def test_rollouts_that_the_end_of_a_run_cuts_off_are_counted_once(
    folder: RunFolder, store: Store
) -> None:
    run_id = start_run(store, rollouts=2)
    run = budget(folder, store, run_id)
    claim = claimed(store)
    of_attempt = {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt_id, "run_id": run_id}
    store.write_calls("boot", [], [call("a", 20, 10, **of_attempt)], 1)
    run.end()
    run.end()
    assert run.spent().tokens == json.loads(folder.spent.read_text())["tokens"] == 30


def test_a_model_without_a_price_is_told_once(folder: RunFolder) -> None:
    run: Any = budget(folder, max_cost=1.0)
    free = {"usage": {"total_tokens": 30}, "cost": 0.0}
    run.settle(Purpose.TRAIN, 1, [call("a", 0, 0, model="judge", params=free)])
    run.settle(Purpose.TRAIN, 2, [call("b", 0, 0, model="judge", params=free)])
    [note] = run.notes
    assert "LiteLLM knows no price of 'judge'" in note


def test_a_resumed_run_expects_what_its_last_step_took(folder: RunFolder, store: Store) -> None:
    run_id = start_run(store, rollouts=2)  # of step 1
    claim = claimed(store)
    of_attempt = {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt_id, "run_id": run_id}
    store.write_calls("boot", [], [call("a", 20, 10, **of_attempt)], 1)
    folder.spent.write_text('{"tokens": 30}')
    run = budget(folder, store, run_id, max_run_tokens=50)
    assert run.why_no_step() is None
    run.begin(1, evaluated=True)
    guard, sentence = run.why_no_step() or ("", "")
    assert guard == "guards.max_run_tokens"
    assert sentence == "30 of 50 tokens are spent, and one more step may take 30"
    store.cancel(run_id, "the run was resumed", after_step=0, evaluated=True)
    again = budget(folder, store, run_id, max_run_tokens=50)
    again.begin(1, evaluated=True)  # made once more, and those before count no longer
    assert again.why_no_step() is None
