"""Let one process at a time write into a run folder, by a lock that dies with the process."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from agentrl.config.errors import ConfigError

logger = logging.getLogger("agentrl")

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """``flock`` on a file of a folder, held as long as this object lives; ``kill -9`` ends it too.

    Such a lock belongs to the open file, which a forked child shares: a gateway that outlives a
    killed trainer for a moment would hold it on. So children close theirs at once.

    Raises:
        ConfigError: another process holds it; names that process.
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(folder / "lock", flags, 0o644)
        os.register_at_fork(after_in_child=weakref.finalize(self, os.close, descriptor))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise ConfigError(
                f"{folder} is in use: {holder or 'another process'} is running it. Let it finish, "
                "or end it first, then --resume it"
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning("%s: this file system has no locks: %s", folder, error.strerror)
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
