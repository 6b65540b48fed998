"""What ends a run before its last step, and how it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.guards.run_guards import Guards
from agentrl.runs.folder import RunFolder
from agentrl.runs.summary import Ending

STEP = {"reward/mean": 0.2, "reward/std": 0.4, "answers/entropy": 0.5, "answers/cut_off": 0.0}
COLLAPSED = STEP | {"answers/cut_off": 0.9}


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**nested(**{"agent": "x:y", "tasks": "t", "eval_tasks": "t"} | settings))


def guards(
    tmp_path: Path, held_out: dict[int, float], steps: list[dict[str, Any]], **settings: Any
) -> tuple[Guards, list[str]]:
    """The guards of a run that has measured this, after a resume; and what they note."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir(exist_ok=True)
    folder.metrics.unlink(missing_ok=True)
    for step, accuracy in held_out.items():
        folder.append_metrics({"step": step, "eval/accuracy": accuracy})
    for number, row in enumerate(steps, 1):
        folder.append_metrics({"step": number, **row})
    notes: list[str] = []
    made = Guards(
        config(**settings), folder, None, "run",  # type: ignore[arg-type]
        started=time.perf_counter(), learning_rate=0.01, eval_tasks=24, note=notes.append,
    )  # fmt: skip
    made.begin(len(steps))
    return made, notes


def make(run: Guards, row: dict[str, Any], step: int) -> dict[str, Any]:
    """Make a step without answers."""
    made = {"step": step, **row}
    run.after_step(made, [], [], {})
    return made


@pytest.mark.parametrize(
    ("held_out", "ends"),
    [
        ({0: 0.1, 5: 0.5, 10: 0.5}, False),
        ({0: 0.1, 5: 0.5, 10: 0.5, 15: 0.4}, True),  # as good as the best is no improvement
        ({0: 0.1, 5: 0.5, 10: 0.4, 15: 0.6}, False),
        ({}, False),
    ],
)
def test_patience(tmp_path: Path, held_out: dict[int, float], ends: bool) -> None:
    run, _ = guards(tmp_path, held_out, [], patience=2)
    ending = run.why_end()
    assert (ending is not None) == ends
    if ending:
        assert ending.guard == "evaluation.patience"
        assert ending.sentence == "2 evaluations were no better than 50.0% at step 5"
    assert guards(tmp_path, held_out, [])[0].why_end() is None


def test_the_budget_pays_for_judges_of_steps_and_of_evaluations(tmp_path: Path) -> None:
    run, _ = guards(tmp_path, {}, [])
    costs: list[float] = []
    run.budget.settle = lambda *settled: costs.append(settled[3])  # type: ignore[method-assign]
    make(run, STEP | {"judge/a/cost": 1.0, "judge/a/calls": 9.0}, 1)
    of_judges = {"eval/judge/a/cost": 2.0, "eval/judge/b/cost": 0.5, "eval/judge/a/calls": 9.0}
    run.after_evaluation({"step": 1, "eval/accuracy": 0.5, **of_judges}, [])
    assert costs == [1.0, 2.5]


def test_the_goal_is_what_the_newest_evaluation_reaches(tmp_path: Path) -> None:
    assert guards(tmp_path, {0: 0.9, 5: 0.7}, [], stop_at=0.8)[0].why_end() is None
    ending = guards(tmp_path, {0: 0.7, 5: 0.8}, [], stop_at=0.8)[0].why_end()
    assert ending == Ending("evaluation.stop_at", "held-out accuracy 80.0% has reached 80.0%")


def test_an_alert_is_shown_once_until_it_clears_also_after_a_resume(tmp_path: Path) -> None:
    steps = [STEP] * 4
    run, notes = guards(tmp_path, {}, steps)
    for step in (5, 6, 7, 8):
        row = make(run, COLLAPSED, step)
        assert ("alert/truncation" in row) == (step >= 6)
    assert len(notes) == 1
    assert notes[0].startswith("alert/truncation: the share of answers that are cut off rose")
    assert run.why_end() is None  # on_collapse is note
    told = [*steps, *([COLLAPSED] * 2), COLLAPSED | {"alert/truncation": 1.0}]
    run, notes = guards(tmp_path, {}, told)
    make(run, COLLAPSED, 8)
    assert notes == []
    for step in (9, 10, 11):
        make(run, STEP, step)
    for step in (12, 13, 14):
        make(run, COLLAPSED, step)
    assert len(notes) == 1


