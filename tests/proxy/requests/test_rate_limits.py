"""How much a rollout may use, and how many requests the gateway takes on at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from gateway_client import BODY, ask, error_of, post
from official_clients import USER
from running_gateway import serving
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.app import create_app

CHAT = "/chat/completions"


# --- budgets


def test_calls_of_a_rollout_are_limited(start: Any) -> None:
    gateway: Running = start(max_calls_per_rollout=3)
    answers = [ask(gateway, n=n) for n in (2, 2, 1, 1)]
    assert [answer.status_code for answer in answers] == [200, 429, 200, 429]
    assert error_of(answers[1])["code"] == "rollout_budget_exceeded"
    assert answers[1].headers["x-should-retry"] == "false"
    assert len(gateway.calls(gateway.claims[0])) == 3  # a refusal leaves no row
    assert gateway.stats["over_budget"] == 2
    for key in (gateway.claims[1].key, OPERATOR_KEY):  # another rollout has its own, or none
        assert post(gateway.base_url() + CHAT, key).status_code == 200
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_tokens_of_a_rollout_are_limited(start: Any) -> None:
    gateway: Running = start(max_tokens_per_rollout=200)
    used: list[int] = []
    while (answer := ask(gateway)).is_success:
        used.append(answer.json()["usage"]["total_tokens"])
    assert error_of(answer)["code"] == "rollout_budget_exceeded"
    assert "max_tokens_per_rollout" in answer.text
    # The last answer was cut to what was left, so not one token more was used.
    calls = gateway.calls(gateway.claims[0])
    assert sum(used) == sum(len(c.prompt_ids) + len(c.response_ids) for c in calls) <= 200
    assert calls[-1].finish_reason == "length"
    assert gateway.store.spent(gateway.claims[0].attempt_id) == (len(calls), sum(used))
    assert len(gateway.sampler.requests) == len(calls)


def test_a_budget_survives_a_restart(start: Any) -> None:
    gateway: Running = start(max_calls_per_rollout=2)
    assert ask(gateway).is_success
    with serving(create_app(gateway.deps)) as url:  # it remembers nothing
        after = replace(gateway, url=url)
        assert ask(after).is_success
        assert error_of(ask(after))["code"] == "rollout_budget_exceeded"


def test_choices_share_a_prompt(start: Any) -> None:
    gateway: Running = start(max_tokens_per_rollout=10_000)
    attempt_id = gateway.claims[0].attempt_id
    used = ask(gateway, n=3).json()["usage"]["total_tokens"]
    assert gateway.store.spent(attempt_id) == (3, used)
    spent = gateway.app.state.gateway.attempts[attempt_id].spent
    assert (spent.calls, spent.tokens) == (3, used)


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
