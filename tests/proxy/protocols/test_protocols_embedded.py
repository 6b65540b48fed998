"""One conversation in four protocols over each real sampler and the tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anthropic
import openai
from official_clients import claude, client
from running_gateway import running

from agentrl_proxy.rendering.renderer import Renderer


def test_every_protocol_over_a_sampler(
    tmp_path: Path, tiny_sampler: Any, renderer: Renderer
) -> None:
    with running(
        tmp_path, renderer, {}, sampler=tiny_sampler, models={}, default_adapter=None,
        context_length=tiny_sampler.context_length, defaults={"max_tokens": 24},
    ) as gateway:  # fmt: skip
        with client(gateway) as api, claude(gateway) as other:
            texts = _converse(api, other, renderer)
        calls = gateway.calls(gateway.claims[0])
        assert gateway.store.accounting(gateway.run_id).adds_up
    for call, text in zip(calls, texts, strict=True):
        assert renderer.decode(call.response_ids) == text
        assert len(call.response_ids) == len(call.response_logprobs)
        assert all(math.isfinite(p) and p <= 0 for p in call.response_logprobs)
    # Chat, Messages, Responses and bare tokens, from one seed: the same prompt, the same reply.
    assert len({tuple(call.prompt_ids) for call in calls[:4]}) == 1
    assert len({tuple(call.response_ids) for call in calls[:4]}) == 1
    known = calls[0].prompt_ids + calls[0].response_ids
    for call in calls[4:]:
        assert call.prompt_ids[: len(known)] == known


def _converse(api: openai.OpenAI, other: anthropic.Anthropic, renderer: Renderer) -> list[str]:
    asked: list[Any] = [{"role": "user", "content": "Who are you?"}]
    more: Any = {"extra_body": {"seed": 7}}
    chat = api.chat.completions.create(model="m", messages=asked, seed=7)
    message = other.messages.create(model="m", max_tokens=24, messages=asked, **more)
    response = api.responses.create(model="m", input=asked, **more)
    ids = renderer.render(asked)
    bare = api.completions.create(model="m", prompt=ids, seed=7, max_tokens=24)
    said = chat.choices[0].message.content
    assert said
    assert message.content[0].type == "text"
    texts = [said, message.content[0].text, response.output_text, bare.choices[0].text]
    longer = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    with other.messages.stream(model="m", max_tokens=24, messages=longer) as stream:
        texts.append("".join(stream.text_stream))
    with api.responses.stream(model="m", input=longer) as events:
        texts.append(events.until_done().get_final_response().output_text)
    return texts
