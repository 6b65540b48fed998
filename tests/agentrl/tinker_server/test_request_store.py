"""Each request of the SDK is done once, and its result is kept for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import HTTPException

from agentrl.tinker_server import request_store
from agentrl.tinker_server.request_store import Answer, RequestStore


def done(answer: Answer) -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


def test_a_repetition_waits_until_the_work_has_its_place() -> None:
    store = RequestStore()
    entered, may_continue = threading.Event(), threading.Event()
    runs: list[int] = []

    def work() -> Future[Answer]:
        entered.set()
        may_continue.wait(30)
        runs.append(1)
        return done({"done": True})

    with ThreadPoolExecutor(2) as several:
        first = several.submit(store.submit, "m", 1, work)
        entered.wait(30)
        second = several.submit(store.submit, "m", 1, work)
        time.sleep(0.1)
        assert not second.done()
        may_continue.set()
        assert first.result() == second.result()
    assert runs == [1]
    for _ in range(2):  # its delivery may have failed
        assert asyncio.run(store.answer(first.result())) == {"done": True}


async def test_what_work_raises_is_its_result(caplog: pytest.LogCaptureFixture) -> None:
    store = RequestStore()

    def raises(error: Exception) -> Any:
        def work() -> Future[Answer]:
            raise error

        return work

    for error, category in ((FileExistsError("a"), "user"), (OSError("disk"), "server")):
        answer = await store.answer(store.submit("m", None, raises(error)))
        assert answer == {"error": f"{type(error).__name__}: {error}", "category": category}
    assert "a request failed: OSError: disk" in caplog.text
    assert "Traceback" not in caplog.text  # as of a full disk
    with pytest.raises(HTTPException):
        store.submit("m", 1, raises(HTTPException(404, "no model")))
    again = store.submit("m", 1, lambda: done({"now": "there"}))
    assert await store.answer(again) == {"now": "there"}


async def test_delivered_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_store, "_DELIVERED_BYTES", 100)
    store = RequestStore()
    first, second, third = (store.submit("m", i, lambda: done(b"x" * 40)) for i in range(3))
    for request in (second, first, first, third):
        assert len(await store.answer(request)) == 40
    with pytest.raises(HTTPException, match="no longer"):
        await store.answer(second)
    assert len(await store.answer(first)) == len(await store.answer(third)) == 40
    assert store.submit("m", 1, lambda: done(b"")) == second  # still not done a second time
