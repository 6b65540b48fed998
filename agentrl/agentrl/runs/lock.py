"""Who writes into a run folder: one process at a time, by a lock that dies with it.

Knows files and processes; not what a run is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

logger = logging.getLogger("agentrl")

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockedError(RuntimeError):
    """Somebody else has it: ``holder`` says who, as far as the file tells."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder}")
        self.holder = holder


class RunLock:
    """``flock`` on a file, held as long as this object lives; ``kill -9`` ends it as well.

    Such a lock belongs to the open file, which a forked child shares: a gateway that outlives a
    killed trainer for a moment would hold it on. So children close theirs at once.

    Raises:
        LockedError: another process holds it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        os.register_at_fork(after_in_child=self._close)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                logger.warning("%s: this file system has no locks: %s", path, error.strerror)
                return
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            self._close()
            if isinstance(error, BlockingIOError):
                raise LockedError(path, holder or "another process") from None
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
