"""A marked retry gets the answer of the request that it repeats, whatever became of its client."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from gateway_client import BODIES as SHORTEST
from gateway_client import BODY, wait_until
from official_clients import CALL, TOOLS, USER
from retries import CHAT, RETRY, post, said
from running_gateway import restarted, running
from scripted_sampler import Running
from speakers import CLAUDE_TOOL, FUNCTION

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Call, CallState, Claim
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.trajectories import build_trajectories

RULES = SkipRules(max_length=10_000)
BODIES = {f"/{path}": body for path, body in SHORTEST.items()} | {
    "/completions": {"prompt": ["One", "Two"]}
}


@pytest.fixture
def both(start: Callable[..., Running], renderer: Renderer, tmp_path: Any) -> Iterator[Running]:
    """A gateway whose model ``answerer`` is served by another gateway."""
    with running(tmp_path / "provider", renderer, {}) as provider:
        base, key = provider.base_url(), str(provider.deps.operator_key)
        other = ProviderModel("openai/policy", base, key, num_retries=0)
        yield start(provider_models={"answerer": other})


def async_client(gateway: Running) -> openai.AsyncOpenAI:
    claim = gateway.claims[0]
    return openai.AsyncOpenAI(base_url=gateway.base_url(claim), api_key=claim.key, max_retries=0)


@contextlib.contextmanager
def locked(gateway: Running) -> Iterator[None]:
    """Another connection holds the store's write lock, so commits wait."""
    path = gateway.store.url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def delivered(gateway: Running, claim: Claim, *, said: bool) -> bool:
    calls = gateway.calls(claim)
    state = CallState.COMPLETED if said else CallState.CANCELLED
    return bool(calls) and all(
        call.state is state and ("undelivered" in call.params) != said for call in calls
    )


def as_sampled(call: Call) -> Call:
    """A call without the request that got its answer, which a retry takes over."""
    params = {name: value for name, value in call.params.items() if name != "request_id"}
    return replace(call, params=params)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["policy", "answerer"])
def test_a_client_that_leaves_during_the_commit(both: Running, model: str, stream: bool) -> None:
    gateway = both
    claims = gateway.new_claims(len(BODIES))
    for claim, (path, body) in zip(claims, BODIES.items(), strict=True):
        asked = {"model": model, "stream": stream} | body
        assert post(gateway, path, asked).is_success  # LiteLLM's first call takes seconds
        replayed = gateway.stats["replayed"]
        with locked(gateway):
            with pytest.raises(httpx.TimeoutException):
                post(gateway, path, asked, claim, timeout=0.5)
            wait_until(lambda: gateway.stats["in_flight"] == 0)  # no request waits for the store
        wait_until(partial(delivered, gateway, claim, said=False))
        again = [post(gateway, path, asked, claim, headers=RETRY) for _ in range(2)]
        wait_until(partial(delivered, gateway, claim, said=True))
        calls = gateway.calls(claim)
        assert again[0].text == again[1].text
        assert calls[0].response_id in again[0].text
        assert len(calls) == (2 if path == "/completions" else 1)
        assert gateway.stats["replayed"] == replayed + 2


def test_a_retry_during_the_commit_waits_for_it(gateway: Running) -> None:
    asked = {"model": "policy", "messages": USER}
    with locked(gateway):
        for headers in ({}, RETRY):
            with pytest.raises(httpx.TimeoutException):
                post(gateway, "/chat/completions", asked, headers=headers, timeout=0.5)
    wait_until(lambda: gateway.calls(gateway.claims[0]))
    again = post(gateway, "/chat/completions", asked, headers=RETRY).json()
    [call] = gateway.calls(gateway.claims[0])
    assert call.response_id == again["id"]
    # The conversation goes on with the exact tokens, though its first client never heard them.
    reply = again["choices"][0]["message"]
    more = [*USER, reply, {"role": "user", "content": "And now?"}]
    assert post(gateway, "/chat/completions", {"model": "policy", "messages": more}).is_success
    assert gateway.calls(gateway.claims[0])[1].params["continued"]


# --- after a restart of the gateway

