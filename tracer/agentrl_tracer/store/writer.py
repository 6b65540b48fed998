"""Commit what arrives at the gateway in groups: one transaction makes much durable.

The event loop hands over calls, spans and rewards, and waits for the commit only before an answer
leaves. With SQLite, what one turn of the loop handed over is committed in place at the turn's end:
0.1 ms, less than waking a thread. A thread takes over what could take longer: when another process
is writing, when the disk is slow, and when it is time to checkpoint SQLite's log. With PostgreSQL
the thread writes everything.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentrl_tracer.schemas import AttemptState, Call, Reward, Span
from agentrl_tracer.store import Store, StoreError
from agentrl_tracer.store.calls import Delivery
from agentrl_tracer.store.faults import unexpected

log = logging.getLogger("agentrl")

_MAX_BATCH = 512
_OPEN_DELAY_S = 0.02  # most calls finish, or others do, before their open mark is due
_ROWS_IN_PLACE = 256  # until the thread commits, which checkpoints the log
_SLOW_S = 0.02  # a commit that takes longer leaves the next second's commits to the thread
_PAUSE_S = 1.0


@dataclass(slots=True)
class _Item:
    record: Call | Delivery
    done: asyncio.Future[AttemptState | None]


class TraceWriter:
    """Writes calls, spans and rewards of one event loop to the store in group commits.

    ``proxied`` counts accepted answers. It is stored with the calls, so the count in the store
    never differs from the rows committed with it.
    """

    def __init__(self, store: Store, boot_id: str) -> None:
        self._store = store
        self._boot_id = boot_id
        self._queue: queue.SimpleQueue[_Item | Literal["flush", "close"]] = queue.SimpleQueue()
        self._opening = threading.Lock()
        self._opened: list[Call] = []  # open marks that no commit has taken yet
        self._flush_due = False
        self.proxied = 0
        self._committing = threading.Lock()  # one commit at a time: ``proxied`` only grows
        self._in_place = not store.is_remote
        self._turn: list[_Item] = []  # what the loop handed over in this turn
        self._rows = 0  # committed since the thread's last commit
        self._thread_until = 0.0  # leave commits to the thread until then
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def open(self, call: Call) -> None:
        """Mark a call accepted, in the next commit and within 20 ms. Call it on an event loop."""
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
            self._queue.put("flush")

    async def finish(self, call: Call) -> AttemptState | None:
        """Store a finished call; return the state of its attempt after the commit.

        Any state but ``running`` (None for calls outside rollouts) means that the attempt was
        sealed and the call was kept as ``late_call``.

        Raises:
            Exception: the database's error; the call is then not durable.
        """
        return await self._write(call)

    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None:
        """Store spans and rewards; return the state of their attempt after the commit.

        Any state but ``running`` (None for those of no attempt) means that the attempt was sealed
        and nothing was kept.

        Raises:
            Exception: the database's error; nothing is then durable.
        """
        return await self._write(Delivery(attempt_id, spans, rewards))

    def close(self) -> None:
        """Write what is queued and end the thread."""
        for item in self._turn:  # of a loop that ended in mid-turn
            self._queue.put(item)
        self._queue.put("close")
        self._thread.join(timeout=30)

    async def _write(self, record: Call | Delivery) -> AttemptState | None:
        loop = asyncio.get_running_loop()
        item = _Item(record, loop.create_future())
        if not self._in_place:
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
        """Commit without waiting for any lock. False: nothing was done, the thread must."""
        began = time.monotonic()
        for_thread = self._rows > _ROWS_IN_PLACE or began < self._thread_until
        if not self._in_place or for_thread or not self._committing.acquire(blocking=False):
            return False
        try:
            opened, proxied = self._take_opened()
            self._rows += len(batch) + len(opened)
            try:
                states = self._store.write_calls(
                    self._boot_id, opened, [item.record for item in batch], proxied, wait=False
                )
            except Exception:  # another writer, or a failure that the thread will report
                with self._opening:
                    self._opened = opened + self._opened
                return False
        finally:
            self._committing.release()
        if time.monotonic() - began > _SLOW_S:
            self._thread_until = began + _PAUSE_S
        _resolve(batch, states, None)
        return True

    def _take_opened(self) -> tuple[list[Call], int]:
        """Take the open marks, after a batch was taken: its calls' marks are among them."""
        with self._opening:
            opened, self._opened = self._opened, []
            return opened, self.proxied

    # --- in the thread

    def _run(self) -> None:
        closing = False
        while not closing:
            taken = [self._queue.get()]
            with suppress(queue.Empty):
                while len(taken) < _MAX_BATCH:
                    taken.append(self._queue.get_nowait())
            closing = "close" in taken
            batch = [item for item in taken if isinstance(item, _Item)]
            with self._committing:
                opened, proxied = self._take_opened()
                if batch or opened:
                    self._write_out(batch, opened, proxied)
                self._rows = 0

    def _write_out(self, batch: list[_Item], opened: list[Call], proxied: int) -> None:
        states, failure = dict[str, AttemptState](), None
        records = [item.record for item in batch]
        try:
            write = partial(self._store.write_calls, self._boot_id, opened, records, proxied)
            states = self._store.db.patiently(write)
        except Exception as error:  # fails the requests, not the thread
            if len(batch) + len(opened) > 1 and not isinstance(error, StoreError):
                # The database refuses one record: write each alone, so that the others succeed.
                # A failure of the database, such as a full disk, would only repeat itself.
                for call in opened:
                    self._write_out([], [call], proxied)
                for item in batch:
                    self._write_out([item], [], proxied)
                return
            if opened:
                said = "the store did not take %d open calls: %s"
                log.error(said, len(opened), error, exc_info=unexpected(error))
            failure = error
        if batch and not (loop := batch[0].done.get_loop()).is_closed():
            loop.call_soon_threadsafe(_resolve, batch, states, failure)


def _resolve(
    items: list[_Item], states: Mapping[str, AttemptState], error: Exception | None
) -> None:
    for item in items:
        if item.done.done():
            continue
        if error is not None:
            item.done.set_exception(error)
        else:
            attempt = item.record.attempt_id
            item.done.set_result(None if attempt is None else states.get(attempt))
