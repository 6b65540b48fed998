"""Fields that would change the answer are refused by name, unless their value is neutral."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_client import BODIES, post
from provider_servers import SECRET, FaultyServer, said
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel

EVERYWHERE: list[tuple[str, Any, Any]] = [
    ("frequency_penalty", 0.5, 0.0),
    ("presence_penalty", -1, 0),
    ("repetition_penalty", 1.1, 1.0),
    ("min_p", 0.1, 0),
    ("ignore_eos", True, False),
    ("skip_special_tokens", False, True),
    ("add_generation_prompt", False, True),
    ("continue_final_message", True, False),
    ("bad_words", ["x"], []),
    ("stop_token_ids", [5], []),
    ("guided_regex", "a+", None),
    ("web_search_options", {"search_context_size": "low"}, None),
    ("functions", [{"name": "f"}], []),
    ("function_call", "auto", None),
    ("extra_body", {"top_k": 1}, {}),
]
OF_A_PROTOCOL: list[tuple[str, str, Any]] = [
    ("chat/completions", "system", "Be brief."),
    ("chat/completions", "structured_outputs", {"choice": ["a", "b"]}),
    ("completions", "guided_json", {"type": "object"}),
    ("responses", "response_format", {"type": "json_object"}),
    ("responses", "max_tokens", 5),
    ("messages", "stop", ["x"]),
    ("messages", "mcp_servers", [{"type": "url", "url": "http://x", "name": "x"}]),
]


def ask(gateway: Running, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    claim = gateway.claims[0]
    body = {"model": "policy"} | BODIES[path] | more
    answer = post(f"{gateway.base_url(claim)}/{path}", claim.key, body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_by_our_model(shared_gateway: Running, path: str) -> None:
    for name, value, _ in EVERYWHERE:
        status, answer = ask(shared_gateway, path, **{name: value})
        assert status == 400, name
        assert f"{name} is not supported; " in answer["error"]["message"]
    neutral = {name: neutral for name, _, neutral in EVERYWHERE}
    status, answer = ask(shared_gateway, path, **neutral, prediction={"type": "content"}, user="u")
    assert status == 200, answer


@pytest.mark.parametrize(("path", "name", "value"), OF_A_PROTOCOL)
def test_of_another_protocol(shared_gateway: Running, path: str, name: str, value: Any) -> None:
    status, answer = ask(shared_gateway, path, **{name: value})
    assert status == 400
    assert name in answer["error"]["message"]
    assert " is not supported; " in answer["error"]["message"]


def test_by_providers_models(start: Any) -> None:
    """What LiteLLM passes on is the provider's to judge."""
    provider = FaultyServer((200, said("x")))
    one = ProviderModel("openai/x", provider.url, SECRET, num_retries=0)
    gateway: Running = start(provider_models={"o": one})
    for name, value in (
        ("repetition_penalty", 1.1),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("guided_json", {"type": "object"}),
    ):
        status, answer = ask(gateway, "chat/completions", model="o", **{name: value})
        assert status == 400
        assert f"{name} is not supported; " in answer["error"]["message"]
    assert provider.seen == []
    assert ask(gateway, "chat/completions", model="o", frequency_penalty=0.5)[0] == 200
    assert len(provider.seen) == 1
