"""A step in numbers: what each epoch saw, and the time of each part."""

from __future__ import annotations

from typing import Any

import pytest
from documented_metrics import documented, undocumented

from agentrl.rollout_stream import StepRollouts
from agentrl.step_row import step_row
from agentrl_tracer.schemas import Outcomes
from agentrl_trainer.adapters import AdapterBatches
from agentrl_trainer.batches import Datum
from agentrl_trainer.learner import AdamParams, Learner, StepStats
from agentrl_trainer.model import load_base
from agentrl_trainer.step import StepBatch

SECONDS = {"rollouts": 2.0, "update": 1.0, "prepare": 0.1, "forward_backward": 0.6}


def learned(epochs: int) -> list[StepStats]:
    """Passes of PPO over two tokens, one good and one bad, with steps that leave the bounds."""
    learner = Learner(load_base("agentrl-tiny", device="cpu"), rank=4, adam=AdamParams(lr=5e-3))
    rows = [
        Datum([5, 6, token], [False, False, True], [0.0] * 3, [0.0, 0.0, advantage])
        for token, advantage in ((7, 1.0), (8, -1.0))
    ]
    sampled = learner.forward(rows)
    rows = [
        Datum(row.tokens, row.mask, lp, row.advantages)
        for row, lp in zip(rows, sampled, strict=True)
    ]
    return [learner.step(rows, "ppo") for _ in range(epochs)]


def row_of(passes: dict[str, list[StepStats]]) -> dict[str, Any]:
    return step_row(
        3,
        taken=StepRollouts([], 0, 0, 0, 0.0),
        calls=[],
        batches=AdapterBatches({name: StepBatch() for name in passes}, StepBatch()),
        passes=passes,
        outcomes=Outcomes({}, {}, {}),
        seconds=SECONDS,
        learning_rate=1e-3,
        max_staleness=0,
    )


@pytest.fixture(scope="module")
def four() -> list[StepStats]:
    return learned(4)


def test_the_last_epoch_tells_what_was_clipped(four: list[StepStats]) -> None:
    row = row_of({"policy": four})
    # Before any update the policy is the one that sampled: nothing could be clipped.
    assert row["clip_fraction"] == 0.0
    assert row["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert row["last_epoch/clip_fraction"] == four[-1].clip_fraction > 0
    assert row["last_epoch/ratio/max"] == four[-1].ratio_max > 1.2
    assert row["last_epoch/grad_norm"] == four[-1].grad_norm
    assert row["entropy"] == four[0].entropy != row["last_epoch/entropy"]
    assert undocumented([row]) == {}


def test_of_one_epoch_nothing_is_said_twice(four: list[StepStats]) -> None:
    row = row_of({"policy": four[:1]})
    assert not [name for name in row if name.startswith("last_epoch/")]
    assert row["loss"] == four[0].loss


def test_each_adapter_has_its_own(four: list[StepStats]) -> None:
    row = row_of({"asker": four, "answerer": []})
    assert row["asker/last_epoch/clip_fraction"] == four[-1].clip_fraction
    assert "answerer/loss" not in row
    assert undocumented([row], ["asker", "answerer"]) == {}


def test_seconds_are_told_by_what_they_went_into(four: list[StepStats]) -> None:
    row = row_of({"policy": four})
    found = {name: row[f"seconds/{name}"] for name in SECONDS}
    assert found == SECONDS


def test_the_page_names_nothing_twice() -> None:
    names = documented()
    assert len(names) == len(set(names)) > 60
