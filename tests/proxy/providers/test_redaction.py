"""Secrets of requests to providers are quoted nowhere."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from official_clients import USER, client
from provider_servers import SECRET, asking, assert_no_key, only_call, post_to, said, trouble
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.providers.redaction import Redaction


def test_what_is_taken_for_a_secret() -> None:
    models = [
        ProviderModel(
            "azure/x",
            "https://me:pa55-word-secret@host/v1?sig=a-signature",
            "sk-the-key",
            params={
                "extra_headers": {"x-team": "Bearer some-words", "x-short": "short"},
                "vertex_credentials": {"private": ["an-rsa-key"]},
                "organization": "org-AbCdEf",
                "api_version": "2024-10-21",
                "base_model": "azure/gpt-4o-mini",
            },
        )
    ]
    quoted = (
        "pa55-word-secret a-signature sk-the-key some-words short an-rsa-key org-AbCdEf "
        "2024-10-21 azure/gpt-4o-mini host/v1"
    )
    assert Redaction(models).clean(quoted) == (
        "[key] [key] [key] [key] short [key] [key] 2024-10-21 azure/gpt-4o-mini host/v1"
    )


@pytest.mark.parametrize("place", ["header", "parameter", "code"])
def test_secrets_beside_the_key_are_not_quoted_either(
    start: Any, faulty: Any, caplog: Any, place: str
) -> None:
    hidden = "hunter2-very-secret"
    code = hidden.replace("-", "_") if place == "code" else None
    hidden = code or hidden
    upstream = faulty((400, lambda _: trouble(f"model gpt-4o-mini, us-east-1: {hidden}", code)))
    params: dict[str, Any] = {
        "extra_headers": {"authorization": f"Bearer {hidden}", "x-team": hidden},
        "base_model": "gpt-4o-mini",
    }
    if place == "parameter":
        params = {"organization": hidden, "aws_region_name": "us-east-1"}
    gateway = asking(start, upstream, params=params)
    caplog.set_level(logging.DEBUG)
    response = post_to(gateway)
    assert len(upstream.seen) == 1
    assert response.status_code == 400
    assert "model gpt-4o-mini, us-east-1: [key]" in response.json()["error"]["message"]
    call = only_call(gateway)
    stored = [call.error or "", json.dumps(call.params), json.dumps(call.response)]
    assert not [text for text in (response.text, caplog.text, *stored) if hidden in text]


def test_a_key_that_litellm_finds_in_the_environment(
    start: Any, faulty: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = faulty((400, lambda headers: trouble(f"no: {headers['authorization']}")))
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("OPENAI_BASE_URL", upstream.url)
    gateway: Running = start(
        provider_models={"answerer": ProviderModel("openai/gpt-4o-mini", num_retries=0)}
    )
    caplog.set_level(logging.DEBUG)
    response = post_to(gateway)
    assert upstream.seen[0]["headers"]["authorization"] == f"Bearer {SECRET}"
    assert response.status_code == 400
    assert "[key]" in response.json()["error"]["message"]
    assert_no_key(gateway, caplog.text, response.text, only_call(gateway).error or "")
    assert Redaction([]).clean(SECRET) == SECRET  # without provider models there are no secrets


def test_a_request_cannot_lead_the_key_elsewhere(
    gateway: Running, provider: Running, faulty: Any
) -> None:
    trap = faulty((200, said("caught")))
    with client(gateway) as api:
        answer = api.chat.completions.create(
            model="answerer",
            messages=USER,
            extra_body={
                "api_base": trap.url,
                "base_url": trap.url,
                "api_key": "other",
                "fallbacks": [{"model": "openai/y", "api_base": trap.url}],
                "mock_response": "mocked",
                "extra_headers": {"x": "y"},
                "num_retries": 99,
            },
        )
    assert trap.seen == []
    assert len(provider.sampler.requests) == 1
    assert answer.choices[0].message.content != "mocked"
