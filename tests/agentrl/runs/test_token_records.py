"""A step's file of tokens: written, read by call, pruned and dropped.

That its numbers are the learner's, after a resume as well, ``training/test_kill_and_resume`` shows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from call_records import make

from agentrl.runs.folder import RunFolder
from agentrl.runs.token_records import drop_after, prune, read_call, save_step
from agentrl_trainer.data.batch_assembly import SeenRow, StepBatch
from agentrl_trainer.data.training_row import to_training_row, with_extra
from agentrl_trainer.data.trajectories import Trajectory

FIRST = make("first", [1, 2], [3, 4], trained_step=1)
SECOND = make("second", [1, 2, 3, 4, 5], [6, 7, 8], seq=1, trained_step=1)  # goes on: one row
ALONE = make("alone", [9], [3], trained_step=1)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(folder: RunFolder, step: int = 1, *, warm: bool = False) -> None:
    """Save a step of two rows, whose log-probs tell row and place: -R.0P."""
    batch, advantages = StepBatch(), {"first": 0.5, "second": -0.5, "alone": 2.0}
    for number, calls in enumerate(([FIRST, SECOND], [ALONE]), 1):
        row = to_training_row(Trajectory("policy", calls), advantages)
        if warm:
            [row] = with_extra([row], temperature=[[0.7] * len(row.tokens)])
        places = np.arange(1, len(row.tokens), dtype=np.float32)
        ids = [call.id for call in calls]
        batch.first_pass.append(SeenRow(row, ids, -number - places / np.float32(100)))
    save_step(folder, step, [ALONE, SECOND, FIRST], [StepBatch(), batch])


def test_each_call_of_a_row_gets_its_own_tokens(folder: RunFolder) -> None:
    save(folder)
    for call, trainer, advantage in (
        (FIRST, [-1.02, -1.03], [0.5, 0.5]),
        (SECOND, [-1.05, -1.06, -1.07], [-0.5] * 3),
        (ALONE, [-2.01], [2.0]),
    ):
        seen = read_call(folder, call)
        assert seen is not None
        assert seen.trainer.tolist() == pytest.approx(trainer)
        assert seen.advantage.tolist() == advantage
        assert seen.sampler is None  # the store has it
    assert (folder.tokens / "000001.npz").stat().st_mode & 0o077 == 0


def test_at_another_temperature_it_keeps_what_ratios_are_taken_against(folder: RunFolder) -> None:
    save(folder, warm=True)
    seen = read_call(folder, SECOND)
    assert seen is not None
    assert seen.sampler is not None
    assert seen.sampler.tolist() == pytest.approx(SECOND.response_logprobs)


def test_a_call_or_a_step_that_is_not_kept_is_none(folder: RunFolder) -> None:
    save_step(folder, 1, [FIRST], [StepBatch()])  # trained nothing
    assert not folder.tokens.exists()
    save(folder)
    assert read_call(folder, replace(FIRST, id="other")) is None
    assert read_call(folder, replace(FIRST, trained_step=None)) is None
    assert read_call(folder, replace(FIRST, trained_step=2)) is None
    (folder.tokens / "000001.npz").write_bytes(b"PK torn")
    assert read_call(folder, FIRST) is None


def test_a_resumed_run_drops_later_steps_and_a_long_one_the_oldest(folder: RunFolder) -> None:
    for step in (1, 2, 3, 1_000_000):
        save(folder, step)
    drop_after(folder, 3)
    assert sorted(path.stem for path in folder.tokens.iterdir()) == ["000001", "000002", "000003"]
    prune(folder, 2)
    assert sorted(path.stem for path in folder.tokens.iterdir()) == ["000002", "000003"]
