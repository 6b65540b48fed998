"""Keep an attempt's log within a limit, whatever the agent prints.

Agents append to the file itself: printing costs what it always costs, waits for no reader, and
depends on no other process. The worker looks at the size a few times a second, and at the end, and
removes the middle of a file that has grown too long.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from dataclasses import dataclass, field
from pathlib import Path

_LOOKS = 10  # for a moment without output, in which the end can be cut off whole


def open_log(path: str, user: str | None) -> int:
    """Open a log to append to, for processes of ``user`` (None: this one's)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(path, flags, 0o600)
    if user is not None:  # so that the agent may open /dev/stdout
        os.fchown(log, pwd.getpwnam(user).pw_uid, -1)
    return log


@dataclass(slots=True)
class AttemptLog:
    """A file that other processes append to."""

    path: str
    limit: int  # bytes
    _cut: int = field(default=0, init=False)
    _note: bytes = field(default=b"", init=False)  # in the file: how much was cut

    def trim(self) -> bool:
        """Cut the middle out of a file above its limit; return whether it was."""
        try:
            if os.stat(self.path).st_size <= self.limit:
                return False
            # Never through a link, which the agent could have put there.
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
            try:
                self._cut_middle(file)
            finally:
                os.close(file)
        except OSError:  # nothing was printed, the agent removed it, or the disk is full
            return False
        return True

    def _cut_middle(self, file: int) -> None:
        head, keep, tail = self.limit // 2, self.limit // 4, b""
        size = os.fstat(file).st_size
        for _ in range(_LOOKS):  # what is written after the last look is lost
            tail, seen = os.pread(file, keep, size - keep), size
            if (size := os.fstat(file).st_size) == seen:
                break
        os.ftruncate(file, head)
        tail = tail[tail.find(b"\n") + 1 :]  # whole lines, if it has any
        # A note that an earlier cut left is cut again.
        self._cut += size - head - len(tail) - len(self._note)
        self._note = b"\n[agentrl: at least %d bytes of output were cut out here]\n" % self._cut
        os.write(file, self._note + tail)

    def close(self) -> str | None:
        """Trim the log of an attempt that has ended; return its path, or None if it is empty."""
        self.trim()
        log = Path(self.path)
        with contextlib.suppress(OSError):
            if not log.stat().st_size:
                log.unlink()
        return self.path if log.exists() else None
