"""Group commit: much arrives at once, one transaction makes it all durable.

The gateway's event loop hands over calls, spans and rewards, and waits for the commit only where it
must: before an answer leaves. A single thread owns the writing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.exc import OperationalError

from agentrl_tracer.schemas import AttemptState, Call, Reward, Span
from agentrl_tracer.store.calls import Delivery
from agentrl_tracer.store.store import Store

log = logging.getLogger("agentrl")

_MAX_BATCH = 512
_OPEN_DELAY_S = 0.02


@dataclass(slots=True)
class _Item:
    what: Call | Delivery
    proxied: int  # the gateway's count when this was handed over
    done: asyncio.Future[AttemptState | None] | None  # None: an open call, nobody waits


class TraceWriter:
    """Writes calls, spans and rewards to the store in group commits.

    ``proxied`` counts accepted answers; it travels with the calls so that the count in the store
    never runs ahead of, or behind, the rows committed with it.
    """

    def __init__(self, store: Store, boot_id: str) -> None:
        self._store = store
        self._boot_id = boot_id
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.proxied = 0
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def open(self, call: Call) -> None:
        """Marks a call accepted; returns at once."""
        self.proxied += 1
        self._queue.put(_Item(call, self.proxied, None))

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
        self._queue.put(None)
        self._thread.join(timeout=30)

    async def _write(self, what: Call | Delivery) -> AttemptState | None:
        done: asyncio.Future[AttemptState | None] = asyncio.get_running_loop().create_future()
        self._queue.put(_Item(what, self.proxied, done))
        return await done

    def _run(self) -> None:
        while True:
            batch, closing = self._take()
            if batch:
                self._commit(batch)
            if closing:
                return

    def _take(self) -> tuple[list[_Item], bool]:
        """What is queued, and whether to close. Returns at once when somebody waits for a commit.

        Open calls alone are held back a little: most finish meanwhile, and one commit serves both.
        """
        batch: list[_Item] = []
        waited_for = False
        deadline = 0.0
        while len(batch) < _MAX_BATCH:
            try:
                if not batch:
                    item = self._queue.get()
                    deadline = time.monotonic() + _OPEN_DELAY_S
                elif waited_for:
                    item = self._queue.get_nowait()
                else:
                    item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return batch, False
            if item is None:
                return batch, True
            batch.append(item)
            waited_for = waited_for or item.done is not None
        return batch, False

    def _commit(self, batch: list[_Item]) -> None:
        try:
            states = self._write_all(batch)
        except Exception as error:  # a full disk must fail the requests, not the thread
            if len(batch) > 1 and not isinstance(error, OperationalError):
                # One of them is what the database refuses: the others shall not suffer for it.
                # (An operational error, such as a full disk or a lock, is nobody's; waiting for
                # it again for each would take minutes.)
                for item in batch:
                    self._commit([item])
                return
            if batch[0].done is None:
                log.exception("the store did not take an open call")
            _wake(batch, {}, error)
        else:
            _wake(batch, states, None)

    def _write_all(self, batch: list[_Item]) -> dict[str, AttemptState | None]:
        opened: list[Call] = []
        finished: list[Call] = []
        deliveries: list[Delivery] = []
        for item in batch:
            if isinstance(item.what, Delivery):
                deliveries.append(item.what)
            else:
                (opened if item.done is None else finished).append(item.what)
        return self._store.write_calls(
            self._boot_id, opened, finished, batch[-1].proxied, deliveries
        )


def _wake(
    batch: list[_Item], states: dict[str, AttemptState | None], error: Exception | None
) -> None:
    """One wake-up of each event loop per commit, however much it made durable."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Item]] = {}
    for item in batch:
        if item.done is not None:
            by_loop.setdefault(item.done.get_loop(), []).append(item)
    for loop, items in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, items, states, error)


def _resolve(
    items: list[_Item], states: dict[str, AttemptState | None], error: Exception | None
) -> None:
    for item in items:
        if item.done is None or item.done.done():
            continue
        if error is not None:
            item.done.set_exception(error)
        else:
            attempt = item.what.attempt_id
            item.done.set_result(None if attempt is None else states.get(attempt))
