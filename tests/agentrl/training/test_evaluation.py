"""What ``agentrl eval`` says of its successes: rates, intervals, pass@k."""

from __future__ import annotations

import contextlib
import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console
from store_records import claimed, record_answer

from agentrl.cli.eval import (
    Evaluated,
    by_rows,
    comparison,
    evaluation_report,
    fail_under,
    scores_of,
)
from agentrl.history.evaluations import Outcome, stored_outcomes
from agentrl.history.sources import open_run
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose
from agentrl_tracer.store import Store

SIGNS = list(itertools.product((-1, 1), repeat=5))


def test_an_evaluation_that_is_all_right_is_not_certain() -> None:
    found = scores_of({task: Outcome(task, 2, 2, f"r{task}") for task in range(24)})
    assert (found["accuracy"], found["pass_at"]) == (1.0, {1: 1.0, 2: 1.0})
    assert found["interval"] == pytest.approx((0.862, 1.0), abs=5e-4)
    assert found["pass_at_interval"] == {1: found["interval"], 2: found["interval"]}
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(evaluation_report(found | {"reward": None, "no_reward": 5}, {}))
    said = console.export_text()
    assert said.count("95 % interval 86.2% to 100.0%") == 3
    assert "no reward" in said
    assert "5 rollouts" in said


def test_successes_are_counted_by_task() -> None:
    found = scores_of({0: Outcome(0, 1, 2, "r0"), 1: Outcome(1, 1, 2, "r2")})
    assert (found["tasks"], found["rollouts"], found["successes"]) == (2, 4, 2)
    assert (found["accuracy"], found["pass_at"]) == (0.5, {1: 0.5, 2: 1.0})
    alone = scores_of({0: Outcome(0, 1, 1, "r0")})
    assert (alone["accuracy"], alone["pass_at"]) == (1.0, {})


def test_six_of_fifteen_are_forty_percent() -> None:
    """The mean of 0.2, 0.4 and 0.6 is a little less, and --fail-under 0.4 would fail."""
    found = scores_of({task: Outcome(task, task + 1, 5, f"r{task}") for task in range(3)})
    assert found["accuracy"] == 0.4


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


def evaluated(name: str, successes: list[int]) -> Evaluated:
    found = {task: Outcome(task, right, 2, f"r{task}") for task, right in enumerate(successes)}
    return Evaluated(name, RunFolder(Path(name)), found, {"reward": 0.5})


def test_models_are_compared_with_the_first_on_the_same_tasks() -> None:
    done = [evaluated("base", [0, 0, 0, 1, 2, 2]), evaluated("mine", [2, 2, 2, 2, 2, 0])]
    first, second = comparison(done)
    assert "p" not in first
    assert second["points"] == pytest.approx(100 * 5 / 12)
    assert (second["gained"], second["lost"]) == (3, 1)
    # Differences of 2, 2, 2, 1 and -2 in samples: sums of 5 or more, of the 32 ways to flip signs.
    sums = [sum(d * s for d, s in zip((2, 2, 2, 1, 2), f, strict=True)) for f in SIGNS]
    assert second["p"] == pytest.approx(sum(abs(one) >= 5 for one in sums) / 32)
    tasks = [{"level": "low"}] * 3 + [{"level": "high"}] * 3
    low, high = by_rows(tasks, done, ["level"])[::-1]
    assert (low["field"], low["tasks"]) == ("level = low", 3)
    assert (low["base"].rate, low["mine"].rate) == (0, 1)
    assert (high["base"].rate, high["mine"].rate) == (pytest.approx(5 / 6), pytest.approx(2 / 3))
    alone = by_rows(tasks, done[1:], ["level"])
    assert [row["accuracy"].rate for row in alone] == [pytest.approx(2 / 3), 1]


def test_an_accuracy_below_the_least_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    base, mine = evaluated("base", [0, 0]), evaluated("mine", [2, 1])
    fail_under([mine], None)
    fail_under([base, mine], 0.75)  # base beside an adapter is not held to it
    for done in ([base, mine], [mine]):
        with pytest.raises(SystemExit) as ended:
            fail_under(done, 0.8)
        assert ended.value.code == 1
    with pytest.raises(SystemExit):
        fail_under([base], 0.1)
    assert "mine: accuracy 75.0% is below 80.0%" in capsys.readouterr().out
