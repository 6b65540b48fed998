"""End a command by a signal: the first SIGTERM or Ctrl-C ends it in order, a second one at once.

A SIGTERM within a second of another one is the same one: batch systems signal a script and all its
processes, and the script may pass it on.

A command ends at once, too, before it has called ``end_in_order``: while it imports, it has nothing
to put in order. Its children end with it (see ``supervisor.end_with_parent``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

END_WITHIN_S = 25.0
"""Slurm (KillWait) and Kubernetes (terminationGracePeriodSeconds) kill after 30."""

_SAME_S = 1.0


class Interrupted(KeyboardInterrupt):
    """The first signal, raised in the main thread."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@dataclass
class _Ending:
    in_order: bool = False
    within_s: float | None = None
    last_words: Callable[[], str] = lambda: ""
    begun: float | None = None
    """When the first signal came."""
    held: bool = False
    waiting: int | None = None


_ending = _Ending()


def handle_signals() -> None:
    """Handle SIGINT and SIGTERM, unless the caller of this process has it ignore them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def end_in_order(
    last_words: Callable[[], str] = lambda: "", within_s: float | None = END_WITHIN_S
) -> None:
    """From now on the first signal raises ``Interrupted``.

    Args:
        last_words: what to print when the command ends before its work is done.
        within_s: seconds after the signal at which the command ends at once; None: no limit.
    """
    _ending.in_order, _ending.within_s, _ending.last_words = True, within_s, last_words


@contextlib.contextmanager
def hold_first_signal() -> Iterator[None]:
    """Raise ``Interrupted`` at the end of the block, not within: what it starts has a name then."""
    _ending.held = True
    try:
        yield
    finally:
        _ending.held = False
    if _ending.waiting is not None:
        raise Interrupted(_ending.waiting)


def last_words() -> str:
    """Return what to print at the end of a command whose work is not done."""
    with contextlib.suppress(Exception):  # as when the folder is gone
        return _ending.last_words()
    return ""


def end_at_once(code: int, said: str) -> NoReturn:
    """End without waiting for threads; print ``said`` and the last words."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    lines = [line for line in (said, last_words()) if line]
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"{line}\n" for line in lines).encode())
    os._exit(code)


def begin_end(number: int) -> bool:
    """Note the first signal, from which the time to end counts; at a second one, end at once.

    Returns:
        Whether it is the first one.
    """
    name, code = signal.Signals(number).name, 128 + number
    begun, now = _ending.begun, time.monotonic()
    if number == signal.SIGTERM and begun is not None and now - begun < _SAME_S:
        return False
    if not _ending.in_order or begun is not None:
        end_at_once(code, f"\nended by {name}" + (" at once" if begun is not None else ""))
    _ending.begun = now
    if _ending.within_s is not None:
        said = f"\nended by {name}; not everything could be stopped in {_ending.within_s:.0f} s"
        watchdog = threading.Timer(_ending.within_s, end_at_once, (code, said))
        watchdog.daemon = True
        watchdog.start()
    return True


def _on_signal(number: int, _: object) -> None:
    if not begin_end(number):
        return
    if not _ending.held:
        raise Interrupted(number)
    _ending.waiting = number
