"""What ``agentrl eval`` says of its successes: rates, intervals, pass@k."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from rich.console import Console
from store_records import claimed, record_answer

from agentrl.cli.eval import evaluation_report, scores_of
from agentrl.history.evaluations import Outcome, stored_outcomes
from agentrl.history.sources import open_run
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose
from agentrl_tracer.store import Store


def test_an_evaluation_that_is_all_right_is_not_certain() -> None:
    found = scores_of({task: Outcome(task, 2, 2, f"r{task}") for task in range(24)})
    assert (found["accuracy"], found["pass_at"]) == (1.0, {1: 1.0, 2: 1.0})
    assert found["interval"] == pytest.approx((0.862, 1.0), abs=5e-4)
    assert found["pass_at_interval"] == {1: found["interval"], 2: found["interval"]}
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(evaluation_report(found | {"reward": None}, {}))
    assert console.export_text().count("95 % interval 86.2% to 100.0%") == 3


def test_successes_are_counted_by_task() -> None:
    found = scores_of({0: Outcome(0, 1, 2, "r0"), 1: Outcome(1, 1, 2, "r2")})
    assert (found["tasks"], found["rollouts"], found["successes"]) == (2, 4, 2)
    assert (found["accuracy"], found["pass_at"]) == (0.5, {1: 0.5, 2: 1.0})
    alone = scores_of({0: Outcome(0, 1, 1, "r0")})
    assert (alone["accuracy"], alone["pass_at"]) == (1.0, {})


def test_a_rollout_without_reward_is_no_success(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", "eval")
    with contextlib.closing(Store(str(folder.store))) as store:
        run_id = store.create_run("run", "eval", {})
        folder.write(folder.run_id, run_id)
        folder.write_json(folder.config, {})
        record_answer(store, run_id, Purpose.EVAL, 0, ("Who?", "Me."), 1.0)
        [task] = {one.task_id for one in store.rollouts(run_id)}
        store.enqueue(run_id, [NewRollout(task, "eval-0", Purpose.EVAL, 0, 1, seed=1)])
        store.end_attempt(claimed(store).attempt_id, AttemptState.SUCCEEDED)
    with contextlib.closing(open_run(folder)) as run:
        [outcome] = stored_outcomes(run)[0].values()
    assert (outcome.successes, outcome.samples) == (1, 2)
