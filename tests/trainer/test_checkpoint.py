from __future__ import annotations

import contextlib
import json
import os
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_trainer import checkpoint
from agentrl_trainer.checkpoint import Checkpoint, atomic_folder, latest_checkpoint, restore_rng

TENSORS = {"weights/a": torch.arange(6.0).reshape(2, 3), "step/a": torch.tensor(3)}


def save(root: Path, step: int, **options: Any) -> Path:
    options = {"tensors": TENSORS, "meta": {"seen": step}, **options}
    return checkpoint.save_checkpoint(root, step, **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def load(root: Path) -> Checkpoint:
    found = latest_checkpoint(root)
    assert found.checkpoint is not None
    assert found.torn == {}
    return found.checkpoint


def test_there_and_back(tmp_path: Path) -> None:
    meta = {"step": 4, "nested": {"list": [1, 2.5, None, "ü"]}}
    shared = torch.arange(4.0)
    tensors = {**TENSORS, "b": shared, "c": shared[1:]}  # two that share memory
    save(tmp_path, 4, meta=meta, tensors=tensors)
    assert names(tmp_path) == ["step-00000004"]
    loaded = load(tmp_path)
    assert (loaded.step, loaded.meta) == (4, meta)
    assert loaded.tensors.keys() == tensors.keys()
    for key, value in tensors.items():
        torch.testing.assert_close(loaded.tensors[key], value, rtol=0, atol=0)


def draw() -> list[float]:
    of_numpy = [np.random.rand(), np.random.normal()]
    return [random.random(), random.gauss(0, 1), *of_numpy, float(torch.rand(()))]


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    draw()  # leaves a spare gaussian in python's and numpy's generators
    save(tmp_path, 1)
    expected = [draw(), draw()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    restore_rng(load(tmp_path).rng)
    assert [draw(), draw()] == expected


def test_the_last_k_are_kept_and_torn_ones_do_not_count(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / "meta.json").unlink()
    save(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    for step, keep in ((6, 0), (-1, 1)):
        with pytest.raises(ValueError, match="not be negative and keep be at least 1"):
            save(tmp_path, step, keep=keep)


def test_one_step_stays_beside_the_newest(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, keep=2, keep_step=2)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert load(tmp_path).step == 100_000_000


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere").checkpoint is None
    (tmp_path / "step-elephant").mkdir()
    (tmp_path / ".tmp-step-00000009-abc").mkdir()
    assert latest_checkpoint(tmp_path).checkpoint is None


def flip_a_bit(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def forget_an_entry(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["tensors.safetensors"]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flip_a_bit, "other content"),
        (lambda f: os.truncate(f / "tensors.safetensors", 100), "100 bytes instead of"),
        (lambda f: os.truncate(f / "manifest.json", 100), "unreadable manifest"),
        (forget_an_entry, "does not list"),
        (lambda f: (f / "manifest.json").write_text("[1]"), "unreadable manifest"),
        (lambda f: (f / "manifest.json").unlink(), "no manifest"),
        (lambda f: (f / "meta.json").unlink(), "meta.json is missing"),
    ],
)
def test_torn_checkpoints_are_passed_over_and_named(
    tmp_path: Path, damage: Any, fault: str
) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    latest = latest_checkpoint(tmp_path)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    ((torn, said),) = latest.torn.items()
    assert torn.name == "step-00000002"
    assert fault in said


def test_a_checkpoint_that_the_runs_records_do_not_know_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    latest = latest_checkpoint(tmp_path, unknown_after=2)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 2
    assert {path.name: fault for path, fault in latest.torn.items()} == {
        "step-00000003": "its run's records end at step 2"
    }


def test_a_resumed_run_leaves_its_later_history(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=5)
    save(tmp_path, 11, keep=5)
    assert load(tmp_path).step == 11
    assert sum(name.startswith("superseded-") for name in names(tmp_path)) == 2


def test_a_failure_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError):
        save(tmp_path, 2, meta={"not json": object()})
    with pytest.raises(OSError, match="disk full"), atomic_folder(tmp_path / "step-00000001"):
        raise OSError("disk full")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:  # safetensors has an error of its own
        with pytest.raises(OSError, match="step-00000002 cannot be written"):
            save(tmp_path, 2, tensors={"large": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["step-00000001"]
    assert load(tmp_path).step == 1


class Killed(BaseException):
    pass


def test_dying_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die at each rename and sync in turn, without any clean-up, as kill -9 would."""
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_a, **_k: None)
    left = 0

    def dying(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*arguments)

        return call

    for deaths in range(100):
        root = tmp_path / f"run-{deaths}"
        save(root, 1)
        save(root, 2)
        left = deaths
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(checkpoint.os, "rename", dying(os.rename))
            patch.setattr(checkpoint.os, "fsync", dying(os.fsync))
            save(root, 2, meta={"again": True})
        assert load(root).step in (1, 2)
        if left >= 0:
            break
    assert deaths > 5


def test_a_repeated_step_replaces_and_left_overs_are_swept_up(tmp_path: Path) -> None:
    save(tmp_path, 1, meta={"take": 1})
    for left_over in (".tmp-step-00000001-dead", ".old-step-00000001-dead"):
        (tmp_path / left_over).mkdir()
    save(tmp_path, 1, meta={"take": 2})
    assert load(tmp_path).meta == {"take": 2}
    assert names(tmp_path) == ["step-00000001"]
