"""How much a rollout may use, and how many requests the gateway takes on at once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from gateway_client import BODY, error_of, post
from official_clients import USER, client
from running_gateway import serving
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.app import create_app

CHAT = "/chat/completions"


# --- budgets


def test_calls_of_a_rollout_are_limited(start: Any) -> None:
    gateway: Running = start(max_calls_per_rollout=3)
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, n=2)
        with pytest.raises(openai.RateLimitError) as caught:
            api.chat.completions.create(model="policy", messages=USER, n=2)
        assert caught.value.code == "rollout_budget_exceeded"
        api.chat.completions.create(model="policy", messages=USER)
        with pytest.raises(openai.RateLimitError):
            api.chat.completions.create(model="policy", messages=USER)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(gateway.calls(gateway.claims[0])) == 3  # a refusal leaves no row
    assert gateway.stats["over_budget"] == 2
    with client(gateway, gateway.claims[1]) as api:  # another rollout has its own
        api.chat.completions.create(model="policy", messages=USER)
    assert post(gateway.base_url() + CHAT, OPERATOR_KEY).status_code == 200  # no attempt, no budget
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_tokens_of_a_rollout_are_limited(start: Any) -> None:
    gateway: Running = start(max_tokens_per_rollout=200)
    claim = gateway.claims[0]
    used: list[int] = []

    def use_up(api: openai.OpenAI) -> None:
        for _ in range(50):
            answer = api.chat.completions.create(model="policy", messages=USER)
            assert answer.usage is not None
            used.append(answer.usage.total_tokens)

    with (
        client(gateway).with_options(max_retries=3) as api,
        pytest.raises(openai.RateLimitError, match="max_tokens_per_rollout") as caught,
    ):
        use_up(api)
    assert caught.value.code == "rollout_budget_exceeded"
    # The last answer was cut to what was left, so not one token more was used.
    calls = gateway.calls(claim)
    assert sum(used) == sum(len(c.prompt_ids) + len(c.response_ids) for c in calls) <= 200
    assert calls[-1].finish_reason == "length"
    assert gateway.store.spent(claim.attempt_id) == (len(calls), sum(used))
    assert len(gateway.sampler.requests) == len(calls)
    assert gateway.stats["over_budget"] == 1  # and the client did not try again


def test_a_budget_survives_a_restart(start: Any) -> None:
    gateway: Running = start(max_calls_per_rollout=2)
    claim = gateway.claims[0]
    assert post(gateway.base_url(claim) + CHAT, claim.key).status_code == 200
    with serving(create_app(gateway.deps)) as url:  # it remembers nothing
        path = f"{url}/rollouts/{claim.rollout_id}/v1{CHAT}"
        assert post(path, claim.key).status_code == 200
        response = post(path, claim.key)
    assert (response.status_code, error_of(response)["code"]) == (429, "rollout_budget_exceeded")


def test_choices_share_a_prompt(start: Any) -> None:
    gateway: Running = start(max_tokens_per_rollout=10_000)
    claim = gateway.claims[0]
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER, n=3)
    assert answer.usage is not None
    assert gateway.store.spent(claim.attempt_id) == (3, answer.usage.total_tokens)
    memory = gateway.app.state.gateway.attempts.get(claim.attempt_id)
    assert (memory.spent.calls, memory.spent.tokens) == (3, answer.usage.total_tokens)


# --- overload


async def test_overload_is_refused_and_retries_succeed(start: Any) -> None:
    gateway: Running = start(max_concurrent=2)
    gateway.sampler.delay = 0.02
    claim = gateway.claims[0]

    async def ask(retries: int) -> Any:
        async with openai.AsyncOpenAI(
            base_url=gateway.base_url(claim), api_key=claim.key, max_retries=retries
        ) as api:
            return await api.chat.completions.create(model="policy", messages=USER)

    answers = await asyncio.gather(*(ask(12) for _ in range(6)))
    assert gateway.stats["overloaded"] >= 4
    # Six identical requests, refused or not, are six samples: none got another's answer.
    assert len({answer.id for answer in answers}) == 6
    assert len(gateway.calls(claim)) == 6
    assert gateway.stats["in_flight"] == 0

    waiting = [asyncio.create_task(ask(0)) for _ in range(2)]
    await asyncio.sleep(0.2)
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(0)
    await asyncio.gather(*waiting)
    assert caught.value.code == "overloaded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
    assert len(gateway.calls(claim)) == 8
    assert gateway.store.accounting(gateway.run_id).adds_up


async def test_a_long_queue_is_overload_too(start: Any) -> None:
    gateway: Running = start(max_queued=3)
    gateway.sampler.delay = 0.02
    url, key = gateway.base_url() + CHAT, OPERATOR_KEY
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient() as api:
        first = asyncio.create_task(api.post(url, json=BODY | {"n": 3}, headers=headers))
        await asyncio.sleep(0.2)
        gateway.sampler.stats = lambda: {"waiting": 3}  # type: ignore[method-assign]
        refused = await api.post(url, json=BODY, headers=headers)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "overloaded")
        gateway.sampler.stats = lambda: {"waiting": 2}  # type: ignore[method-assign]
        assert (await api.post(url, json=BODY, headers=headers)).status_code == 200
        assert (await first).status_code == 200


def test_refusals_give_their_place_back(start: Any) -> None:
    gateway: Running = start(max_concurrent=1)
    url = gateway.base_url() + CHAT
    too_long = [{"role": "user", "content": "word " * 5000}]
    for _ in range(3):
        assert post(url, OPERATOR_KEY, BODY | {"messages": too_long}).status_code == 400
    gateway.sampler.fail_after = 1
    assert post(url, OPERATOR_KEY).status_code == 503
    gateway.sampler.fail_after = None
    assert post(url, OPERATOR_KEY).status_code == 200
