"""Evaluations of a recorded run: outcomes, what flipped, fields of the tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from ui_pages import Recorded, fill_indexes

from agentrl.history.evaluations import (
    Outcome,
    by_field,
    differences,
    evaluated_tasks,
    fields,
    held_out,
    indexed_outcomes,
    pair,
    pass_at,
    stored_outcomes,
    success,
)
from agentrl.history.sources import OpenRun, Sources


@pytest.fixture(scope="module")
def runs(recorded: Recorded) -> Iterator[list[OpenRun]]:
    fill_indexes(recorded.root)
    with contextlib.closing(Sources(recorded.root)) as sources:
        yield [sources.open(name) for name in (recorded.name, recorded.other)]


def test_index_and_store_have_the_same_evaluations(runs: list[OpenRun]) -> None:
    for run in runs:
        found = stored_outcomes(run)
        assert found == indexed_outcomes(run)
        assert list(found) == [0, 2, 4]
        metrics = run.store.metrics(run.id, ["eval/accuracy"])
        logged = {step: row["eval/accuracy"] for step, row in metrics.items()}
        assert {step: success(known).rate for step, known in found.items()} == logged


def test_tasks_flip_both_ways(runs: list[OpenRun]) -> None:
    found = stored_outcomes(runs[0])
    paired = pair(found[0], found[4])
    assert paired is not None
    assert [flip.after.task for flip in paired.lost] == [1]
    assert [flip.after.task for flip in paired.gained] == [2, 3, 4]
    assert paired.p_value == pytest.approx(2 * (1 + 4) / 16)  # McNemar's exact test of 3 and 1
    assert paired.difference == pytest.approx(2 / 6)
    assert paired.gained[0].after.rollout in {r.id for r in runs[0].store.rollouts(runs[0].id)}
    assert pair(found[0], {}) is None


def outcomes(**shares: tuple[int, int]) -> dict[str, Outcome]:
    return {name: Outcome(at, *share, name) for at, (name, share) in enumerate(shares.items())}


def test_numbers_of_samples_may_differ() -> None:
    before, after = outcomes(a=(1, 2), b=(0, 2)), outcomes(a=(3, 3), b=(1, 3), c=(1, 1))
    paired = pair(before, after)
    assert paired is not None
    assert (paired.tasks, paired.gained, paired.lost) == (2, [], [])
    assert paired.difference == pytest.approx(2 / 3 - 1 / 4)
    assert paired.p_value == pytest.approx(0.5)  # both rose: 2 of 4 sign flips are as extreme
    assert list(pass_at(before)) == [1, 2]
    assert pass_at(before)[2].rate == 0.5


def test_fields_divide_tasks_and_many_numbers_are_in_quarters(runs: list[OpenRun]) -> None:
    tasks = evaluated_tasks(runs[0])
    assert fields(tasks) == ["level"]  # the others differ in every task
    groups = by_field(tasks, stored_outcomes(runs[0])[4], "level")
    assert {level: len(group) for level, group in groups.items()} == {"easy": 2, "hard": 4}
    assert success(groups["easy"]).rate == 1.0
    many = [{"n": n, "of": {"kind": "x" if n % 2 else True}, "text": f"{n}"} for n in range(40)]
    known = {at: Outcome(at, 1, 1, "r") for at in range(0, 40, 2)}
    assert fields(many) == ["n", "of.kind"]
    assert list(by_field(many, known, "n")) == ["0 to 9", "10 to 19", "20 to 29", "30 to 39"]
    assert by_field(many, known, "nowhere") == {"none": known}
    large = [{"n": 2**60 + n} for n in range(40)]
    assert next(iter(by_field(large, known, "n"))) == f"{2**60} to {2**60 + 9}"
    assert len(by_field(large, known, "n")) == 4


def test_runs_are_compared_on_tasks_with_equal_data(runs: list[OpenRun]) -> None:
    assert differences(runs) == {"learning.learning_rate": [None, 0.02]}
    first, second = held_out(runs, stored_outcomes)
    assert first is not None
    assert second is not None
    assert first.against_first is None
    assert second.against_first is not None
    assert (second.step, second.against_first.tasks) == (4, 6)
    assert [flip.after.task for flip in second.against_first.lost] == [4]
