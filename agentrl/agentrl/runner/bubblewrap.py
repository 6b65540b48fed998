"""Options of bubblewrap that agentrl's two sandboxes share."""

from __future__ import annotations

_OF_FILES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER")
_OF_THE_SYSTEM = ("/proc/bus", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def without_privileges(*, root: bool) -> list[str]:
    """Return the options that take the command's privileges; they follow ``--proc``.

    Bubblewrap leaves root its own, with which a command could undo the mounts that hide files.
    Root keeps those over other users' files, which a mount stops.

    Args:
        root: the command runs as root.
    """
    words = ["--cap-drop", "ALL"]
    if root:
        words += [word for one in _OF_FILES for word in ("--cap-add", one)]
        words += [word for path in _OF_THE_SYSTEM for word in ("--ro-bind-try", path, path)]
    return words
