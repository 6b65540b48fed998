"""The gateway over each real sampler and the tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai
from official_clients import client
from running_gateway import running

from agentrl_proxy.rendering.renderer import Renderer


def test_chat_over_a_sampler(tmp_path: Path, tiny_sampler: Any, renderer: Renderer) -> None:
    with running(
        tmp_path, renderer, {}, sampler=tiny_sampler, models={}, default_adapter=None,
        context_length=tiny_sampler.context_length, defaults={"max_tokens": 24},
    ) as gateway:  # fmt: skip
        with client(gateway) as api:
            _converse(api)
        calls = gateway.calls(gateway.claims[0])
        assert gateway.store.accounting(gateway.run_id).adds_up
    assert calls[0].response_ids == calls[1].response_ids  # one seed, streamed or not
    for call in calls:
        assert call.response_ids
        assert len(call.response_ids) == len(call.response_logprobs)
        assert all(math.isfinite(p) and p <= 0 for p in call.response_logprobs)
    known = calls[0].prompt_ids + calls[0].response_ids
    assert calls[2].prompt_ids[: len(known)] == known
    assert [call.state for call in calls] == ["completed"] * 4


def _converse(api: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Who are you?"}]
    answer = api.chat.completions.create(model="m", messages=asked, seed=7)
    chunks = api.chat.completions.create(model="m", messages=asked, seed=7, stream=True)
    said = answer.choices[0].message.content
    assert said
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == said
    more = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    api.chat.completions.create(model="m", messages=more, seed=7)
    stop = said[len(said) // 2]
    cut = api.chat.completions.create(model="m", messages=asked, seed=7, stop=stop)
    assert cut.choices[0].message.content == said[: said.index(stop)]
