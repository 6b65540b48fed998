"""Thinking, JSON answers and allowed tools, as different APIs ask for them; refused fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from family_templates import FAMILIES
from gateway_client import BODIES, post
from official_clients import CALL, FUNCTION, TOOLS, USER, client
from provider_servers import SECRET, FaultyServer, said
from running_gateway import running
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.templates import switches

OFF: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),  # vLLM, SGLang
    ("chat/completions", {"enable_thinking": False}),  # Alibaba
    ("chat/completions", {"thinking": {"type": "disabled"}}),  # DeepSeek, Z.ai
    ("chat/completions", {"reasoning_effort": "none"}),
    ("chat/completions", {"reasoning": {"enabled": False}}),  # OpenRouter
    ("responses", {"reasoning": {"effort": "none"}}),
    ("responses", {"reasoning_effort": "none"}),
    ("responses", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("messages", {"thinking": {"type": "disabled"}}),
]
ON: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"reasoning_effort": "low"}),
    ("chat/completions", {"reasoning_effort": "none", "enable_thinking": True}),
    ("responses", {"reasoning": {"effort": "high", "summary": "auto"}}),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
]
CLOSED = "<think>\n\n</think>\n\n"  # what Qwen3's template writes for no thinking


@pytest.fixture(scope="module")
def qwen3(tokenizer: Any) -> Renderer:
    return Renderer(FAMILIES["qwen3"].tokenizer(tokenizer))


@pytest.fixture(params=[None, False], ids=["default", "off"])
def thinker(request: Any, tmp_path: Path, qwen3: Renderer) -> Iterator[Running]:
    """With the setting ``sampler.thinking`` or without."""
    defaults = {"max_tokens": 256, "thinking": request.param}
    with running(tmp_path, qwen3, {}, defaults=defaults) as gateway:
        yield gateway


def test_the_thinking_switch(thinker: Running, qwen3: Renderer) -> None:
    claim = thinker.claims[0]
    default = thinker.deps.defaults["thinking"]
    cases = [(path, more, False) for path, more in OFF] + [(path, more, True) for path, more in ON]
    cases += [(path, {}, default) for path in ("chat/completions", "responses", "messages")]
    for path, more, thinks in cases:
        body = {"model": "policy"} | BODIES[path] | more
        answer = post(f"{thinker.base_url(claim)}/{path}", claim.key, body)
        assert answer.status_code == 200, answer.text
        call = thinker.calls(claim)[-1]
        text = qwen3.decode_raw(call.prompt_ids)
        assert text.endswith(CLOSED) == (thinks is False), (path, more)
        kwargs = None if thinks is None else {"enable_thinking": thinks}
        assert call.params.get("chat_template_kwargs") == kwargs


def test_a_switch_that_the_template_lacks(shared_gateway: Running) -> None:
    with client(shared_gateway) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(
                model="policy",
                messages=USER,
                extra_body={"chat_template_kwargs": {"enable_thinkin": False}},
            )
        # Hints to models that think: without a switch there is nothing to do.
        api.chat.completions.create(model="policy", messages=USER, reasoning_effort="low")
    assert caught.value.param == "chat_template_kwargs.enable_thinkin"
    assert "reads no such variable" in caught.value.message


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("{%- if enable_thinking is defined and enable_thinking is false %}", "enable_thinking"),
        ("{%- if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}x{% endif %}", "thinking"),
        ("{%- set effort = reasoning_effort | default('medium') %}", "reasoning_effort"),
        ("{% if message.thinking is defined %}{{ message['thinking'] }}{% endif %}", ""),
        ("{% set thinking = message.thought %}{{ thinking }}", ""),
        ("{% if add_generation_prompt is not defined %}You are thinking{% endif %}", ""),
    ],
)
def test_switches_of_templates(code: str, found: str) -> None:
    assert switches(code) == ({found} if found else set())


def test_a_switch_that_changes_starts_a_new_branch(thinker: Running) -> None:
    """Its template may write the past differently, so no token is taken over."""
    thinker.sampler.script = lambda *_: "One."
    messages: list[Any] = [*USER, {"role": "assistant", "content": "One."}, *USER]
    with client(thinker) as api:
        for asked, thinks in ((USER, True), (messages, False)):
            api.chat.completions.create(
                model="policy", messages=asked, extra_body={"enable_thinking": thinks}
            )
    assert thinker.calls(thinker.claims[0])[-1].params["branched"] == "template_switches_changed"


def test_thoughts_of_a_prompt_that_opens_none(thinker: Running) -> None:
    thinker.sampler.script = lambda *_: f"Look. {CALL}"
    with client(thinker) as api:
        said = api.chat.completions.create(
            model="policy", messages=USER, tools=TOOLS, reasoning_effort="none"
        )
    message = said.choices[0].message
    assert message.content == "Look."
    assert message.tool_calls is not None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"guided_json": SCHEMA}, "json_schema"),
        ({"guided_json": '{"type": "object"}'}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
    ],
)
def test_guided_json(shared_gateway: Running, more: dict[str, Any], kind: str) -> None:
    [claim] = shared_gateway.new_claims()
    with client(shared_gateway, claim) as api:
        api.chat.completions.create(model="policy", messages=USER, extra_body=more)
    assert shared_gateway.calls(claim)[-1].params["constrained"] == kind
    assert shared_gateway.sampler.requests[-1].params.grammar is not None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": 7}}, "guided_json"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ],
)
def test_guided_json_that_is_wrong(
    shared_gateway: Running, more: dict[str, Any], param: str
) -> None:
    with client(shared_gateway) as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="policy", messages=USER, extra_body=more)
    assert caught.value.param == param


@pytest.mark.parametrize("api_name", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(shared_gateway: Running, api_name: str, mode: str) -> None:
    other = {**FUNCTION, "name": "other"}
    [claim] = shared_gateway.new_claims()
    choice: Any
    with client(shared_gateway, claim) as api:
        if api_name == "chat":
            tools: Any = [{"type": "function", "function": one} for one in (FUNCTION, other)]
            named = [{"type": "function", "function": {"name": "other"}}]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
            asked: Any = {"model": "policy", "messages": USER, "tools": tools}
            api.chat.completions.create(**asked, tool_choice=choice)
        else:
            tools = [{"type": "function", **one} for one in (FUNCTION, other)]
            named = [{"type": "function", "name": "other"}]
            choice = {"type": "allowed_tools", "mode": mode, "tools": named}
            asked = {"model": "policy", "input": "hi", "tools": tools}
            answer = api.responses.create(**asked, tool_choice=choice)
            assert answer.to_dict()["tool_choice"] == choice
        resource: Any = api.chat.completions if api_name == "chat" else api.responses
        asked["tools"] = tools[:1]
        with pytest.raises(openai.BadRequestError) as caught:
            resource.create(**asked, tool_choice=choice)
    assert "not among the tools" in caught.value.message
    [call] = shared_gateway.calls(claim)
    prompt = shared_gateway.renderer.decode_raw(call.prompt_ids)
    assert '"other"' in prompt
    assert '"search"' not in prompt
    assert (call.params.get("constrained") == "tool_choice") == (mode == "required")


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


def post_more(gateway: Running, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
    claim = gateway.claims[0]
    body = {"model": "policy"} | BODIES[path] | more
    answer = post(f"{gateway.base_url(claim)}/{path}", claim.key, body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_by_our_model(shared_gateway: Running, path: str) -> None:
    for name, value, _ in EVERYWHERE:
        status, answer = post_more(shared_gateway, path, **{name: value})
        assert status == 400, name
        assert f"{name} is not supported; " in answer["error"]["message"]
    neutral = {name: neutral for name, _, neutral in EVERYWHERE}
    status, answer = post_more(
        shared_gateway, path, **neutral, prediction={"type": "content"}, user="u"
    )
    assert status == 200, answer


@pytest.mark.parametrize(("path", "name", "value"), OF_A_PROTOCOL)
def test_of_another_protocol(shared_gateway: Running, path: str, name: str, value: Any) -> None:
    status, answer = post_more(shared_gateway, path, **{name: value})
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
        status, answer = post_more(gateway, "chat/completions", model="o", **{name: value})
        assert status == 400
        assert f"{name} is not supported; " in answer["error"]["message"]
    assert provider.seen == []
    assert post_more(gateway, "chat/completions", model="o", frequency_penalty=0.5)[0] == 200
    assert len(provider.seen) == 1
