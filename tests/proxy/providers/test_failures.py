"""What goes wrong with a provider's call is told with its cause, and blamed on the right one."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
from provider_servers import (
    SECRET,
    answerer,
    asking,
    assert_no_key,
    only_call,
    post_to,
    said,
    trouble,
)
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel
from agentrl_tracer.schemas import CallState, SkipReason


@pytest.fixture(autouse=True, scope="module")
def untraced() -> None:
    """Other tests of this process trace openai, as an agent's process does. A gateway's does not,
    and the tracing would be the first to fail on a provider's answer."""
    OpenAIInstrumentor().uninstrument()


def test_timeout(start: Any, provider: Running) -> None:
    provider.sampler.delay = 0.5
    gateway: Running = start(provider_models={"answerer": answerer(provider, timeout=0.7)})
    begun = time.monotonic()
    answer = post_to(gateway)
    assert time.monotonic() - begun < 8  # the import of LiteLLM is in it
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "provider_timeout")
    assert "'answerer' did not answer in time" in answer.text
    assert only_call(gateway).state is CallState.ERROR


def test_provider_down(start: Any) -> None:
    other = ProviderModel("openai/x", "http://127.0.0.1:9/v1", SECRET, num_retries=0)
    gateway: Running = start(provider_models={"answerer": other})
    answer = post_to(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "provider_unreachable")
    assert "the provider of 'answerer' cannot be reached" in answer.text
    call = only_call(gateway)
    assert (call.state, call.skip_reason) == (CallState.ERROR, SkipReason.NOT_TRAINABLE_MODEL)
    assert "cannot be reached" in (call.error or "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "context_length_exceeded"),
        (401, "authentication_error", "invalid_api_key"),
        (429, "rate_limit_error", "rate_limit_exceeded"),
        (403, "permission_error", "provider_error"),
        (503, "server_error", "provider_error"),
    ],
)
def test_a_providers_refusal_in_openais_shape(
    start: Any, faulty: Any, caplog: Any, status: int, kind: str, code: str, stream: bool
) -> None:
    def quoting(headers: Any) -> dict[str, Any]:  # the worst provider: it says what it was sent
        return trouble(f"no: {headers['authorization']}", None if code[:4] == "prov" else code)

    upstream = faulty((status, quoting))
    gateway = asking(start, upstream)
    caplog.set_level(logging.DEBUG)
    response = post_to(gateway, stream=stream)
    assert upstream.seen[0]["headers"]["authorization"] == f"Bearer {SECRET}"
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, code)
    assert "[key]" in error["message"]
    assert response.headers.get("retry-after") == ("7" if status == 429 else None)
    call = only_call(gateway)
    assert (call.state, call.params["error_status"]) == (CallState.ERROR, status)
    assert_no_key(gateway, caplog.text, response.text, call.error or "")
    assert gateway.claims[0].key not in json.dumps(upstream.seen)


@pytest.mark.parametrize(
    ("model", "body", "code"),
    [
        ("anthropic/claude-sonnet-4-5", {"logit_bias": {"5": 1}}, "unsupported_parameter"),
        ("anthropic/claude-sonnet-4-5", {"thinking": {"type": "enabled", "budget_tokens": "x"}},
         "invalid_value"),
        ("openai/x", {"web_search_options": {"search_context_size": []}, "thinking": {}},
         "unsupported_parameter"),
    ],
    ids=["unsupported", "stumbles", "unsupported by OpenAI"],
)  # fmt: skip
def test_without_a_request_the_provider_is_not_named(
    start: Any, faulty: Any, model: str, body: dict[str, Any], code: str
) -> None:
    provider = faulty((200, said("x")))
    gateway = asking(start, provider, model)
    answer = post_to(gateway, **body)
    assert provider.seen == []
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert "the provider" not in error["message"]
    [call] = gateway.calls(gateway.claims[0])
    assert "error_status" not in call.params
    assert call.error == error["message"]


@pytest.mark.parametrize(
    ("answered", "status"),
    [
        ((400, trouble("no")), 400),
        ((200, b"data: not json\n\n"), 500),
        ((200, {"id": "x", "choices": 5}), 500),
    ],
    ids=["refuses", "is unreadable", "is of another shape"],
)
def test_a_failed_answer_names_the_provider(
    start: Any, faulty: Any, answered: Any, status: int
) -> None:
    gateway = asking(start, faulty(answered))
    got = post_to(gateway)
    assert got.status_code == status
    error = got.json()["error"]
    assert error["code"] == "provider_error"
    assert "the provider of 'answerer' answered" in error["message"]
    [call] = gateway.calls(gateway.claims[0])
    assert call.params["error_status"] == status


@pytest.mark.parametrize(
    "asked",
    [
        ("chat/completions", {}),
        ("responses", {"input": "q", "messages": None}),
        ("messages", {"max_tokens": 9}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_an_answer_without_a_choice_is_an_error(start: Any, faulty: Any, asked: Any) -> None:
    """As content filters of OpenRouter and Azure give it."""
    path, body = asked
    gateway = asking(start, faulty((200, {**said(""), "choices": []})))
    got = post_to(gateway, path, **body)
    assert got.status_code == 502
    assert "the provider of 'answerer' gave no choice" in got.text
    call = only_call(gateway)
    assert (call.state, call.error) == (
        CallState.ERROR,
        "the provider of 'answerer' gave no choice",
    )


@pytest.mark.parametrize("broken", ["import", "settings"])
def test_litellm_that_does_not_start_is_503(
    start: Any, faulty: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    provider = faulty((200, said("x")))
    if broken == "import":

        async def failing(_: Any) -> None:
            raise ImportError(f"no module named x, says {SECRET}")

        monkeypatch.setattr("agentrl_proxy.providers.litellm_setup.make_router", failing)
        gateway = asking(start, provider)
    else:
        gateway = asking(start, provider, params={"tpm": "a lot"})
    for path in ("chat/completions", "messages", "messages/count_tokens"):
        answer = post_to(gateway, path, max_tokens=9)
        assert answer.status_code == 503, answer.text
        assert "LiteLLM" in answer.text
        assert "does not start" in answer.text
        assert SECRET not in answer.text
    assert provider.seen == []
    assert SECRET not in caplog.text
    for call in gateway.calls(gateway.claims[0]):
        assert "error_status" not in call.params


def test_a_count_that_fails_names_its_cause(
    start: Any, faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = asking(start, faulty((200, said("x"))))

    def failing(*_: Any, **__: Any) -> None:
        raise TypeError("an odd prompt")

    monkeypatch.setattr("litellm.token_counter", failing)
    answer = post_to(gateway, "messages/count_tokens")
    assert answer.status_code == 400
    assert "an odd prompt" in answer.text
