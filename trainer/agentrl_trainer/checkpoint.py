"""Write and read checkpoints that are whole or do not exist.

Knows files, tensors and JSON; not what they mean. Nothing is pickled: tensors (weights, optimizer
moments, the torch random state) are safetensors, everything else JSON.

    <root>/step-00000012/
        manifest.json           size and sha256 of every other file; written last
        meta.json               the caller's ``meta``, and the python and numpy random states
        tensors.safetensors     the caller's tensors, and the torch random states

A checkpoint is written to a hidden folder beside it, synced, and renamed. One writer at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

Json = dict[str, Any]

_MANIFEST, _META, _TENSORS = "manifest.json", "meta.json", "tensors.safetensors"
_PREFIX = "step-"
_STAGING = ".tmp-"  # being written, or left by a writer that died
_TRASH = ".old-"  # being deleted
_SUPERSEDED = "superseded-"  # newer than what a resumed run wrote; never read, never deleted
_RNG = "__rng__/"
_PYTHON = ("version", "internal", "gauss")
_NUMPY = ("algorithm", "keys", "position", "has_gauss", "gauss")


@dataclass(frozen=True, slots=True)
class Rng:
    """The random states of the process: python's, numpy's global one, torch's per device."""

    python: Json
    numpy: Json
    torch: dict[str, Tensor]  # "cpu", "cuda:0", ..., "mps"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    tensors: dict[str, Tensor]
    meta: Json
    rng: Rng


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest checkpoint of use, and the newer ones that are not, each with its fault."""

    checkpoint: Checkpoint | None
    torn: dict[Path, str]


def save_checkpoint(
    root: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    keep: int = 2,
    keep_step: int | None = None,
) -> Path:
    """Write checkpoint ``step`` with the current random states; keep the ``keep`` newest, and
    ``keep_step``.

    A checkpoint of the same step (from before a resume) is replaced. Later ones belong to a history
    that the run has left: they are renamed, and ``latest_checkpoint`` ignores them. ``meta`` must
    be JSON.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must not be negative and keep be at least 1: {step}, {keep}")
    return capture(step, tensors=tensors, meta=meta).write(root, keep=keep, keep_step=keep_step)


@dataclass(frozen=True, slots=True)
class Captured:
    """A checkpoint that is not written yet: copies, so that training may go on."""

    step: int
    tensors: dict[str, Tensor]
    state: Json

    def write(self, root: str | Path, *, keep: int = 2, keep_step: int | None = None) -> Path:
        """Write it as ``save_checkpoint`` does."""
        root = Path(root)
        for prefix in (_STAGING, _TRASH):
            for left in root.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        final = root / f"{_PREFIX}{self.step:08d}"
        with atomic_folder(final) as staging:
            save_file(self.tensors, str(staging / _TENSORS))
            (staging / _META).write_text(json.dumps(self.state))
            files = (staging / _META, staging / _TENSORS)
            manifest = {p.name: {"size": p.stat().st_size, "sha256": _sha256(p)} for p in files}
            (staging / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        whole = 0
        for at, folder in _steps(root):
            if at > self.step:
                os.rename(folder, root / f"{_SUPERSEDED}{folder.name}-{uuid.uuid4().hex[:8]}")
            elif whole >= keep and at != keep_step:
                shutil.rmtree(_discard(folder), ignore_errors=True)
            else:
                # No run could resume from a torn one. Hashing all of them each time costs too much.
                whole += fault_of(folder, hashes=False) is None
        return final


def capture(step: int, *, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Captured:
    """Copy what a checkpoint holds, and the current random states."""
    rng = capture_rng()
    everything = {**tensors, **{_RNG + device: state for device, state in rng.torch.items()}}
    # safetensors refuses tensors that share memory.
    own = {name: value.detach().cpu().contiguous().clone() for name, value in everything.items()}
    state = {"step": step, "meta": meta, "rng": {"python": rng.python, "numpy": rng.numpy}}
    return Captured(step, own, state)


def latest_checkpoint(root: str | Path, unknown_after: int | None = None) -> Latest:
    """Verify checkpoints from the newest down, sizes and hashes, and read the first whole one.

    Random states are not applied: see ``restore_rng``.

    Args:
        unknown_after: the last step that the caller's own records hold. Later ones are passed over.
    """
    torn: dict[Path, str] = {}
    for step, folder in _steps(Path(root)):
        fault = fault_of(folder)
        if fault is None and unknown_after is not None and step > unknown_after:
            fault = f"its run's records end at step {unknown_after}"
        if fault:
            torn[folder] = fault
            continue
        state = json.loads((folder / _META).read_text())
        tensors = load_file(str(folder / _TENSORS))
        of_torch = {k: tensors.pop(k) for k in list(tensors) if k.startswith(_RNG)}
        rng = Rng(**state["rng"], torch={k.removeprefix(_RNG): x for k, x in of_torch.items()})
        return Latest(Checkpoint(step, tensors, state["meta"], rng), torn)
    return Latest(None, torn)


def fault_of(folder: Path, *, hashes: bool = True) -> str | None:
    """Name what is wrong with a checkpoint; None if it is whole. ``hashes``: compare content."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        files = {str(name): (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except FileNotFoundError:
        return f"no {_MANIFEST}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"unreadable {_MANIFEST}: {error}"
    if missing := {_META, _TENSORS} - files.keys():
        return f"{_MANIFEST} does not list {sorted(missing)}"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if hashes and _sha256(path) != digest:
            return f"{name} has other content than when it was written"
    return None


def capture_rng() -> Rng:
    """Read the process's random states."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    python: Json = dict(zip(_PYTHON, random.getstate(), strict=True))
    legacy: Any = np.random.get_state()
    numpy = dict(zip(_NUMPY, legacy, strict=True)) | {"keys": legacy[1].tolist()}
    return Rng(python, numpy, states)


def restore_rng(rng: Rng) -> None:
    """Restore the process's random states. Devices that this machine lacks are left out."""
    version, internal, gauss = (rng.python[name] for name in _PYTHON)
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(rng.numpy[name] for name in _NUMPY))
    for device, state in rng.torch.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif device == "mps":
            if torch.backends.mps.is_available():
                torch.mps.set_rng_state(state)
        elif int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``final``, which then takes its place, synced to disk.

    Readers see the old folder, none, or the whole new one. After an exception nothing has changed.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    staging = _beside(final, _STAGING)
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            _fsync(path)
        # rename() cannot replace a folder with content. Dying between the two renames leaves none.
        old = _discard(final) if final.exists() else None
        os.rename(staging, final)
        _fsync(final.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, SafetensorError):  # which it makes of an OSError
            raise OSError(f"{final} cannot be written: {error}") from error
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _discard(folder: Path) -> Path:
    """Rename a folder out of readers' sight; returns where it is, to be deleted."""
    trash = _beside(folder, _TRASH)
    os.rename(folder, trash)
    return trash


def _beside(folder: Path, prefix: str) -> Path:
    return folder.parent / f"{prefix}{folder.name}-{uuid.uuid4().hex[:8]}"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _steps(root: Path) -> list[tuple[int, Path]]:
    """List checkpoint folders by step, newest first."""
    paths = root.glob(f"{_PREFIX}*")
    numbered = [(path.name.removeprefix(_PREFIX), path) for path in paths]
    return sorted(((int(n), path) for n, path in numbered if n.isdecimal()), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