SAID = f"<think>\nhm\n</think>\n\nLet me look. {CALL}\n{CALL}"
OURS: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"messages": USER, "tools": TOOLS}),
    ("/chat/completions", {"messages": USER, "n": 3, "logprobs": True, "top_logprobs": 2}),
    ("/chat/completions", {"messages": USER, "return_token_ids": True, "max_tokens": 5}),
    ("/chat/completions", {"messages": USER, "stop": ["look"], "stream_options":
                           {"include_usage": True}}),
    ("/completions", {"prompt": "One", "stop": "look", "echo": True}),
    ("/completions", {"prompt": ["One", "Two"], "n": 2, "logprobs": 2, "stop": "look"}),
    ("/responses", {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}),
    ("/responses", {"input": "Hi", "include": ["message.output_text.logprobs"],
                    "top_logprobs": 1, "max_output_tokens": 9}),
    ("/messages", {"messages": USER, "max_tokens": 99, "tools": [CLAUDE_TOOL]}),
    ("/messages", {"messages": USER, "max_tokens": 99, "stop_sequences": ["look"]}),
    ("/messages", {"messages": USER, "max_tokens": 5}),
    # The same body as another protocol's is another request.
    ("/chat/completions", {"messages": USER, "max_tokens": 5}),
]  # fmt: skip
ELSEWHERE: list[tuple[str, dict[str, Any]]] = [
    ("/chat/completions", {"messages": USER, "n": 2}),
    ("/completions", {"prompt": ["One", "Two"], "logprobs": 1, "n": 2}),
    ("/responses", {"input": "Hi"}),
    ("/messages", {"messages": USER, "max_tokens": 9}),
]


@pytest.mark.parametrize(("model", "asks"), [("policy", OURS), ("answerer", ELSEWHERE)])
def test_a_retry_after_a_restart_hears_what_was_answered(
    both: Running, model: str, asks: list[tuple[str, dict[str, Any]]]
) -> None:
    gateway = both
    gateway.sampler.script = lambda *_: SAID
    asked = [
        (path, {"model": model, "stream": stream} | body)
        for path, body in asks
        for stream in (False, True)
    ]
    told = [post(gateway, path, body).raise_for_status() for path, body in asked]
    before = [post(gateway, path, body, headers=RETRY).text for path, body in asked]
    calls = gateway.calls(gateway.claims[0])
    with restarted(gateway) as gateway:
        gateway.sampler.healthy = False  # not that anything could be sampled
        after = [post(gateway, path, body, headers=RETRY).text for path, body in asked]
        twice = [post(gateway, path, body, headers=RETRY).text for path, body in asked]
        assert gateway.stats["replayed"] >= 2 * len(asked)
    assert after == before == twice
    for (path, body), first, again in zip(asked, told, after, strict=True):
        assert body["stream"] or first.text == again, path
    now = gateway.calls(gateway.claims[0])
    assert list(map(as_sampled, now)) == list(map(as_sampled, calls))


