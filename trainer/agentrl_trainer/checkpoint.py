"""Write and read checkpoints that are whole or do not exist.

Knows files, tensors and JSON; not what they mean. Nothing is pickled: tensors (weights, optimizer
moments, the torch random state) are safetensors, everything else JSON, adapters PEFT folders.

    <root>/step-00000012/
        manifest.json           size and sha256 of every other file; written last
        meta.json               the caller's ``meta``, and the python and numpy random states
        tensors.safetensors     the caller's tensors, and the torch random states
        adapters/<name>/        PEFT folders

A checkpoint is written to a hidden folder beside it, synced, and renamed. One writer at a time.
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

from agentrl_trainer.atomic_folder import atomic_folder, discard, remove_leftovers

Json = dict[str, Any]

MANIFEST = "manifest.json"
META = "meta.json"
TENSORS = "tensors.safetensors"
ADAPTERS = "adapters"
_PREFIX = "step-"
_SUPERSEDED = "superseded-"  # newer than what a resumed run wrote; never read, never deleted
_RNG = "__rng__/"


class CheckpointError(ValueError):
    """A folder is no checkpoint, or a torn one; the message names the fault."""


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
    """Where a run continues: step and ``meta`` of the checkpoint; None and empty without one."""

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
    """Write checkpoint ``step`` with the current random states; keep the ``keep`` newest.

    A checkpoint of the same step (from before a resume) is replaced. Later ones belong to a history
    that the run has left: they are renamed, and ``latest_checkpoint`` ignores them.

    Args:
        meta: JSON.
        adapters: by name, what writes the adapter's PEFT folder at a given path.
    """
    if keep < 1:
        raise ValueError("keep must be at least 1: the checkpoint just written has to stay")
    if reserved := [name for name in tensors if name.startswith(_RNG)]:
        raise ValueError(f"tensor names may not begin with {_RNG!r}: {reserved}")
    if step < 0:
        raise ValueError(f"a step is not negative: {step}")
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    final = root / f"{_PREFIX}{step:08d}"
    with atomic_folder(final) as staging:
        _write(staging, step, tensors, meta, adapters or {})
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
    """Verify and read a checkpoint. Random states are not applied: see ``restore_rng``.

    Raises:
        CheckpointError: it is torn, or none.
    """
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
    """Name what is wrong with a checkpoint; None if it is whole."""
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
    """Read the process's random states."""
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
    """Restore the process's random states. Devices that this machine lacks are left out."""
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
    # After the adapters, which may draw random numbers.
    rng = capture_rng()
    everything = {**tensors, **{_RNG + device: state for device, state in rng.torch.items()}}
    save_file(
        # safetensors refuses tensors that share memory.
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


def _prune(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep``. Torn ones do not count: no run could resume from them.

    Only the manifest's sizes are checked here: hashing everything at each save costs too much.
    """
    kept = 0
    for _, folder in _steps(root):
        if kept >= keep:
            shutil.rmtree(discard(folder), ignore_errors=True)
        elif _looks_whole(folder):
            kept += 1


def _looks_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all((folder / n).stat().st_size == entry["size"] for n, entry in manifest.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _steps(root: Path) -> Iterator[tuple[int, Path]]:
    """Iterate over checkpoint folders, newest first."""
    if not root.is_dir():
        return
    found = [
        (int(path.name.removeprefix(_PREFIX)), path)
        for path in root.iterdir()
        if path.name.startswith(_PREFIX) and path.name.removeprefix(_PREFIX).isdecimal()
    ]
    yield from sorted(found, reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
