"""Which models there are, asked by the official clients of both APIs."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest
from official_clients import claude, client
from scripted_sampler import OPERATOR_KEY, Running

NAMES = {"policy": "policy", "base": None, "org/name-1.5": "policy"}


@pytest.fixture
def gateway(start: Any) -> Running:
    return start(models=NAMES)


def test_openai(gateway: Running) -> None:
    with client(gateway) as api:
        listed = list(api.models.list())
        assert [model.id for model in listed] == sorted(NAMES)
        for model in listed:
            assert api.models.retrieve(model.id) == model
            assert (model.object, model.owned_by) == ("model", "agentrl")
        with pytest.raises(openai.NotFoundError) as caught:
            api.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    assert "org/other" in caught.value.message


def test_anthropic(gateway: Running) -> None:
    with claude(gateway) as api:
        listed = list(api.models.list())
        assert [model.id for model in listed] == sorted(NAMES)
        for model in listed:
            assert api.models.retrieve(model.id) == model
            assert (model.type, model.display_name) == ("model", model.id)
        with pytest.raises(anthropic.NotFoundError) as caught:
            api.models.retrieve("nobody")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with (
        claude(gateway, api_key="sk-wrong") as api,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        api.models.retrieve("policy")
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_who_may_ask(gateway: Running) -> None:
    rollout = gateway.base_url(gateway.claims[0])
    other = {"authorization": f"Bearer {gateway.claims[1].key}"}
    operator = {"authorization": f"Bearer {OPERATOR_KEY}"}
    for path in ("/models", "/models/policy"):
        assert httpx.get(gateway.base_url() + path, headers=operator).status_code == 200
        for base in (gateway.base_url(), rollout):
            answer = httpx.get(base + path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        lists = httpx.get(f"{rollout}/models", headers=other).status_code
        assert httpx.get(rollout + path, headers=other).status_code == lists >= 400
