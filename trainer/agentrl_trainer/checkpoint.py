"""Checkpoints that are whole or do not exist.

Knows files, tensors and JSON; not what they mean. Nothing is pickled: tensors (weights, optimizer
moments, the torch random state) are safetensors, everything else JSON, adapters PEFT folders.

    <root>/step-00000012/
        manifest.json           size and sha256 of every other file; written last
        meta.json               whatever the caller keeps, and the python and numpy random states
        tensors.safetensors     the caller's tensors, and the torch random states
        adapters/<name>/        PEFT folders

All of it is written to a hidden folder beside it, synced, and renamed. One writer at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Json = dict[str, Any]

MANIFEST = "manifest.json"
META = "meta.json"
TENSORS = "tensors.safetensors"
ADAPTERS = "adapters"
_PREFIX = "step-"
_STAGING = ".tmp-"  # being written, or left by a writer that died
_TRASH = ".old-"  # being deleted
_SUPERSEDED = "superseded-"  # newer than what a resumed run wrote; never read, never deleted
_RNG = "__rng__/"


class CheckpointError(ValueError):
    """A checkpoint that is torn or not one; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Rng:
    """The random states of the process: python's, numpy's global one, torch's per device."""

    python: Json
    numpy: Json
    torch: dict[str, Tensor]  # "cpu", "cuda:0", ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    step: int
    tensors: dict[str, Tensor]
    meta: Json
    rng: Rng
    adapters: dict[str, Path]


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest whole checkpoint, and the newer ones that are torn, each with its fault."""

    folder: Path | None
    step: int | None
    torn: dict[Path, str]


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a run goes on: step and ``meta`` of the checkpoint, None and nothing without one."""

    step: int | None
    meta: Json
    torn: dict[Path, str]  # newer ones that were passed over, each with its fault


def save_checkpoint(
    root: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    adapters: Mapping[str, Callable[[Path], None]] | None = None,
    keep: int = 2,
) -> Path:
    """Write checkpoint ``step``, with the random states of this moment; keep the ``keep`` newest.

    ``meta`` must be JSON. ``adapters`` maps a name to what writes its PEFT folder at a given path.
    A checkpoint of the same step (from before a resume) is replaced. Later ones belong to a history
    that the run has left: they are renamed out of the way, and ``latest_checkpoint`` ignores them.
    """
    if keep < 1:
        raise ValueError("keep must be at least 1: the checkpoint just written has to stay")
    if reserved := [name for name in tensors if name.startswith(_RNG)]:
        raise ValueError(f"tensor names may not begin with {_RNG!r}: {reserved}")
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    _clean(root)
    staging = root / f"{_STAGING}{_name(step)}-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        _write(staging, step, tensors, meta, adapters or {})
        final = root / _name(step)
        if final.exists():
            # rename() cannot replace a folder with content. Dying between these two lines costs
            # this step's checkpoint, never the one before it.
            os.rename(final, _trash(final))
        os.rename(staging, final)
        _fsync(root)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for later, folder in _steps(root):
        if later > step:
            os.rename(folder, root / f"{_SUPERSEDED}{folder.name}-{uuid.uuid4().hex[:8]}")
    _prune(root, keep)
    return final


def latest_checkpoint(root: str | Path) -> Latest:
    """Verify checkpoints from the newest down, sizes and hashes, until one is whole."""
    torn: dict[Path, str] = {}
    for step, folder in _steps(Path(root)):
        fault = fault_of(folder)
        if fault is None:
            return Latest(folder, step, torn)
        torn[folder] = fault
    return Latest(None, None, torn)


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Verify and read. The random states are not applied: see ``restore_rng``."""
    folder = Path(folder)
    if fault := fault_of(folder):
        raise CheckpointError(f"checkpoint {folder}: {fault}")
    state = json.loads((folder / META).read_text())
    tensors = load_file(str(folder / TENSORS))
    torch_rng = {k.removeprefix(_RNG): tensors.pop(k) for k in list(tensors) if k.startswith(_RNG)}
    return Checkpoint(
        folder=folder,
        step=state["step"],
        tensors=tensors,
        meta=state["meta"],
        rng=Rng(state["rng"]["python"], state["rng"]["numpy"], torch_rng),
        adapters={name: folder / ADAPTERS / name for name in state["adapters"]},
    )


def fault_of(folder: str | Path) -> str | None:
    """What is wrong with this checkpoint; None if it is whole."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {str(name): (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"unreadable {MANIFEST}: {error}"
    if missing := {META, TENSORS} - files.keys():
        return f"{MANIFEST} does not list {sorted(missing)}"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _sha256(path) != digest:
            return f"{name} has other content than when it was written"
    return None