def ending(tmp_path: Path, held_out: dict[int, float], **settings: Any) -> Ending:
    run, _ = guards(tmp_path, held_out, [*([STEP] * 4), COLLAPSED], **settings)
    make(run, COLLAPSED, 6)
    ended = run.why_end()
    assert ended is not None
    assert ended.guard == "guards.on_collapse"
    return ended


def test_a_collapse_stops_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    ended = ending(tmp_path, {0: 0.1, 3: 0.5}, on_collapse="stop")
    assert ended.sentence == "alert/truncation; step 3 is the best"
    again = ["train", "--resume", f"{tmp_path / 'run'}@3", "--learning-rate", "0.005"]
    assert (ended.again, ended.rolls_back, ended.evaluates) == (again, False, False)
    never = ending(tmp_path, {0: 0.5, 3: 0.5}, on_collapse="stop")
    assert "no evaluated step is better than the model before training" in never.sentence
    assert not never.again
    unknown = ending(tmp_path, {0: 0.5}, on_collapse="stop")
    assert unknown.sentence.startswith(
        "alert/truncation; no trained step has been evaluated: start again"
    )


def test_a_collapse_rolls_the_run_back_so_often(tmp_path: Path) -> None:
    ended = ending(tmp_path, {0: 0.1, 3: 0.5}, on_collapse="roll_back", roll_backs=1)
    assert ended.rolls_back
    assert ended.again[-2:] == ["--guards.roll-backs", "0"]
    left = ending(tmp_path, {0: 0.1, 3: 0.5}, on_collapse="roll_back", roll_backs=0)
    assert not left.rolls_back
    assert left.again


def test_after_going_back_later_policies_are_judged(tmp_path: Path) -> None:
    how = {"on_collapse": "roll_back", "roll_backs": 2}
    run, notes = guards(tmp_path, {0: 0.1, 3: 0.5}, [*([STEP] * 2), COLLAPSED], **how)
    run._folder.append_metrics({"step": 3, "went_back_from": 5})
    run.begin(3)
    for step in (4, 5, 6):  # the first one's answers are those of step 3
        make(run, COLLAPSED, step)
        assert run.why_end() is None
    assert not notes
    make(run, COLLAPSED, 7)
    ended = run.why_end()
    assert ended is not None
    assert ended.rolls_back
    assert "alert/truncation" in notes[0]


@pytest.mark.parametrize("went_back", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"on_collapse": "roll_back"},
        {"on_collapse": "roll_back", "roll_backs": 0},
        {"on_collapse": "stop"},
    ],
)
def test_a_run_that_was_killed_before_it_went_back_does_so(
    tmp_path: Path, how: dict[str, Any], went_back: bool
) -> None:
    told = [*([STEP] * 5), COLLAPSED | {"alert/truncation": 1.0}]
    run, _ = guards(tmp_path, {0: 0.1, 3: 0.5}, told, **how)
    if went_back:
        run._folder.append_metrics({"step": 6, "went_back_from": 8})
        run._collapse = None
        run.begin(6)
    ended = run.why_end()
    does_so = how == {"on_collapse": "roll_back"} and not went_back
    assert (ended is not None and ended.rolls_back) == does_so
    assert does_so or ended is None
    only = [*([STEP] * 5), STEP | {"alert/sampler_trainer_difference": 1.0}]
    assert guards(tmp_path, {0: 0.1, 3: 0.5}, only, **how)[0].why_end() is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patience": 2, "eval_tasks": None}, r"evaluation\.patience: has no effect without"),
        ({"guards.max_cost": 2}, r"guards\.max_cost: has no effect without other models"),
        ({"guards.roll_backs": 1}, r"guards\.roll_backs: has no effect without"),
        (
            {"guards.on_collapse": "roll_back", "eval_tasks": None},
            r"guards\.on_collapse: roll_back goes back to the step with the best",
        ),
    ],
)
def test_what_would_guard_nothing_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**settings)
