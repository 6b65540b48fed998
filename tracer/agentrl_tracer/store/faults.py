"""Say what is wrong with a database, and wait while it is away."""

from __future__ import annotations

import errno
import json
import logging
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

log = logging.getLogger("agentrl")

T = TypeVar("T")

PATIENCE_S = 600.0
"""How long trainer, gateway and commands wait for a store that is away; docs/runs.md says it."""

_FIRST_NOTICE_S, _LONGEST_SILENCE_S = 0.5, 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class StoreError(RuntimeError):
    """The database failed, not the data. The message says what to do."""


def unexpected(error: BaseException) -> BaseException | None:
    """Return an error to be logged with its traceback; None if its message says what to do."""
    return None if isinstance(error, StoreError) else error


@dataclass(frozen=True, slots=True)
class Fault:
    """What failed and, where waiting does not help, what does."""

    said: str
    passes: bool = False


_FULL = "its disk is full; free some space"
_UNWRITABLE = (
    "it cannot be written; make the file and its folder writable for this user, or name another "
    "place with --run.store"
)
_DAMAGED = Fault(
    "the file is damaged; bring a copy back, or save what can be read with `sqlite3 FILE .recover`"
)
_LOCKED = Fault("another process holds its lock", passes=True)
_SQLITE: dict[str, Fault] = {
    "SQLITE_BUSY": _LOCKED,
    "SQLITE_LOCKED": _LOCKED,
    "SQLITE_PROTOCOL": _LOCKED,
    "SQLITE_FULL": Fault(_FULL),
    "SQLITE_IOERR": Fault("its disk is full, or fails; free some space, or check the disk"),
    "SQLITE_CORRUPT": _DAMAGED,
    "SQLITE_NOTADB": Fault("the file is no store; name another one, or bring a copy back"),
    "SQLITE_READONLY": Fault(_UNWRITABLE),
    "SQLITE_CANTOPEN": Fault(_UNWRITABLE),
    "SQLITE_PERM": Fault(_UNWRITABLE),
}
_UNREADABLE = re.compile("Could not decode|unsupported file format")
# Refusals of PostgreSQL that no waiting changes. A failed connection has no SQLSTATE.
_REFUSED = re.compile(
    "password|authentication|does not exist|pg_hba|permission|invalid .*(option|value)|certificate"
)


def fault_of(error: Exception) -> Fault | None:
    """Return what is wrong with the database; None where the data or the program is at fault."""
    cause: Any = (isinstance(error, DBAPIError) and error.orig) or error
    if isinstance(cause, sqlite3.Error):
        name = "_".join(str(getattr(cause, "sqlite_errorname", "")).split("_")[:2])
        return _DAMAGED if _UNREADABLE.match(str(cause)) else _SQLITE.get(name)
    if isinstance(cause, UnicodeDecodeError | json.JSONDecodeError):  # of what was read
        return _DAMAGED
    if isinstance(cause, OSError):  # the folder, or the file that orders the writers
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        return Fault(_FULL if full else f"{cause.strerror or cause}; {_UNWRITABLE}")
    if type(cause).__module__.startswith("psycopg"):
        return _postgres_fault(cause)
    return None


def _postgres_fault(cause: Any) -> Fault | None:
    state, said = cause.sqlstate or "", " ".join(str(cause).split())
    if not state:  # the connection, or the driver's own check of the data
        if type(cause).__name__ not in ("OperationalError", "InterfaceError"):
            return None
        return Fault(said, passes=not _REFUSED.search(said))
    if state == "53100":
        return Fault(f"{said}: the database's disk is full; free some space")
    # A connection lost or cut (08, 57), too many of them, a standby, a deadlock.
    if state[:2] in ("08", "40", "57") or state in ("25006", "53300", "55P03"):
        return Fault(said, passes=True)
    if state[:2] in ("28", "3D", "3F", "53", "58", "XX") or state == "42501":
        return Fault(f"{said}; the database's administrator can mend that")
    return None


class Waiting:
    """A wait for the store, which is said in the log while it lasts."""

    def __init__(self, store: str, patience_s: float) -> None:
        self._store, self._patience_s = store, patience_s
        self._began = time.monotonic()
        self._tell_at = _FIRST_NOTICE_S
        self._told = False

    def still(self, why: str, cause: Exception | None = None) -> None:
        """Say that the wait goes on.

        Raises:
            StoreError: it has lasted too long.
        """
        seconds = time.monotonic() - self._began
        if seconds >= self._patience_s:
            waited = f" (waited {seconds:.0f} s)" if self._patience_s else ""
            raise StoreError(f"store {self._store}: {why}{waited}") from cause
        if seconds >= self._tell_at:
            self._told = True
            log.warning("waiting for the store %s (%.0f s): %s", self._store, seconds, why)
            self._tell_at = seconds + min(2 * seconds, _LONGEST_SILENCE_S)

    def over(self) -> None:
        if self._told:
            log.warning("the store is back after %.0f s", time.monotonic() - self._began)


def patiently(store: str, patience_s: float, action: Callable[[], T]) -> T:
    """Repeat ``action``, a whole transaction, while the store is away.

    A commit whose answer was lost may have been made: what the action writes must come out the same
    when it is done twice.

    Raises:
        StoreError: the store has been away for ``patience_s``, or no waiting will help.
    """
    waiting, pause = Waiting(store, patience_s), _FIRST_PAUSE_S
    while True:
        try:
            result = action()
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            if not fault.passes:
                raise StoreError(f"store {store}: {fault.said}") from error
            waiting.still(fault.said, error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        else:
            waiting.over()
            return result
