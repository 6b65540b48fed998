"""What the trainer saw of each sampled token: ``runs/NAME/tokens/000012.npz``, a file a step.

The arrays of a file: ``calls`` (ids), ``offsets`` (the tokens of call i are from ``offsets[i]`` to
``offsets[i + 1]``), and a float32 for each token under each field of ``TrainedTokens``. Knows
neither torch nor stores.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from agentrl.runs.folder import RunFolder
    from agentrl_tracer.schemas import Call
    from agentrl_trainer.data.batch_assembly import StepBatch

Floats = NDArray[np.float32]


class TrainedTokens(NamedTuple):
    """What the first epoch of a step saw of a call's tokens, before its update; each is [tokens].

    Log-probs are at the temperature that the tokens were sampled at.
    """

    trainer: Floats
    advantage: Floats
    sampler: Floats | None
    """What ratios are taken against. None: what the sampler reported, which is at temperature 1."""


def save_step(
    folder: RunFolder, step: int, calls: Sequence[Call], batches: Iterable[StepBatch]
) -> None:
    """Write the file of a step, or replace it; nothing if no call trained."""
    rows = [row for batch in batches for row in batch.first_pass]
    if not rows:
        return
    known = {call.id: call for call in calls}
    columns: dict[str, list[Floats]] = {"trainer": [], "advantage": [], "sampler": []}
    for row, ids, trainer in rows:
        of = {"trainer": trainer, "advantage": row.advantages[1:], "sampler": row.logprobs[1:]}
        for call in (known[name] for name in ids):
            start = len(call.prompt_ids) - 1  # a row's first token has no log-prob
            for name, parts in columns.items():
                parts.append(np.asarray(of[name][start : start + len(call.response_ids)], "f4"))
    if not any("temperature" in seen.row.extra for seen in rows):
        del columns["sampler"]
    arrays: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
    arrays["calls"] = np.array([name for seen in rows for name in seen.calls], np.bytes_)
    arrays["offsets"] = np.cumsum([0, *map(len, columns["trainer"])], dtype=np.int64)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    folder.tokens.mkdir(mode=0o700, exist_ok=True)
    folder.write(_path(folder, step), file.getvalue())


def read_call(folder: RunFolder, call: Call) -> TrainedTokens | None:
    """Return what its step saw of a call; None if none trained on it, or that is not kept."""
    if call.trained_step is None:
        return None
    try:
        with np.load(_path(folder, call.trained_step)) as file:
            [at] = np.flatnonzero(file["calls"] == call.id.encode())
            some = slice(*file["offsets"][at : at + 2])
            sampler = file["sampler"][some] if "sampler" in file else None
            return TrainedTokens(file["trainer"][some], file["advantage"][some], sampler)
    except (OSError, LookupError, ValueError, zipfile.BadZipFile):  # pruned, or of another call
        return None


def drop_after(folder: RunFolder, step: int) -> None:
    """Delete the files of steps that a resumed run makes again."""
    for path in _files(folder):
        if int(path.stem) > step:
            path.unlink(missing_ok=True)


def prune(folder: RunFolder, keep: int) -> None:
    """Delete all files but those of the ``keep`` newest steps."""
    for path in _files(folder)[:-keep]:
        path.unlink(missing_ok=True)


def _path(folder: RunFolder, step: int) -> Path:
    return folder.tokens / f"{step:06d}.npz"


def _files(folder: RunFolder) -> list[Path]:
    found = [path for path in folder.tokens.glob("*.npz") if path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))
