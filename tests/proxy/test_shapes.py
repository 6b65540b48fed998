"""JSON of the wrong shape: refused by the name of the field, whoever's model is asked."""

# ruff: noqa: F811  (fixtures come from test_other_models)

from __future__ import annotations

from typing import Any

import httpx
import pytest
from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
from scripted_sampler import Running
from test_elsewhere import forget_clients, pytestmark  # noqa: F401
from test_other_models import SECRET, Faulty, faulty, said, trouble  # noqa: F401

from agentrl_proxy.dependencies import ProviderModel

HI = [{"role": "user", "content": "h"}]


@pytest.fixture(autouse=True, scope="module")
def unwatched() -> None:
    """Other tests of this process trace openai, as an agent's process does; a gateway's never does,
    and what traces it would be the first to stumble over a provider's answer."""
    OpenAIInstrumentor().uninstrument()


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": [1]}, "messages[0]"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [{"role": [], "content": "h"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
    (part(type=[], text="x"), "messages[0].content[0].type"),
    (part(type={}, text="x"), "messages[0].content[0].type"),
    (part(type="text", text=[]), "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [[]]}]}, "messages[0].tool_calls[0]"),
    ({"tools": 5}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function"),
    ({"tools": [{"type": {}}]}, "tools[0].type"),
    ({"tool_choice": []}, "tool_choice"),
    ({"response_format": {"type": []}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema"),
    ({"temperature": "hot"}, "temperature"),
    ({"stop": {}}, "stop"),
    ({"stop": [[]]}, "stop[0]"),
    ({"logit_bias": 3}, "logit_bias"),
    ({"seed": []}, "seed"),
    ({"max_tokens": "9"}, "max_tokens"),
]
ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    (part(type="image_url", image_url=5), "messages[0].content[0].image_url"),
    (part(type="input_audio", input_audio="x"), "messages[0].content[0].input_audio"),
    ({"functions": [1]}, "functions[0]"),
    ({"web_search_options": 3}, "web_search_options"),
]


def post(gateway: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    claim = gateway.claims[0]
    headers = {"x-api-key": claim.key}
    return httpx.post(f"{gateway.base_url(claim)}/{path}", json=body, headers=headers, timeout=60)


def elsewhere(start: Any, provider: Faulty, model: str = "openai/x", **more: Any) -> Running:
    one = ProviderModel(model, provider.url, SECRET, num_retries=0, **more)
    return start(provider_models={"o": one})


def assert_names(answer: httpx.Response, field: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error
    assert field in error["message"]


@pytest.mark.parametrize(("body", "field"), CHAT, ids=str)
def test_our_model(shared_gateway: Running, body: dict[str, Any], field: str) -> None:
    asked = {"model": "policy", "messages": HI} | body
    assert_names(post(shared_gateway, "chat/completions", asked), field)
    assert shared_gateway.stats["accepted"] == 0


def test_somebody_elses_model(start: Any, faulty: Any) -> None:
    provider = faulty((200, said("x")))
    gateway = elsewhere(start, provider)
    for body, field in CHAT + ELSEWHERE:
        asked = {"model": "o", "messages": HI} | body
        assert_names(post(gateway, "chat/completions", asked), field)
    for path, body, field in (
        ("completions", {"prompt": "x", "stop": 4}, "stop"),
        ("completions", {"prompt": "x", "temperature": []}, "temperature"),
        ("responses", {"input": "h", "temperature": "hot"}, "temperature"),
    ):
        assert_names(post(gateway, path, {"model": "o"} | body), field)
    refused = post(gateway, "messages", {"model": "o", "max_tokens": "x", "messages": HI})
    assert (refused.status_code, "max_tokens" in refused.text) == (400, True)
    assert provider.seen == []
    assert gateway.stats["accepted"] == 0
    # What only a provider can judge goes on to it.
    for body in (
        {"temperature": 7.5, "logit_bias": {"5": 400}, "stop": ["x"] * 30},
        {"tools": [{"type": "web_search"}], "response_format": {"type": "grammar"}},
        part(type="image_url", image_url={"url": "https://nowhere/x.png"}),
        part(type="video_url", video_url={"url": "https://nowhere/x.mp4"}),
    ):
        assert post(gateway, "chat/completions", {"model": "o", "messages": HI} | body).is_success


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
def test_a_provider_that_was_not_asked_is_not_blamed(
    start: Any, faulty: Any, model: str, body: dict[str, Any], code: str
) -> None:
    provider = faulty((200, said("x")))
    gateway = elsewhere(start, provider, model)
    answer = post(gateway, "chat/completions", {"model": "o", "messages": HI} | body)
    assert provider.seen == []
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert "the provider" not in error["message"]
    [call] = gateway.calls(gateway.claims[0])
    assert "provider_status" not in call.params
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
def test_a_provider_that_was_asked_is(start: Any, faulty: Any, answered: Any, status: int) -> None:
    gateway = elsewhere(start, faulty(answered))
    got = post(gateway, "chat/completions", {"model": "o", "messages": HI})
    assert got.status_code == status
    error = got.json()["error"]
    assert error["code"] == "provider_error"
    assert "the provider of 'o' answered" in error["message"]
    [call] = gateway.calls(gateway.claims[0])
    assert call.params["provider_status"] == status


@pytest.mark.parametrize("broken", ["import", "settings"])
def test_litellm_that_does_not_start_is_nobodys_request(
    start: Any, faulty: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    provider = faulty((200, said("x")))
    if broken == "import":

        def failing(_: Any) -> None:
            raise ImportError(f"no module named x, says {SECRET}")

        monkeypatch.setattr("agentrl_proxy.providers.service.make_router", failing)
        gateway = elsewhere(start, provider)
    else:
        gateway = elsewhere(start, provider, params={"tpm": "a lot"})
    for path in ("chat/completions", "messages", "messages/count_tokens"):
        answer = post(gateway, path, {"model": "o", "messages": HI, "max_tokens": 9})
        assert answer.status_code == 503, answer.text
        assert "LiteLLM" in answer.text
        assert "does not start" in answer.text
        assert SECRET not in answer.text
    assert provider.seen == []
    assert SECRET not in caplog.text
    for call in gateway.calls(gateway.claims[0]):
        assert "provider_status" not in call.params


def test_a_count_blames_whoever_it_was(
    start: Any, faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = elsewhere(start, faulty((200, {"input_tokens": 0})))
    asked = {"model": "o", "messages": HI}
    answer = post(gateway, "messages/count_tokens", asked)
    assert (answer.status_code, "counted no tokens" in answer.text) == (502, True)

    async def stumbling(*_: Any, **__: Any) -> None:
        raise TypeError("the reply has no number")

    monkeypatch.setattr("litellm.acount_tokens", stumbling)
    answer = post(gateway, "messages/count_tokens", asked)
    assert answer.status_code == 502, answer.text
    assert "the reply has no number" in answer.text
