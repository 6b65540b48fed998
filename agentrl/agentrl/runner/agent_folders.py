"""Remove and open folders in which an agent has worked, whatever it did to them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path


def remove(folder: Path) -> None:
    with contextlib.suppress(RecursionError):  # thousands of levels deep
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        make_writable(folder)
        _run("rm", "-rf", "--", str(folder))


def make_writable(folder: Path) -> None:
    """Let this user read and write all of a folder; links in it are not followed."""
    _run("chmod", "-R", "u+rwX", "--", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
