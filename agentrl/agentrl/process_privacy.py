"""Keep what a process knows, and the files it makes, from other processes of the same user.

What remains readable, and what the settings ``agent.user`` and ``agent.sandbox`` add, is in
docs/security.md. Root is not stopped by any of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from agentrl.config.secrets import passwords_in

_PR_SET_DUMPABLE = 4  # <linux/prctl.h>
_ARGUMENTS = slice(45, 47)  # of /proc/self/stat after the name: where they begin and end
_KEYS = re.compile(r"^--[\w.-]*-key[=\n](.+)", re.MULTILINE)


def hide_memory() -> None:
    """Keep processes of the same user from reading this one's memory and environment.

    Linux only. It holds for forks too, until they execute something. Without it an agent could read
    keys in ``/proc/PID/environ`` and ``/proc/PID/mem``, or attach a debugger.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def hide_arguments(arguments: Sequence[str]) -> None:
    """Overwrite the keys and passwords among this process's arguments, which everyone may read."""
    if sys.platform != "linux":
        return
    found = [password for one in arguments for password in passwords_in(one)]
    found += _KEYS.findall("\n".join(arguments))
    if secrets := [os.fsencode(one) for one in found]:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, fields[_ARGUMENTS])
        said = ctypes.string_at(start, end - start)
        for secret in secrets:
            said = said.replace(secret, b"*" * len(secret))
        ctypes.memmove(start, said, len(said))


def environment_without(withheld: Collection[str]) -> dict[str, str]:
    """Return the environment of a child that must not know some variables."""
    return {name: value for name, value in os.environ.items() if name not in withheld}


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Let only this user read the files and folders that this process makes meanwhile."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def open_private(path: Path) -> BinaryIO:
    """Open a file to append to; if it is new, only this user may read it."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