def capture_rng() -> Rng:
    version, internal, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda:{index}"] = state
    return Rng(
        python={"version": version, "internal": list(internal), "gauss": gauss},
        numpy={
            "algorithm": str(legacy[0]),
            "keys": [int(key) for key in legacy[1]],
            "position": int(legacy[2]),
            "has_gauss": int(legacy[3]),
            "gauss": float(legacy[4]),
        },
        torch=states,
    )


def restore_rng(rng: Rng) -> None:
    """Put the process's random states back. Devices which this machine lacks are left out."""
    python, legacy = rng.python, rng.numpy
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = np.array(legacy["keys"], dtype=np.uint32)
    np.random.set_state(
        (legacy["algorithm"], keys, legacy["position"], legacy["has_gauss"], legacy["gauss"])
    )
    for device, state in rng.torch.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and int(device.split(":")[1]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def _write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    adapters: Mapping[str, Callable[[Path], None]],
) -> None:
    for name, write in adapters.items():
        target = folder / ADAPTERS / name
        target.parent.mkdir(exist_ok=True)
        write(target)
    # Last of what can draw random numbers, and before anything else happens.
    rng = capture_rng()
    everything = {**tensors, **{_RNG + device: state for device, state in rng.torch.items()}}
    save_file(
        # Clones, because safetensors refuses tensors which share memory.
        {name: value.detach().cpu().contiguous().clone() for name, value in everything.items()},
        str(folder / TENSORS),
    )
    state = {
        "step": step,
        "meta": meta,
        "rng": {"python": rng.python, "numpy": rng.numpy},
        "adapters": sorted(adapters),
    }
    (folder / META).write_text(json.dumps(state))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    # Files before the folders that name them, and all of it before the rename.
    for path in [*files, folder / MANIFEST]:
        _fsync(path)
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _fsync(path)


def _prune(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep``. Torn ones do not count: they could not be resumed from.

    Only the manifest's sizes are looked at here, since hashing everything at each save is too dear.
    """
    kept = 0
    for _, folder in _steps(root):
        if kept >= keep:
            trash = _trash(folder)
            os.rename(folder, trash)
            shutil.rmtree(trash, ignore_errors=True)
        elif _looks_whole(folder):
            kept += 1
    _clean(root)


def _looks_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all((folder / n).stat().st_size == entry["size"] for n, entry in manifest.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _clean(root: Path) -> None:
    """Remove what a writer that died left behind."""
    for path in root.iterdir():
        if path.name.startswith((_STAGING, _TRASH)):
            shutil.rmtree(path, ignore_errors=True)


def _steps(root: Path) -> Iterator[tuple[int, Path]]:
    """Checkpoint folders, newest first."""
    if not root.is_dir():
        return
    found = [
        (int(path.name.removeprefix(_PREFIX)), path)
        for path in root.iterdir()
        if path.name.startswith(_PREFIX) and path.name.removeprefix(_PREFIX).isdecimal()
    ]
    yield from sorted(found, reverse=True)


def _name(step: int) -> str:
    if step < 0:
        raise ValueError(f"a step is not negative: {step}")
    return f"{_PREFIX}{step:08d}"


def _trash(folder: Path) -> Path:
    return folder.parent / f"{_TRASH}{folder.name}-{uuid.uuid4().hex[:8]}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
