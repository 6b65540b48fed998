"""What the trainer saw of each sampled token: ``runs/NAME/tokens/000012.npz``, a file a step.

The arrays of a file: ``calls`` (ids), ``offsets`` (the tokens of call i are from ``offsets[i]`` to
``offsets[i + 1]``), and a float32 for each token under each field of ``TrainedTokens``. Knows
neither torch nor stores.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.process_privacy import open_private

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
    warm = any("temperature" in seen.row.extra for seen in rows)
    columns: dict[str, list[Floats]] = {"trainer": [], "advantage": []}
    columns |= {"sampler": []} if warm else {}
    for row, ids, trainer in rows:
        of = {"trainer": trainer, "advantage": row.advantages[1:], "sampler": row.logprobs[1:]}
        for call in (known[name] for name in ids):
            start = len(call.prompt_ids) - 1  # a row's first token has no log-prob
            for name, parts in columns.items():
                parts.append(np.asarray(of[name][start : start + len(call.response_ids)], "f4"))
    arrays: dict[str, NDArray[Any]] = {
        name: np.concatenate(parts) for name, parts in columns.items()
    }
    arrays["calls"] = np.array([name for seen in rows for name in seen.calls], np.bytes_)
    arrays["offsets"] = np.cumsum([0, *map(len, columns["trainer"])], dtype=np.int64)
    path = _path(folder, step)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compresslevel=1) as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, array)
            # Log-probs hardly shrink, and take long to try; advantages repeat.
            how = zipfile.ZIP_STORED if name in ("trainer", "sampler") else zipfile.ZIP_DEFLATED
            archive.writestr(f"{name}.npy", data.getbuffer(), how)
    with open_private(temporary) as out:
        out.write(file.getbuffer())
    os.replace(temporary, path)


def read_call(folder: RunFolder, step: int, call_id: str) -> TrainedTokens | None:
    """Return what a step saw of a call that it trained on; None if that is not kept."""
    try:
        with np.load(_path(folder, step), allow_pickle=False) as file:
            at = np.flatnonzero(file["calls"] == call_id.encode())
            start, end = file["offsets"][at[0] : at[0] + 2]
            sampler = file["sampler"][start:end] if "sampler" in file else None
            return TrainedTokens(file["trainer"][start:end], file["advantage"][start:end], sampler)
    except (OSError, LookupError, ValueError, zipfile.BadZipFile):  # pruned, or of another call
        return None


def drop_after(folder: RunFolder, step: int) -> None:
    """Delete the files of steps that a resumed run makes again."""
    for made, path in _files(folder).items():
        if made > step:
            path.unlink(missing_ok=True)


def prune(folder: RunFolder, keep: int) -> None:
    """Delete all files but those of the ``keep`` newest steps."""
    for path in list(_files(folder).values())[:-keep]:
        path.unlink(missing_ok=True)


def _path(folder: RunFolder, step: int) -> Path:
    return folder.tokens / f"{step:06d}.npz"


def _files(folder: RunFolder) -> Mapping[int, Path]:
    found = (path for path in folder.tokens.glob("*.npz") if path.stem.isdigit())
    return dict(sorted((int(path.stem), path) for path in found))
