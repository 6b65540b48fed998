"""A step's file of tokens: written, read by call, pruned and dropped.

That its numbers are the learner's, after a resume as well, ``training/test_kill_and_resume`` shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from call_records import make

from agentrl.runs import token_records
from agentrl.runs.folder import RunFolder
from agentrl_trainer.data.batch_assembly import SeenRow, StepBatch
from agentrl_trainer.data.training_row import to_training_row, with_extra
from agentrl_trainer.data.trajectories import Trajectory

FIRST = make("first", [1, 2], [3, 4])
SECOND = make("second", [1, 2, 3, 4, 5], [6, 7, 8], seq=1)  # continues the first: one row
ALONE = make("alone", [9], [3])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def save(folder: RunFolder, step: int, *, warm: bool = False) -> None:
    """Save a step of two rows, whose log-probs tell row and place: -R.0P."""
    batch = StepBatch()
    for number, calls in enumerate(([FIRST, SECOND], [ALONE]), 1):
        row = to_training_row(
            Trajectory("policy", calls), {"first": 0.5, "second": -0.5, "alone": 2.0}
        )
        if warm:
            [row] = with_extra([row], temperature=[[0.7] * len(row.tokens)])
        places = np.arange(1, len(row.tokens), dtype=np.float32)
        ids = [call.id for call in calls]
        batch.first_pass.append(SeenRow(row, ids, -number - places / np.float32(100)))
    token_records.save_step(folder, step, [ALONE, SECOND, FIRST], [StepBatch(), batch])


def test_each_call_of_a_row_gets_its_own_tokens(folder: RunFolder) -> None:
    save(folder, 12)
    for name, trainer, advantage in (
        ("first", [-1.02, -1.03], [0.5, 0.5]),
        ("second", [-1.05, -1.06, -1.07], [-0.5] * 3),
        ("alone", [-2.01], [2.0]),
    ):
        seen = token_records.read_call(folder, 12, name)
        assert seen is not None
        assert seen.trainer.tolist() == pytest.approx(trainer)
        assert seen.advantage.tolist() == advantage
        assert seen.sampler is None  # the store has it
    path = folder.tokens / "000012.npz"
    assert path.stat().st_mode & 0o077 == 0


def test_at_another_temperature_it_keeps_what_ratios_are_taken_against(folder: RunFolder) -> None:
    save(folder, 1, warm=True)
    seen = token_records.read_call(folder, 1, "second")
    assert seen is not None
    assert seen.sampler is not None
    assert seen.sampler.tolist() == pytest.approx(SECOND.response_logprobs)


def test_a_call_or_a_step_that_is_not_kept_is_none(folder: RunFolder) -> None:
    assert token_records.read_call(folder, 1, "first") is None
    save(folder, 1)
    assert token_records.read_call(folder, 1, "other") is None
    (folder.tokens / "000001.npz").write_bytes(b"PK torn")
    assert token_records.read_call(folder, 1, "first") is None


def test_a_resumed_run_drops_later_steps_and_a_long_one_the_oldest(folder: RunFolder) -> None:
    for step in (1, 2, 3, 1_000_000):
        save(folder, step)
    token_records.drop_after(folder, 3)
    assert sorted(p.name for p in folder.tokens.iterdir()) == [f"00000{i}.npz" for i in (1, 2, 3)]
    token_records.prune(folder, 2)
    assert token_records.read_call(folder, 1, "first") is None
    assert token_records.read_call(folder, 2, "first") is not None


def test_a_step_that_trained_nothing_has_no_file(folder: RunFolder) -> None:
    token_records.save_step(folder, 1, [FIRST], [StepBatch()])
    assert not folder.tokens.exists()
