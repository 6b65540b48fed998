"""Legacy completions through the real server with the real client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from scripted_sampler import Running, ScriptedSampler

from agentrl_proxy.requests.recording import derived_seed
from agentrl_proxy.sampler import TokenEvent
from agentrl_tracer.schemas import CallState, Claim, SkipReason


def client(gateway: Running, claim: Claim | None = None, **more: Any) -> openai.OpenAI:
    claim = claim or gateway.claims[0]
    return openai.OpenAI(
        base_url=gateway.base_url(claim), api_key=claim.key, max_retries=0, timeout=30, **more
    )


def test_a_text_goes_straight_to_the_sampler(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt="Once upon a time", max_tokens=64)
    [seen] = gateway.sampler.requests
    [call] = gateway.calls(gateway.claims[0])
    assert seen.prompt_ids == gateway.renderer.encode("Once upon a time")
    assert call.prompt_ids == seen.prompt_ids
    assert call.response_ids == seen.sampled[0]
    assert call.response_logprobs == [-0.25 - i / 64 for i in range(len(call.response_ids))]
    assert call.id == call.response_id == answer.id
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == gateway.renderer.decode(seen.sampled[0])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(call.prompt_ids)
    assert answer.usage.completion_tokens == len(call.response_ids)
    assert call.request == {"model": "policy", "prompt": "Once upon a time", "max_tokens": 64}
    assert call.response is not None
    assert call.response["choices"][0]["text"] == answer.choices[0].text
    assert call.params["continued"] is False
    assert gateway.store.accounting(gateway.run_id).adds_up


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
    with client(gateway) as api:
        whole = api.completions.create(**asked, max_tokens=60)
        chunks = list(
            api.completions.create(
                **asked, max_tokens=60, stream=True, stream_options={"include_usage": True}
            )
        )
    assert {chunk.id for chunk in chunks} != {whole.id}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert len(chunks) > 8  # it comes as it is sampled
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [
            choice.finish_reason
        ]
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
        assert call.response["choices"][0]["text"] == choice.text
    assert len(gateway.sampler.requests) == (2 if limit else 0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * len(said[:limit])
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_an_echo_alone_needs_no_scores(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.completions.create(model="policy", prompt="One", echo=True, max_tokens=0)
        chunks = list(
            api.completions.create(
                model="policy", prompt="One", echo=True, max_tokens=0, stream=True
            )
        )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("One", "length")
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "One"
    assert gateway.sampler.requests == []
    for call in gateway.calls(gateway.claims[0]):
        assert (call.state, call.response_ids) == (CallState.COMPLETED, [])


def test_scores_are_not_streamed(gateway: Running) -> None:
    gateway.sampler.__class__ = Scoring
    with client(gateway) as api, pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="policy", prompt="One", echo=True, logprobs=1, stream=True)
    assert caught.value.param == "stream"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"logprobs": 99}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 2}, "prompt"),
        ({"prompt": ["x", "word " * 3000]}, "prompt"),
        ({"model": ""}, "model"),
        ({"stream": 1}, "stream"),
    ],
)
def test_bad_fields_are_named(gateway: Running, more: dict[str, Any], field: str) -> None:
    body = {"model": "policy", "prompt": "x"} | more
    with client(gateway) as api, pytest.raises(openai.BadRequestError) as caught:
        api.post("/completions", body=body, cast_to=httpx.Response)
    assert caught.value.param == field
    assert gateway.calls(gateway.claims[0]) == []


def test_a_client_that_leaves_cancels_every_prompt(gateway: Running) -> None:
    gateway.sampler.delay = 0.02
    with client(gateway) as api:
        stream = api.completions.create(
            model="policy", prompt=["One", "Two"], max_tokens=200, stream=True
        )
        next(stream)
        wait_for(lambda: all(seen.sampled for seen in gateway.sampler.requests))
        stream.close()
        wait_for(lambda: all(seen.cancelled for seen in gateway.sampler.requests))
    wait_for(lambda: all(call.ended_at for call in gateway.calls(gateway.claims[0])))
    for call in gateway.calls(gateway.claims[0]):
        assert call.state is CallState.CANCELLED
        assert call.skip_reason is SkipReason.CLIENT_DISCONNECTED
        assert call.response_ids


def test_one_failing_prompt_fails_the_request(gateway: Running) -> None:
    gateway.sampler.fail_after = 3
    with client(gateway) as api, pytest.raises(openai.InternalServerError) as caught:
        api.completions.create(model="policy", prompt=["One", "Two"])
    assert caught.value.status_code == 503
    states = {call.state for call in gateway.calls(gateway.claims[0])}
    assert CallState.COMPLETED not in states
    assert CallState.OPEN not in states


def test_a_marked_retry_is_replayed(gateway: Running) -> None:
    marked = {"x-stainless-retry-count": "1"}
    asked: dict[str, Any] = {"model": "policy", "prompt": ["One", "Two"]}
    with client(gateway) as api:
        first = api.completions.create(**asked)
        again = api.completions.create(**asked, extra_headers=marked)
        streamed = {"stream": True} | asked
        chunks = list(api.completions.create(**streamed, extra_headers=marked))
        same = list(api.completions.create(**streamed, extra_headers=marked))
    assert again == first
    assert len(gateway.sampler.requests) == 4  # two prompts, JSON and then streamed
    for i in range(2):
        texts = [
            "".join(c.text for chunk in made for c in chunk.choices if c.index == i)
            for made in (chunks, same)
        ]
        assert texts[0] == texts[1] != ""


def test_a_sealed_attempt_gets_409(gateway: Running) -> None:
    gateway.seal(gateway.claims[0])
    with client(gateway) as api, pytest.raises(openai.ConflictError):
        api.completions.create(model="policy", prompt="x")


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
