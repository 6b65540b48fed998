"""Group commit: much arrives at once, one transaction makes it all durable.

The gateway's event loop hands over calls, spans and rewards, and waits for the commit only where it
must: before an answer leaves.

With SQLite, what one turn of the event loop handed over is committed at the end of that turn, in
place: 0.1 ms, less than it costs to wake a thread up and be woken by it. A thread takes over
whatever could take longer: when another process is writing, when the disk is slow, and when it is
time to move SQLite's log into the database. Over a network the thread writes everything.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_tracer.schemas import AttemptState, Call, Reward, Span
from agentrl_tracer.store.calls import Delivery
from agentrl_tracer.store.store import Store

log = logging.getLogger("agentrl")

_MAX_BATCH = 512
_OPEN_DELAY_S = 0.02  # most calls finish, or others do, before their open mark is due
_ROWS_IN_PLACE = 256  # then it is the thread's turn: its commits move the log into the database
_SLOW_S = 0.1  # a commit that holds the event loop up for longer ...
_PAUSE_S = 1.0  # ... leaves the commits of this long to the thread


class _Signal(enum.Enum):
    FLUSH = enum.auto()
    CLOSE = enum.auto()


@dataclass(slots=True)
class _Item:
    what: Call | Delivery
    done: asyncio.Future[AttemptState | None]


class TraceWriter:
    """Writes calls, spans and rewards to the store in group commits.

    ``proxied`` counts accepted answers; it travels with the calls so that the count in the store
    never runs ahead of, or behind, the rows committed with it.
    """

    def __init__(self, store: Store, boot_id: str) -> None:
        self._store = store
        self._boot_id = boot_id
        self._queue: queue.SimpleQueue[_Item | _Signal] = queue.SimpleQueue()
        self._opening = threading.Lock()
        self._opened: list[Call] = []  # marks that no commit has taken yet
        self._flush_due = False
        self.proxied = 0
        self._committing = threading.Lock()  # one commit at a time: ``proxied`` only grows
        self._in_place = not store.is_remote
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that commits in place
        self._turn: list[_Item] = []  # what it handed over in this turn
        self._rows = 0  # since the thread's last commit
        self._threads_until = 0.0
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def open(self, call: Call) -> None:
        """Marks a call accepted; returns at once. To be called on an event loop.

        The mark goes with the next commit, 20 ms from now at the latest.
        """
        with self._opening:
            self.proxied += 1
            self._opened.append(call)
            if self._flush_due:
                return
            self._flush_due = True
        asyncio.get_running_loop().call_later(_OPEN_DELAY_S, self._flush)

    def _flush(self) -> None:
        with self._opening:
            self._flush_due = False
            if not self._opened:
                return
        if not self._commit_in_place([]):
            self._queue.put(_Signal.FLUSH)

    async def finish(self, call: Call) -> AttemptState | None:
        """Stores a finished call; returns, after the commit, the state of its attempt.

        Anything but ``running`` (None for calls outside rollouts) means the attempt was sealed
        and the call was kept as ``late_call``.

        Raises:
            Exception: whatever the database raised; the call is then not durable.
        """
        return await self._write(call)

    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None:
        """Stores spans and rewards; returns, after the commit, the state of their attempt.

        Anything but ``running`` (None for those of no attempt) means the attempt was sealed and
        nothing was kept.

        Raises:
            Exception: whatever the database raised; nothing is then durable.
        """
        return await self._write(Delivery(attempt_id, spans, rewards))

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        for item in self._turn:  # of a loop that ended in mid-turn
            self._queue.put(item)
        self._queue.put(_Signal.CLOSE)
        self._thread.join(timeout=30)

    async def _write(self, what: Call | Delivery) -> AttemptState | None:
        loop = asyncio.get_running_loop()
        item = _Item(what, loop.create_future())
        if self._loop is None and self._in_place:
            self._loop = loop
        if loop is not self._loop:
            self._queue.put(item)
        else:
            self._turn.append(item)
            if len(self._turn) == 1:
                loop.call_soon(self._end_turn)
        return await item.done

    # --- in place, on the event loop

    def _end_turn(self) -> None:
        batch, self._turn = self._turn, []
        if not self._commit_in_place(batch):
            for item in batch:
                self._queue.put(item)

    def _commit_in_place(self, batch: list[_Item]) -> bool:
        """Commits without ever waiting for anybody; False: the thread has to, nothing was done."""
        began = time.monotonic()
        if not self._in_place or self._rows > _ROWS_IN_PLACE or began < self._threads_until:
            return False
        if not self._committing.acquire(blocking=False):
            return False
        try:
            opened, proxied = self._take_opened()
            self._rows += len(batch) + len(opened)
            try:
                calls, deliveries = _split(batch)
                states = self._store.write_calls(
                    self._boot_id, opened, calls, proxied, deliveries, wait=False
                )
            except Exception:  # somebody else is writing, or worse: the thread finds out
                with self._opening:
                    self._opened = opened + self._opened
                return False
        finally:
            self._committing.release()
        if time.monotonic() - began > _SLOW_S:
            self._threads_until = began + _PAUSE_S
        _resolve(batch, states, None)
        return True

    def _take_opened(self) -> tuple[list[Call], int]:
        """After a batch was taken: so the marks of all its calls are among these."""
        with self._opening:
            opened, self._opened = self._opened, []
            return opened, self.proxied

    # --- in the thread

    def _run(self) -> None:
        closing = False
        while not closing:
            batch, closing = self._take()
            self._commit(batch)

    def _take(self) -> tuple[list[_Item], bool]:
        """What waits for a commit, at least a signal, and whether to close."""
        batch: list[_Item] = []
        taken = self._queue.get()
        while True:
            if taken is _Signal.CLOSE:
                return batch, True
            if isinstance(taken, _Item):
                batch.append(taken)
                if len(batch) == _MAX_BATCH:
                    return batch, False
            try:
                taken = self._queue.get_nowait()
            except queue.Empty:
                return batch, False

    def _commit(self, batch: list[_Item]) -> None:
        with self._committing:
            opened, proxied = self._take_opened()
            if batch or opened:
                self._write_out(batch, opened, proxied)
            self._rows = 0

    def _write_out(self, batch: list[_Item], opened: list[Call], proxied: int) -> None:
        try:
            calls, deliveries = _split(batch)
            states = self._store.write_calls(self._boot_id, opened, calls, proxied, deliveries)
        except Exception as error:  # a full disk must fail the requests, not the thread
            if len(batch) + len(opened) > 1 and not self._store.db.is_operational(error):
                # One of them is what the database refuses: the others shall not suffer for it.
                # (An operational error, such as a full disk or a lock, is nobody's; waiting for
                # it again for each would take minutes.)
                for call in opened:
                    self._write_out([], [call], proxied)
                for item in batch:
                    self._write_out([item], [], proxied)
                return
            if opened:
                log.exception("the store did not take %d open calls", len(opened))
            _wake(batch, {}, error)
        else:
            _wake(batch, states, None)


def _split(batch: list[_Item]) -> tuple[list[Call], list[Delivery]]:
    calls = [item.what for item in batch if isinstance(item.what, Call)]
    return calls, [item.what for item in batch if isinstance(item.what, Delivery)]


def _wake(
    batch: list[_Item], states: dict[str, AttemptState | None], error: Exception | None
) -> None:
    """One wake-up of each event loop per commit, however much it made durable."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Item]] = {}
    for item in batch:
        by_loop.setdefault(item.done.get_loop(), []).append(item)
    for loop, items in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, items, states, error)


def _resolve(
    items: list[_Item], states: dict[str, AttemptState | None], error: Exception | None
) -> None:
    for item in items:
        if item.done.done():
            continue
        if error is not None:
            item.done.set_exception(error)
        else:
            attempt = item.what.attempt_id
            item.done.set_result(None if attempt is None else states.get(attempt))