def test_a_retry_gets_the_newest_answer_that_no_call_continued(gateway: Running) -> None:
    first = [post(gateway, CHAT, BODY).json() for _ in range(3)]
    more = [*USER, first[2]["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    post(gateway, CHAT, {"model": "policy", "messages": more}).raise_for_status()
    with restarted(gateway) as after:
        for one in (gateway, after):
            assert said(one, **RETRY) == first[1]["id"]
        assert not after.sampler.requests
        assert said(after) not in [one["id"] for one in first]  # unmarked: a sample of its own


def test_a_retry_after_a_restart_is_of_the_same_name_and_agent(gateway: Running) -> None:
    one, other = {"idempotency-key": "one"}, {"idempotency-key": "other"}
    player, judge = {"x-agentrl-agent": "player"}, {"x-agentrl-agent": "judge"}
    ids = [said(gateway, **headers) for headers in (one, other, player, judge)]
    with restarted(gateway) as after:
        for _ in range(2):
            again = [said(after, **headers, **RETRY) for headers in (one, other, player, judge)]
            assert again == ids
        for unknown in ({}, {"idempotency-key": "third"}):
            assert said(after, **unknown, **RETRY) not in ids


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_retries_at_once_after_a_restart(
    start: Callable[..., Running], request: pytest.FixtureRequest, database: str
) -> None:
    store_url = None if database == "sqlite" else request.getfixturevalue("postgres")
    gateway = start(store_url=store_url)
    first = said(gateway)
    with restarted(gateway) as after, ThreadPoolExecutor() as pool:
        assert {*pool.map(lambda _: said(after, **RETRY), range(4))} == {first}
        assert not after.sampler.requests


def test_a_retry_of_an_unknown_request_is_sampled(gateway: Running) -> None:
    claim = gateway.claims[1]
    others = post(gateway, CHAT, BODY, claim).json()["id"]  # another attempt's
    assert said(gateway, **RETRY) != others
    assert [c.attempt_id for c in gateway.calls(gateway.claims[0])] == [
        gateway.claims[0].attempt_id
    ]


# --- what is trained


def assert_trained_once(gateway: Running, calls: int) -> None:
    """Every call is a row of its own, of the tokens that its sampler gave, and each trains."""
    recorded = gateway.calls(gateway.claims[0])
    assert len(recorded) == calls
    built = build_trajectories(recorded, RULES)
    assert not built.skipped
    assert [row.call_ids for row in built.trajectories] == [[call.id] for call in recorded]
    for row, seen in zip(built.trajectories, gateway.sampler.requests, strict=True):
        assert row.tokens == seen.prompt_ids + seen.sampled[0]
        assert row.calls[0].response_ids == seen.sampled[0]


@pytest.mark.parametrize("when", ["completed", "in flight", "client left", "restarted"])
def test_a_request_and_its_retry_train_once(gateway: Running, when: str) -> None:
    if when == "client left":
        with locked(gateway), pytest.raises(httpx.TimeoutException):
            post(gateway, CHAT, BODY, timeout=0.5)
        said(gateway, **RETRY)
        # Delivery is noted after the last byte: the answer is now the retry's.
        wait_until(lambda: "request_id" in gateway.calls(gateway.claims[0])[0].params)
    elif when == "in flight":
        gateway.sampler.delay = 0.05
        with ThreadPoolExecutor() as pool:
            first = pool.submit(said, gateway)
            wait_until(lambda: gateway.sampler.requests)
            assert said(gateway, **RETRY) == first.result()
    else:
        first = said(gateway)
        with restarted(gateway) if when == "restarted" else contextlib.nullcontext(gateway) as one:
            assert said(one, **RETRY) == first
    assert_trained_once(gateway, 1)
    if when == "completed":
        assert said(gateway) != first  # unmarked
        assert_trained_once(gateway, 2)


# --- retries of identical requests that run


async def test_each_retry_waits_for_its_own_request(gateway: Running) -> None:
    """Of two identical running requests one client lost both answers: two retries, two answers."""
    gateway.sampler.delay = 0.03
    async with async_client(gateway) as api:
        create = partial(api.chat.completions.create, model="policy", messages=USER)
        first = [asyncio.create_task(create()) for _ in range(2)]
        await asyncio.sleep(0.2)
        again = [asyncio.create_task(create(extra_headers=RETRY)) for _ in range(2)]
        await asyncio.sleep(0.1)
        for task in first:
            task.cancel()
        answers = await asyncio.gather(*again)
    calls = gateway.calls(gateway.claims[0])
    assert {answer.id for answer in answers} == {call.response_id for call in calls}
    assert len(calls) == len(gateway.sampler.requests) == 2


async def test_the_retry_of_a_cancelled_request_is_sampled(gateway: Running) -> None:
    """It does not get the answer of an identical request."""
    gateway.sampler.delay = 0.05
    async with async_client(gateway) as api:
        create = partial(api.chat.completions.create, model="policy", messages=USER)
        lost, other = (asyncio.create_task(create()) for _ in range(2))
        await asyncio.sleep(0.2)
        lost.cancel()
        await asyncio.sleep(0.2)
        again = await create(extra_headers=RETRY)
        assert again.id != (await other).id
    assert gateway.stats["replayed"] == 0
