"""A marked retry of a request with several answers gets them all, or has all sampled anew."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gateway_client import BODY, wait_until
from official_clients import USER
from retries import CHAT, RETRY, post, said
from running_gateway import restarted
from scripted_sampler import Running

from agentrl_proxy.protocols.chat import MAX_CHOICES
from agentrl_proxy.sampler import DecodingParams, FinishEvent
from agentrl_tracer.schemas import CallState, SkipReason
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.trajectories import build_trajectories


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
    asked = BODY | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
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
    asked = BODY | {"n": 3}
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
    assert post(gateway, CHAT, BODY).status_code == 503
    gateway.sampler.fail_after = None
    second = said(gateway, **RETRY)
    assert second != first
    assert said(gateway, **RETRY) == second


def test_retries_at_once_of_what_failed(gateway: Running) -> None:
    failing(gateway, 2)
    gateway.sampler.delay = 0.02
    asked = BODY | {"n": 3}
    assert post(gateway, CHAT, asked).status_code == 503
    with ThreadPoolExecutor() as pool:
        again = list(pool.map(lambda _: post(gateway, CHAT, asked, headers=RETRY).json(), range(4)))
    assert all(one == again[0] for one in again)
    assert_only_the_last_answer_trains(gateway, again[0], failed=3)


def test_an_answer_of_which_a_choice_was_lost_is_not_replayed(gateway: Running) -> None:
    """Its gateway died between two commits."""
    asked = BODY | {"n": 3}
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
