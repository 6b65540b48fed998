"""What an attempt remembers for retries, beside the rules in their plainest form."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl_proxy.protocols.chat_objects import missing
from agentrl_proxy.requests.idempotency import (
    MAX_ANSWER_BYTES,
    MAX_REQUESTS,
    RETRY_WITHIN_S,
    Asked,
    Part,
    Requests,
    State,
)

KEYS = st.sampled_from([b"one", b"other"])
N = 3  # choices of every request


def running(requests: Requests) -> int:
    held = [one for same in requests._asked.values() for one in same.requests]
    return sum(one.state is State.RUNNING for one in held)


def part(choice: int, said: object) -> Part:
    return {"choices": [{"index": choice, "said": said}]}


@dataclass(eq=False)
class Told:
    """The rules' idea of one request."""

    state: str  # failed, missed, running, answered
    said: dict[int, int] = field(default_factory=dict[int, int])  # by choice
    since: float = 0.0
    to_end: int = 0
    broken: bool = False
    recalled: bool = False  # and given to no retry since
    waiters: list[asyncio.Task[Asked | None]] = field(
        default_factory=list["asyncio.Task[Asked | None]"]
    )


class RetryRules(RuleBasedStateMachine):
    """Identical requests are samples of their own. A retry is of the oldest that failed lately and
    takes its place; else of one that an earlier process answered; else of one that runs, and waits;
    else of the last that was answered."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.clock = patch("agentrl_proxy.requests.idempotency.time.monotonic", lambda: self.now)
        self.clock.start()
        self.requests = Requests()
        self.by_key: dict[bytes, list[Told]] = {b"one": [], b"other": []}
        self.pairs: list[tuple[Asked, Told]] = []
        self.sampled = 0  # each choice that is sampled says a number of its own

    def teardown(self) -> None:
        for task in [task for _, told in self.pairs for task in told.waiters]:
            task.cancel()
        self.turn()
        self.loop.close()
        self.clock.stop()

    def turn(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def told_of(self, asked: Asked) -> Told:
        return next(told for one, told in self.pairs if one is asked)

    def runs(self) -> list[tuple[Asked, Told]]:
        return [pair for pair in self.pairs if pair[1].state == "running"]

    def start(self, asked: Asked, told: Told, *, refused: bool) -> None:
        """Its jobs are accepted: one for each choice that is missing."""
        told.state, told.broken = "running", False
        choices = missing(asked.parts(), 1, N)[0]
        assert choices == [i for i in range(N) if i not in told.said]
        if refused:
            self.requests.refused(asked, comes_back=True)
            told.to_end, told.broken = 0, True
            self.ended(told)
        else:
            asked.jobs = told.to_end = len(choices)

    def ended(self, told: Told) -> None:
        told.state, told.since = ("failed" if told.broken else "answered"), self.now
        (same,) = [same for same in self.by_key.values() if told in same]
        if not told.broken:
            same[:] = [
                one for one in same if one.state != "answered" or one is told or one.recalled
            ]
        self.turn()
        waiters, told.waiters = told.waiters, []
        for task in waiters:  # in the order in which they came
            if told.state == "answered":
                assert self.loop.run_until_complete(task) is self.asked_of(told)
            else:
                self.retried(task, same)

    def asked_of(self, told: Told) -> Asked:
        return next(asked for asked, one in self.pairs if one is told)

    def retried(self, task: asyncio.Task[Asked | None], same: list[Told]) -> None:
        """What the rules say of a retry, beside what it got."""
        same[:] = [
            one for one in same if one.state != "failed" or self.now - one.since <= RETRY_WITHIN_S
        ]
        by_state = {
            state: [one for one in same if one.state == state]
            for state in ("failed", "missed", "running", "answered")
        }
        if by_state["failed"]:
            told = by_state["failed"][0]
        elif by_state["missed"]:
            told = by_state["missed"][-1]
        elif by_state["running"]:
            told = min(by_state["running"], key=lambda one: len(one.waiters))
            assert not task.done()
            told.waiters.append(task)
            return
        elif by_state["answered"]:
            told = by_state["answered"][-1]
        else:
            assert task.result() is None
            return
        asked = task.result()
        assert asked is not None
        if all(asked is not one for one, _ in self.pairs):  # recalled: seen for the first time
            self.pairs.append((asked, told))
        assert self.told_of(asked) is told
        assert {c["index"]: c["said"] for p in asked.parts() for c in p["choices"]} == told.said
        told.recalled = False
        if told.state == "failed":
            assert asked.state is State.RUNNING
            self.start(asked, told, refused=False)
            return
        assert asked.state in (State.ANSWERED, State.MISSED)
        if len(by_state["answered"]) > (told.state == "answered"):
            same.remove(told)  # one is kept for who asks again
        told.state = "answered"

    @rule(key=KEYS, refused=st.booleans())
    def ask(self, key: bytes, refused: bool) -> None:
        asked, told = self.requests.begin(key), Told("running")
        self.pairs.append((asked, told))
        self.by_key[key].append(told)
        self.start(asked, told, refused=refused)

    @rule(key=KEYS)
    def nothing_comes_of_a_bad_request(self, key: bytes) -> None:
        self.requests.refused(self.requests.begin(key), comes_back=False)

    @precondition(lambda self: self.runs())
    @rule(data=st.data(), whole=st.booleans())
    def a_job_ends(self, data: st.DataObject, whole: bool) -> None:
        asked, told = data.draw(st.sampled_from(self.runs()))
        if whole:
            choice = next(i for i in range(N) if i not in told.said)
            self.sampled += 1
            told.said[choice] = self.sampled
            asked.add(part(choice, self.sampled))
        told.broken |= not whole
        told.to_end -= 1
        self.requests.job_ended(asked, whole=whole)
        if not told.to_end:
            self.ended(told)

    @rule(key=KEYS)
    def retry(self, key: bytes) -> None:
        task = self.loop.create_task(self.requests.earlier(key))
        self.turn()
        self.retried(task, self.by_key[key])

    @precondition(lambda self: any(told.waiters for _, told in self.runs()))
    @rule()
    def a_retry_leaves(self) -> None:
        told = next(told for _, told in self.runs() if told.waiters)
        told.waiters.pop(0).cancel()
        self.turn()

    @rule(seconds=st.sampled_from([1.0, RETRY_WITHIN_S / 2, RETRY_WITHIN_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not any(self.requests.was_recalled(k) for k in self.by_key))
    @rule(key=KEYS, answered=st.integers(0, 2), missed=st.integers(0, 2), failed=st.integers(0, 2))
    def recalled(self, key: bytes, answered: int, missed: int, failed: int) -> None:
        found: list[Told] = []
        for state, count in (("answered", answered), ("missed", missed), ("failed", failed)):
            for _ in range(count):
                choices = range(N - (state == "failed"))
                said = {i: self.sampled + 1 + i for i in choices}
                self.sampled += N
                found.append(Told(state, said, self.now, recalled=True))
        lists = {
            state: [[part(*one) for one in t.said.items()] for t in found if t.state == state]
            for state in ("answered", "missed", "failed")
        }
        self.requests.recall(key, lists["answered"], lists["missed"], lists["failed"])
        self.by_key[key][:0] = found

    @invariant()
    def they_agree(self) -> None:
        for key, same in self.by_key.items():
            held = self.requests._asked.get(key)
            states = [] if held is None else [one.state for one in held.requests]
            names = {"failed": State.UNANSWERED, "missed": State.MISSED,
                     "running": State.RUNNING, "answered": State.ANSWERED}  # fmt: skip
            assert states == [names[one.state] for one in same] or self._some_are_old(same)
        assert running(self.requests) == len(self.runs())
        for asked, told in self.pairs:
            if told.state == "answered":  # every choice once, and nothing lost
                assert sorted(told.said) == list(range(N))
            assert asked.waiting == len(told.waiters)

    def _some_are_old(self, same: list[Told]) -> bool:
        return any(o.state == "failed" and self.now - o.since > RETRY_WITHIN_S for o in same)

    @invariant()
    def bytes_are_counted(self) -> None:
        held = self.requests._asked.values()
        at_rest = [o for same in held for o in same.requests if o.state is not State.RUNNING]
        assert self.requests.held_bytes == sum(one.size for one in at_rest)


TestRetryRules: Any = RetryRules.TestCase
TestRetryRules.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def requests() -> Iterator[Requests]:
    made = Requests()
    yield made
    held = [one for same in made._asked.values() for one in same.requests]
    at_rest = [one for one in held if one.state is not State.RUNNING]
    assert made.held_bytes == sum(one.size for one in at_rest)


def answered(requests: Requests, key: bytes, size: int = 10) -> Asked:
    asked = requests.begin(key)
    asked.jobs = 1
    asked.add(part(0, "x" * size))
    requests.job_ended(asked, whole=True)
    return asked


async def test_a_new_request_does_not_take_a_recalled_answer_from_its_retry(
    requests: Requests,
) -> None:
    requests.recall(b"same", [[part(0, "first")], [part(0, "second")]], [], [])
    answered(requests, b"same")
    told = set[str]()
    for _ in range(3):
        asked = await requests.earlier(b"same")
        assert asked is not None
        told.add(asked.parts()[0]["choices"][0]["said"])
    assert told == {"first", "second", "x" * 10}


async def test_what_was_not_used_for_longest_is_dropped(requests: Requests) -> None:
    runs = requests.begin(b"runs")
    for i in range(5 * MAX_REQUESTS):
        answered(requests, b"%d" % i)
        requests.refused(requests.begin(b"refused %d" % i), comes_back=True)
        assert len(requests._asked) <= MAX_REQUESTS
    assert requests.knows(b"runs")
    assert runs.state is State.RUNNING
    assert not requests.knows(b"0")
    assert requests.knows(b"refused %d" % (5 * MAX_REQUESTS - 1))


async def test_answers_have_one_bound_together(requests: Requests) -> None:
    size = MAX_ANSWER_BYTES // 3
    for i in range(9):
        answered(requests, b"%d" % i, size)
        assert requests.held_bytes <= MAX_ANSWER_BYTES
    assert [requests.knows(b"%d" % i) for i in range(6, 9)] == [False, True, True]
    answered(requests, b"huge", 2 * MAX_ANSWER_BYTES)
    assert requests.held_bytes == 0
    requests.recall(b"huge", [[part(0, "x" * 2 * MAX_ANSWER_BYTES)]], [], [])
    found = await requests.earlier(b"huge")  # too large to be kept, but it is here now
    assert found is not None
    assert found.parts()
    assert requests.held_bytes == 0


async def test_failures_without_end_are_not_kept_without_end(requests: Requests) -> None:
    for _ in range(3 * MAX_REQUESTS):
        requests.refused(requests.begin(b"again"), comes_back=True)
    assert len(requests._asked[b"again"].requests) == MAX_REQUESTS


async def test_an_attempt_may_be_forgotten_while_it_runs(requests: Requests) -> None:
    elsewhere = Requests().begin(b"one")
    elsewhere.jobs = 1
    elsewhere.add(part(0, "x"))
    requests.job_ended(elsewhere, whole=True)
    assert not requests.knows(b"one")
