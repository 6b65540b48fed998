"""Write a folder that is whole or does not exist."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

_STAGING = ".tmp-"  # being written, or left by a writer that died
_TRASH = ".old-"  # being deleted


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``final``, which then takes its place, synced to disk.

    Readers see the old folder, none, or the whole new one. After an exception nothing has changed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(final, _STAGING)
    staging.mkdir()
    try:
        yield staging
        paths = sorted(staging.rglob("*"), reverse=True)  # files before the folders that name them
        for path in [
            *(p for p in paths if p.is_file()),
            *(p for p in paths if p.is_dir()),
            staging,
        ]:
            _fsync(path)
        # rename() cannot replace a folder with content. Dying between the two renames leaves none.
        old = discard(final) if final.exists() else None
        os.rename(staging, final)
        _fsync(final.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> Path:
    """Rename a folder out of readers' sight; returns where it is, to be deleted."""
    trash = _beside(folder, _TRASH)
    os.rename(folder, trash)
    return trash


def remove_leftovers(parent: Path) -> None:
    """Delete what writers that died left behind. Call it only while nothing is being written."""
    for path in parent.iterdir():
        if path.name.startswith((_STAGING, _TRASH)):
            shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path, prefix: str) -> Path:
    return folder.parent / f"{prefix}{folder.name}-{uuid.uuid4().hex[:8]}"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
