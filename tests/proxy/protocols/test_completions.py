"""Legacy completions through the real server with the real client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from official_clients import client
from scripted_sampler import Running, ScriptedSampler

from agentrl_proxy.requests.recording import derived_seed
from agentrl_proxy.sampler import TokenEvent
from agentrl_tracer.schemas import CallState


def test_max_tokens_is_16_unless_asked(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt="Once")
    assert gateway.sampler.requests[0].params.max_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert len(gateway.calls(gateway.claims[0])[0].response_ids) == 16


def test_token_ids_are_the_prompt(gateway: Running) -> None:
    ids = [*gateway.renderer.encode("<|im_start|>user\nhello"), 5, 7]
    with client(gateway) as api:
        api.completions.create(model="policy", prompt=ids)
        api.completions.create(model="policy", prompt=[ids, [9]])
        api.completions.create(model="base", prompt=[[9]])
    assert [seen.prompt_ids for seen in gateway.sampler.requests] == [ids, ids, [9], [9]]
    assert [seen.adapter for seen in gateway.sampler.requests] == ["policy"] * 3 + [None]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_with_each_choice(gateway: Running, stream: bool) -> None:
    with client(gateway) as api:
        answer: Any = api.completions.create(
            model="policy", prompt=["One", "Two"], n=2, max_tokens=4, stream=stream,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        chunks = list(answer) if stream else [answer]
    said = [one for chunk in chunks for one in chunk.choices if one.finish_reason]
    found = {one.index: (one.prompt_token_ids, one.token_ids) for one in said}
    calls = gateway.calls(gateway.claims[0])
    assert found == {call.choice: (call.prompt_ids, call.response_ids) for call in calls}


def test_several_prompts_are_several_calls(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt=["One", "Two"], n=2, max_tokens=40)
    calls = gateway.calls(gateway.claims[0])
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [(call.id, call.choice, call.seq) for call in calls] == [
        (answer.id, 0, 0),
        (f"{answer.id}#1", 1, 0),
        (f"{answer.id}#2", 2, 1),
        (f"{answer.id}#3", 3, 1),
    ]
    for call, choice in zip(calls, answer.choices, strict=True):
        assert choice.text == gateway.renderer.decode(call.response_ids)
        assert call.response_id == answer.id
        assert call.state is CallState.COMPLETED
        assert call.response is not None
        assert [one["index"] for one in call.response["choices"]] == [choice.index]
        assert call.params["seed"] == derived_seed(100, call.seq)
    assert calls[0].prompt_ids == gateway.renderer.encode("One")
    assert calls[2].prompt_ids == gateway.renderer.encode("Two")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(call.response_ids) for call in calls)
    assert answer.usage.prompt_tokens == len(calls[0].prompt_ids) + len(calls[2].prompt_ids)
    assert gateway.stats["accepted"] == 4
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("more", [{}, {"stop": [" I", "\n"]}, {"echo": True}, {"logprobs": 2}])
@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "grüße 日本"]])
def test_stream_says_what_the_whole_answer_says(gateway: Running, prompt: Any, more: Any) -> None:
    asked: dict[str, Any] = {"model": "policy", "prompt": prompt, "seed": 5, "n": 2} | more
    asked |= {"max_tokens": 60}
    streaming: Any = {"stream": True, "stream_options": {"include_usage": True}}
    with client(gateway) as api:
        whole = api.completions.create(**asked)
        chunks = list(api.completions.create(**asked, **streaming))
    assert {chunk.id for chunk in chunks} != {whole.id}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert len(chunks) > 8  # it comes as it is sampled
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        ends = [part.finish_reason for part in parts if part.finish_reason]
        assert ends == [choice.finish_reason]
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                streamed = [
                    one for part in parts if part.logprobs for one in getattr(part.logprobs, name)
                ]
                assert streamed == getattr(choice.logprobs, name)
    ids = [call.response_ids for call in gateway.calls(gateway.claims[0])]
    assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]


def test_logprobs_object(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: "Hi grüße 日本語 👍."
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt="x", logprobs=2, max_tokens=99)
    [choice] = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset : offset + len(token)] == token
    [call] = gateway.calls(gateway.claims[0])
    assert choice.logprobs.token_logprobs == call.response_logprobs[:-1]  # not the stop token's
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0][tokens[0]] == -0.25
    assert len(choice.logprobs.top_logprobs[0]) == 2


def test_echo(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt=["One", "Two"], n=2, echo=True)
    texts = [choice.text for choice in answer.choices]
    assert [text[:3] for text in texts] == ["One", "One", "Two", "Two"]
    for text, call in zip(texts, gateway.calls(gateway.claims[0]), strict=True):
        assert text[3:] == gateway.renderer.decode(call.response_ids)


def test_a_reply_that_looks_like_a_tool_call_is_text(gateway: Running) -> None:
    said = 'a<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>'
    gateway.sampler.script = lambda *_: said
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt="x", max_tokens=200)
    assert answer.choices[0].text == said
    assert answer.choices[0].finish_reason == "stop"


class Scoring(ScriptedSampler):
    """One that knows how likely any token is: the less, the further it is in the prompt."""

    async def score(
        self, prompt_ids: Sequence[int], adapter: str | None, top: int
    ) -> list[TokenEvent]:
        return [
            TokenEvent(0, token, -i / 8, [(token, -i / 8), (0, -9.0)][:top], 3)
            for i, token in enumerate(prompt_ids)
        ][1:]


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("stops", [False, True])
def test_the_prompt_is_scored(gateway: Running, limit: int, stops: bool) -> None:
    """As evaluation harnesses ask: the prompt's tokens are found by counting."""
    gateway.sampler.__class__ = Scoring
    renderer = gateway.renderer
    eos = renderer.tokenizer.eos_token_id
    said = [eos] if stops else renderer.encode("1 2 3 4 5 6 7 8")
    gateway.sampler.script = lambda *_: said
    prompts = [[*renderer.encode("grüße 日本"), eos, 7, 300], [9]]
    asked: Any = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 1, "max_tokens": limit}
    with client(gateway) as api:
        answer = api.completions.create(model="policy", **asked)
    calls = gateway.calls(gateway.claims[0])
    assert len(calls) == 4
    for choice, call in zip(answer.choices, calls, strict=True):
        prompt = prompts[choice.index // 2]
        sampled = said[:limit]
        assert (call.prompt_ids, call.response_ids) == (prompt, sampled)
        assert call.response_logprobs == [-0.25 - i / 64 for i in range(len(sampled))]
        assert choice.text == renderer.decode_raw(prompt) + renderer.decode(sampled)
        assert choice.finish_reason == ("stop" if stops and limit else "length")
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs == [
            None, *(-i / 8 for i in range(1, len(prompt))), *call.response_logprobs
        ]  # fmt: skip
        assert told.tokens is not None
        assert "".join(told.tokens[-2 - len(sampled) :]).endswith(renderer.decode_raw(sampled))
        assert told.top_logprobs is not None
        assert told.top_logprobs[0] is None
        assert [max(top.values()) for top in told.top_logprobs[1:]] == told.token_logprobs[1:]
        assert told.text_offset is not None
        assert told.text_offset[0] == 0
        assert call.response is not None
        assert call.response["choices"][0]["prompt_logprobs"][0]["logprob"] is None
    assert len(gateway.sampler.requests) == (2 if limit else 0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * len(said[:limit])
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_an_echo_alone_needs_no_scores(gateway: Running) -> None:
    asked: Any = {"model": "policy", "prompt": "One", "echo": True, "max_tokens": 0}
    with client(gateway) as api:
        answer = api.completions.create(**asked)
        chunks = list(api.completions.create(**asked, stream=True))
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("One", "length")
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "One"
    assert gateway.sampler.requests == []
    for call in gateway.calls(gateway.claims[0]):
        assert (call.state, call.response_ids) == (CallState.COMPLETED, [])
