"""``Lookup``: requests that wait are looked up together, each as of a moment after it asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection

import pytest
from fake_gateway import until

from agentrl_proxy.requests.lookups import Lookup


class Kept:
    """What is looked up; ``release`` lets a lookup end."""

    def __init__(self) -> None:
        self.values = {"a": 1, "b": 2}
        self.asked: list[list[str]] = []
        self.release = threading.Semaphore(0)

    def several(self, keys: Collection[str]) -> dict[str, int]:
        found = {key: self.values[key] for key in keys if key in self.values}
        self.asked.append(sorted(keys))
        assert self.release.acquire(timeout=10)
        if "broken" in keys:
            raise OSError("away")
        return found


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def lookup(kept: Kept) -> Lookup[int]:
    return Lookup(together=True, one=kept.values.get, several=kept.several)


async def test_what_is_asked_meanwhile_is_looked_up_together(
    kept: Kept, lookup: Lookup[int]
) -> None:
    first = asyncio.create_task(lookup.of("a"))
    await asyncio.to_thread(until, lambda: kept.asked)
    kept.values["a"] = 3  # after the query of the first
    others = [asyncio.create_task(lookup.of(key)) for key in ("a", "b", "a", "none")]
    await asyncio.sleep(0.01)
    kept.release.release(2)
    assert await asyncio.gather(first, *others) == [1, 3, 2, 3, None]
    assert kept.asked == [["a"], ["a", "b", "none"]]
    kept.release.release()
    assert await lookup.of("b") == 2


async def test_a_failure_reaches_all_that_wait_and_a_request_that_left_stops_none(
    kept: Kept, lookup: Lookup[int]
) -> None:
    left, one, other = (asyncio.create_task(lookup.of("broken")) for _ in range(3))
    await asyncio.sleep(0.01)
    left.cancel()
    kept.release.release()
    for waits in (one, other):
        with pytest.raises(OSError, match="away"):
            await waits
    kept.release.release()
    assert await lookup.of("a") == 1
