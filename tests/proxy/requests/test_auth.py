"""Whose request it is: keys, the context header, sealed attempts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import openai
import pytest
from gateway_client import HTTP, error_of, post
from official_clients import USER, client
from running_gateway import serving
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.app import create_app
from agentrl_tracer.schemas import SkipReason

CHAT = "/chat/completions"
HEADER = "x-agentrl-rollout"
OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}


def test_keys_and_paths(gateway: Running) -> None:
    mine, other = gateway.claims[:2]
    cases = [
        (gateway.base_url(mine), mine.key, 200, None),
        (gateway.base_url(), mine.key, 200, None),  # the key alone says whose call it is
        (gateway.base_url(), OPERATOR_KEY, 200, None),
        (gateway.base_url(other), mine.key, 403, "rollout_mismatch"),
        (gateway.base_url(mine), OPERATOR_KEY, 403, "rollout_mismatch"),
        (gateway.base_url(mine), "sk-wrong", 401, "invalid_api_key"),
        (gateway.base_url(), "sk-wrong", 401, "invalid_api_key"),
        (gateway.base_url(mine), None, 401, "invalid_api_key"),
        (gateway.base_url(), None, 401, "invalid_api_key"),
    ]
    for url, key, status, code in cases:
        response = post(url + CHAT, key)
        assert response.status_code == status, (url, response.text)
        if code is not None:
            assert error_of(response)["code"] == code
            assert key is None or key not in response.text
    assert post(f"{gateway.base_url(mine)}{CHAT}", None,
                headers={"x-api-key": mine.key}).status_code == 200  # fmt: skip
    assert len(gateway.calls(mine)) == 3
    assert gateway.calls(other) == []
    assert (gateway.stats["refused"], gateway.stats["mismatched"]) == (6, 2)
    sums = gateway.store.accounting(gateway.run_id)
    assert sums.adds_up
    assert sums.skipped == {SkipReason.NO_ROLLOUT: 1}


def test_without_an_operator_key_strangers_may_sample_but_not_as_a_rollout(start: Any) -> None:
    gateway: Running = start(operator_key=None)
    assert post(gateway.base_url() + CHAT, None).status_code == 200
    assert post(gateway.base_url() + CHAT, "sk-anything").status_code == 200
    assert post(gateway.base_url() + CHAT, "sk-agentrl-of-a-deleted-run").status_code == 401
    assert post(gateway.base_url(gateway.claims[0]) + CHAT, "sk-anything").status_code == 401
    assert post(f"{gateway.url}/admin/adapters", None, {}).status_code == 403


def test_a_sealed_attempt_is_over(gateway: Running) -> None:
    claim = gateway.claims[0]
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER)
        gateway.seal(claim)
        with pytest.raises(openai.ConflictError) as caught:
            api.chat.completions.create(model="policy", messages=USER)
    assert caught.value.code == "attempt_sealed"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(gateway.calls(claim)) == 1  # the second was refused before it was sampled
    reward = post(gateway.base_url(claim) + "/rewards", claim.key, {"value": 1})
    assert reward.status_code == 409
    assert gateway.store.rewards([claim.rollout_id]) == []


async def test_memory_of_sealed_attempts_is_dropped(gateway: Running) -> None:
    for claim in gateway.claims[:2]:
        post(gateway.base_url(claim) + CHAT, claim.key)
    gateway.seal(gateway.claims[0])
    made = gateway.app.state.gateway
    assert len(made.attempts) == 2
    await made.forget_sealed()  # both asked something just now
    assert len(made.attempts) == 2
    for claim in gateway.claims[:2]:
        made.attempts.get(claim.attempt_id).used_at -= 6
    await made.forget_sealed()
    assert len(made.attempts) == 1
    assert made.attempts.quiet() == []  # it has been looked at; after 12 s it is again
    made.attempts.get(gateway.claims[1].attempt_id).used_at -= 7
    assert made.attempts.quiet() == [gateway.claims[1].attempt_id]


def test_strangers_hear_of_health_only(start: Any) -> None:
    gateway: Running = start()
    keys = (None, "sk-wrong", gateway.claims[0].key)
    for headers in ({} if key is None else {"authorization": f"Bearer {key}"} for key in keys):
        assert HTTP.get(f"{gateway.url}/healthz", headers=headers).json() == {
            "status": "ok", "version": version("agentrl-middleware"),
            "boot_id": gateway.deps.boot_id, "recoveries": 0,
            "context_length": gateway.deps.context_length,
        }  # fmt: skip
    for headers in (OPERATOR, {"x-api-key": OPERATOR_KEY}):
        health = HTTP.get(f"{gateway.url}/healthz", headers=headers).json()
        assert (health["gateway"]["accepted"], health["in_flight"]) == (0, 0)
        assert {"pid", "adapters", "sampler"} <= set(health)
    with serving(create_app(replace(gateway.deps, operator_key=None))) as url:
        assert "gateway" in HTTP.get(f"{url}/healthz").json()  # on this machine, for anybody


def test_the_context_header_alone_identifies(gateway: Running) -> None:
    mine, other = gateway.claims[:2]
    assert gateway.deps.operator_key == OPERATOR_KEY
    shared = [None, OPERATOR_KEY, "sk-made-up-by-a-framework"]
    for key, base in itertools.product(shared, [gateway.base_url(), gateway.base_url(mine)]):
        response = post(base + CHAT, key, headers={HEADER: mine.key})
        assert response.status_code == 200, (key, base, response.text)
    assert post(gateway.base_url() + CHAT, mine.key, headers={HEADER: mine.key}).status_code == 200
    assert len(gateway.calls(mine)) == 7
    assert gateway.calls(other) == []


def test_a_header_that_disagrees_is_refused(gateway: Running) -> None:
    mine, other = gateway.claims[:2]
    cases = [
        (gateway.base_url(other), None, mine.key, 403, "rollout_mismatch"),
        (gateway.base_url(other), other.key, mine.key, 403, "rollout_mismatch"),
        (gateway.base_url(), other.key, mine.key, 403, "rollout_mismatch"),
        (gateway.base_url(mine), "sk-agentrl-gone", mine.key, 403, "rollout_mismatch"),
        (gateway.base_url(mine), mine.key, "sk-agentrl-gone", 401, "invalid_api_key"),
        (gateway.base_url(), OPERATOR_KEY, OPERATOR_KEY, 401, "invalid_api_key"),
    ]
    for base, key, named, status, code in cases:
        response = post(base + CHAT, key, headers={HEADER: named})
        assert (response.status_code, error_of(response)["code"]) == (status, code)
        assert named not in response.text
    assert (gateway.stats["refused"], gateway.stats["mismatched"]) == (6, 4)
    assert gateway.calls(mine) == gateway.calls(other) == []
    gateway.seal(mine)
    sealed = post(gateway.base_url() + CHAT, None, headers={HEADER: mine.key})
    assert (sealed.status_code, error_of(sealed)["code"]) == (409, "attempt_sealed")


def test_spans_and_rewards_follow_the_header(gateway: Running) -> None:
    claim = gateway.claims[1]
    url = gateway.base_url(claim) + "/rewards"
    headers = {HEADER: claim.key}
    assert post(url, OPERATOR_KEY, {"value": 2}, headers=headers).status_code == 200
    [reward] = gateway.store.rewards([claim.rollout_id])
    assert (reward.attempt_id, reward.value) == (claim.attempt_id, 2.0)
