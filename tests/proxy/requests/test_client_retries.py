"""A marked retry gets the answer of the request that it repeats, whatever became of its client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from gateway_client import BODIES as SHORTEST
from gateway_client import HTTP, wait_until
from official_clients import CALL, TOOLS, USER
from running_gateway import restarted, running
from scripted_sampler import Running
from speakers import CLAUDE_TOOL, FUNCTION

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.protocols.chat import MAX_CHOICES
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.sampler import DecodingParams, FinishEvent
from agentrl_tracer.schemas import Call, CallState, Claim, SkipReason
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.trajectories import build_trajectories

RETRY = {"x-stainless-retry-count": "1"}
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


def post(
    gateway: Running, path: str, body: dict[str, Any], claim: Claim | None = None, **more: Any
) -> httpx.Response:
    claim = claim or gateway.claims[0]
    headers = {"authorization": f"Bearer {claim.key}", **more.pop("headers", {})}
    return HTTP.post(gateway.base_url(claim) + path, json=body, headers=headers, **more)


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


HELLO = {"model": "policy", "messages": USER}
CHAT = "/chat/completions"


def said(gateway: Running, **headers: str) -> str:
    """The id of what a chat request is answered with."""
    return post(gateway, CHAT, HELLO, headers=headers).raise_for_status().json()["id"]


def test_a_retry_gets_the_newest_answer_that_no_call_continued(gateway: Running) -> None:
    first = [post(gateway, CHAT, HELLO).json() for _ in range(3)]
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
    others = post(gateway, CHAT, HELLO, claim).json()["id"]  # another attempt's
    assert said(gateway, **RETRY) != others
    assert [c.attempt_id for c in gateway.calls(gateway.claims[0])] == [
        gateway.claims[0].attempt_id
    ]


# --- what is trained


def assert_trained_once(gateway: Running, calls: int) -> None:
    """Every call is a row of its own, of the tokens that its sampler gave, and each trains."""
    recorded = gateway.calls(gateway.claims[0])
    assert len(recorded) == calls
    built = build_trajectories(recorded, SkipRules(max_length=10_000))
    assert not built.skipped
    assert [row.call_ids for row in built.trajectories] == [[call.id] for call in recorded]
    for row, seen in zip(built.trajectories, gateway.sampler.requests, strict=True):
        assert row.tokens == seen.prompt_ids + seen.sampled[0]
        assert row.calls[0].response_ids == seen.sampled[0]


@pytest.mark.parametrize("when", ["completed", "in flight", "client left", "restarted"])
def test_a_request_and_its_retry_train_once(gateway: Running, when: str) -> None:
    if when == "client left":
        with locked(gateway), pytest.raises(httpx.TimeoutException):
            post(gateway, CHAT, HELLO, timeout=0.5)
        said(gateway, **RETRY)
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


# --- several prompts in one request


@pytest.mark.parametrize("again", ["remembered", "recalled"])
def test_a_retry_of_very_many_prompts_trains_once(gateway: Running, again: str) -> None:
    prompts = [[10 + i, 20 + i] for i in range(MAX_CHOICES)]
    asked = {"model": "policy", "prompt": prompts, "max_tokens": 2}
    first = post(gateway, "/completions", asked).raise_for_status().json()
    with restarted(gateway) if again == "recalled" else contextlib.nullcontext(gateway) as after:
        for _ in range(2):
            assert post(after, "/completions", asked, headers=RETRY).json() == first
        assert after.stats["replayed"] == 2
    assert len(gateway.calls(gateway.claims[0])) == MAX_CHOICES


def test_identical_requests_of_several_prompts_are_not_mixed(gateway: Running) -> None:
    """The one that began first ends its first prompt last, the other its second."""
    asked = {"model": "policy", "prompt": [[5], [6]]}
    begun: list[int] = []

    def script(ids: Any, *_: Any) -> str:
        begun.append(ids[0])
        turn = len(begun) - 1  # 0: first's [5], 1: first's [6], 2: other's [5], 3: other's [6]
        return "word " * (12, 2, 2, 18)[turn] + str(turn)

    gateway.sampler.script = script
    gateway.sampler.delay = 0.05
    with ThreadPoolExecutor() as pool:
        told = []
        for count in (2, 4):
            told.append(pool.submit(post, gateway, "/completions", asked))
            wait_until(lambda count=count: len(begun) == count)
    again = post(gateway, "/completions", asked, headers=RETRY).json()
    assert again in [one.result().json() for one in told]
    assert len(gateway.calls(gateway.claims[0])) == 4


def test_a_refused_request_of_several_prompts_is_retried_once(
    start: Callable[..., Running],
) -> None:
    gateway = start(max_concurrent=2)
    asked = {"model": "policy", "prompt": ["One", "Two", "Three"]}
    assert post(gateway, "/completions", asked).status_code == 429
    gateway.deps.max_concurrent = 10
    again = [post(gateway, "/completions", asked, headers=RETRY).json() for _ in range(2)]
    assert again[0] == again[1]
    assert len(gateway.sampler.requests) == 3


# --- a part of an answer failed: nothing of it trains, and its retry is sampled anew


def failing(gateway: Running, choice: int, prompt: list[int] | None = None) -> None:
    """That choice fails after two tokens, of the first request (with this prompt); once."""
    sample, left = gateway.sampler.sample, [choice]

    async def fail(ids: Any, params: DecodingParams, adapter: str | None) -> AsyncIterator[Any]:
        broken = left.pop() if left and prompt in (None, ids) else None
        said: Counter[int] = Counter()
        async for event in sample(ids, params, adapter):
            said[event.choice] += 1
            if event.choice != broken or said[event.choice] <= 2:
                yield event
            elif said[event.choice] == 3:
                yield FinishEvent(event.choice, "error", error="it fell over")

    gateway.sampler.sample = fail  # type: ignore[method-assign]


def assert_only_the_last_answer_trains(
    gateway: Running, answer: dict[str, Any], failed: int
) -> None:
    rows = gateway.calls(gateway.claims[0])
    done = [row for row in rows if row.state is CallState.COMPLETED]
    assert {row.response_id for row in done} == {answer["id"]}
    assert {row.choice: gateway.renderer.decode(row.response_ids) for row in done} == texts_of(
        answer
    )
    broken = [row for row in rows if row.state is not CallState.COMPLETED]
    assert len(broken) == failed
    assert {row.skip_reason for row in broken} == {SkipReason.SAMPLER_ERROR}
    assert any(row.response_ids for row in broken)  # whole choices are recorded, and explained
    built = build_trajectories(rows, SkipRules(max_length=10_000))
    assert len(built.skipped) == failed
    trained = [name for row in built.trajectories for name in row.call_ids]
    assert sorted(trained) == sorted(row.id for row in done)
    assert gateway.store.accounting(gateway.run_id).adds_up


def texts_of(answer: dict[str, Any]) -> dict[int, str]:
    said = [(one, one.get("text")) for one in answer["choices"]]
    return {one["index"]: one["message"]["content"] if t is None else t for one, t in said}


@pytest.mark.parametrize("again", ["remembered", "recalled"])
@pytest.mark.parametrize(
    ("path", "prompt", "choice", "asked"),
    [
        ("/chat/completions", None, 1, {"messages": USER, "n": 3}),
        ("/chat/completions", None, 0, {"messages": USER, "n": 3, "seed": 7}),
        ("/completions", [6], 1, {"prompt": [[5], [6], [12]], "n": 2, "max_tokens": 200}),
    ],
)
def test_of_several_choices_one_fails(
    gateway: Running, again: str, path: str, prompt: Any, choice: int, asked: dict[str, Any]
) -> None:
    failing(gateway, choice, prompt)
    asked = {"model": "policy"} | asked
    choices = len(asked.get("prompt", [1])) * asked["n"]
    assert post(gateway, path, asked).status_code == 503
    with restarted(gateway) if again == "recalled" else contextlib.nullcontext(gateway) as after:
        answer = post(after, path, asked, headers=RETRY).raise_for_status().json()
        assert [one["index"] for one in answer["choices"]] == list(range(choices))
        assert_only_the_last_answer_trains(gateway, answer, failed=choices)
        assert post(after, path, asked, headers=RETRY).json() == answer


def test_of_a_stream_of_several_choices_one_fails(gateway: Running) -> None:
    failing(gateway, 0)
    asked = HELLO | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    assert "sampler_error" in post(gateway, CHAT, asked).text
    lines = post(gateway, CHAT, asked, headers=RETRY).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    texts = {0: "", 1: ""}
    for one in (one for chunk in chunks for one in chunk["choices"]):
        texts[one["index"]] += one["delta"].get("content") or ""
    said = [{"index": i, "message": {"content": text}} for i, text in texts.items()]
    answer = {"id": chunks[0]["id"], "choices": said}
    assert_only_the_last_answer_trains(gateway, answer, failed=2)
    done = [c for c in gateway.calls(gateway.claims[0]) if c.state is CallState.COMPLETED]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(c.response_ids) for c in done)


def test_what_failed_may_fail_again(gateway: Running) -> None:
    """A retry that is refused does not use up the failure that it repeats."""
    failing(gateway, 0)
    asked = HELLO | {"n": 3}
    assert post(gateway, CHAT, asked).status_code == 503
    gateway.sampler.healthy = False
    assert post(gateway, CHAT, asked, headers=RETRY).status_code == 503
    gateway.sampler.healthy = True
    failing(gateway, 0)
    assert post(gateway, CHAT, asked, headers=RETRY).status_code == 503
    gateway.deps.max_concurrent = 0
    assert post(gateway, CHAT, asked, headers=RETRY).status_code == 429
    gateway.deps.max_concurrent = 10
    answer = post(gateway, CHAT, asked, headers=RETRY).json()
    assert_only_the_last_answer_trains(gateway, answer, failed=6)
    assert [seen.params.n for seen in gateway.sampler.requests] == [3, 3, 3]


def test_a_retry_of_a_failure_is_no_replay_of_an_identical_answer(gateway: Running) -> None:
    first = said(gateway)
    gateway.sampler.fail_after = 0
    assert post(gateway, CHAT, HELLO).status_code == 503
    gateway.sampler.fail_after = None
    second = said(gateway, **RETRY)
    assert second != first
    assert said(gateway, **RETRY) == second


def test_retries_at_once_of_what_failed(gateway: Running) -> None:
    failing(gateway, 2)
    gateway.sampler.delay = 0.02
    asked = HELLO | {"n": 3}
    assert post(gateway, CHAT, asked).status_code == 503
    with ThreadPoolExecutor() as pool:
        again = list(pool.map(lambda _: post(gateway, CHAT, asked, headers=RETRY).json(), range(4)))
    assert all(one == again[0] for one in again)
    assert_only_the_last_answer_trains(gateway, again[0], failed=3)


def test_an_answer_of_which_a_choice_was_lost_is_not_replayed(gateway: Running) -> None:
    """Its gateway died between two commits."""
    asked = HELLO | {"n": 3}
    first = post(gateway, CHAT, asked).raise_for_status().json()
    path = gateway.store.url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE calls SET state = 'open', ended_at = NULL, response = NULL WHERE choice = 2"
        )
    with restarted(gateway) as after:
        again = post(after, CHAT, asked, headers=RETRY).raise_for_status().json()
        assert again["id"] != first["id"]
        assert [seen.params.n for seen in after.sampler.requests] == [3]


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
