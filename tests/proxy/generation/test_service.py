"""What a request to our own model is sampled from, and how its choices become an answer."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from conversations import extends
from official_clients import CALL, TOOLS, USER, client, streamed
from scripted_sampler import Running

from agentrl_tracer.schemas import CallState

whole_or_streamed = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.parametrize("stop", [None, ["Qwen"], [" I", "\n"], ["there, I", "42."]])
@pytest.mark.parametrize("seed", range(8))
def test_stream_says_what_the_whole_answer_says(
    shared_gateway: Running, seed: int, stop: Any
) -> None:
    gateway, more = shared_gateway, {} if stop is None else {"stop": stop}
    [claim] = gateway.new_claims()
    with client(gateway, claim) as api:
        asked: Any = {"model": "policy", "messages": USER, "seed": seed} | more
        whole = api.chat.completions.create(**asked)
        stream = api.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        text, _, finish, usage = streamed(stream)
    assert text == whole.choices[0].message.content
    assert (finish, usage) == (whole.choices[0].finish_reason, whole.usage)
    first, second = gateway.calls(claim)
    assert first.response_ids == second.response_ids
    assert not any(s in text for s in stop or ())


@whole_or_streamed
def test_choices_are_calls_of_their_own(gateway: Running, stream: bool) -> None:
    with client(gateway) as api:
        made = api.chat.completions.create(
            model="policy", messages=USER, n=3, stream=stream, extra_body={"return_token_ids": True}
        )
        if stream:
            chunks = list(made)
            texts = ["", "", ""]
            for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            ends = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
            prompts = [end.prompt_token_ids for end in ends]
            ids = [end.choices[0].token_ids for end in ends]
        else:
            texts = [choice.message.content for choice in made.choices]
            prompts, ids = [made.prompt_token_ids], [choice.token_ids for choice in made.choices]
    calls = gateway.calls(gateway.claims[0])
    [seen] = gateway.sampler.requests
    assert [call.choice for call in calls] == [0, 1, 2]
    first = calls[0].response_id
    assert [call.id for call in calls] == [first, f"{first}#1", f"{first}#2"]
    assert [call.response_ids for call in calls] == ids == [seen.sampled[i] for i in range(3)]
    assert all(prompt == seen.prompt_ids for prompt in prompts)
    assert texts == [gateway.renderer.decode(call.response_ids) for call in calls]
    assert len(set(texts)) == 3
    assert {call.seq for call in calls} == {0}
    assert gateway.store.accounting(gateway.run_id).adds_up
    assert gateway.store.accounting(gateway.run_id).proxied == 3
    assert calls[1].response is not None
    assert calls[1].response["choices"][0]["message"]["content"] == texts[1]


@pytest.mark.parametrize("stop", [None, "Qwen"])
def test_logprobs(gateway: Running, stop: str | None) -> None:
    gateway.sampler.script = lambda *_: "Hi 👍, I'm Qwen."
    asked: Any = {"model": "policy", "messages": USER, "logprobs": True, "top_logprobs": 2}
    asked |= {} if stop is None else {"stop": stop}
    with client(gateway) as api:
        answer = api.chat.completions.create(**asked)
        chunks = list(api.chat.completions.create(**asked, stream=True))
    told = [chunk.choices[0].logprobs for chunk in chunks]
    entries = [entry for logprobs in told if logprobs for entry in logprobs.content]
    assert answer.choices[0].logprobs.content == entries
    [call, _] = gateway.calls(gateway.claims[0])
    visible = len(call.response_ids) - (stop is None)  # the stop token has no entry
    assert [entry.logprob for entry in entries] == pytest.approx(call.response_logprobs[:visible])
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode().startswith("Hi 👍")
    assert [top.logprob for top in entries[0].top_logprobs] == [entries[0].logprob, -9.0]


def test_length(gateway: Running) -> None:
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER, max_tokens=3)
        newer = api.chat.completions.create(model="policy", messages=USER, max_completion_tokens=4)
    assert answer.choices[0].finish_reason == newer.choices[0].finish_reason == "length"
    first, second = gateway.calls(gateway.claims[0])
    assert (len(first.response_ids), len(second.response_ids)) == (3, 4)
    assert first.finish_reason == "length"


def test_sampling_comes_from_force_then_request_then_attempt_then_gateway(start: Any) -> None:
    sampling = {"temperature": 0.5, "max_tokens": 9, "force": {"temperature": 0}}
    gateway: Running = start(sampling, defaults={"max_tokens": 99, "top_p": 0.9})
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, temperature=1.5)
        api.chat.completions.create(model="policy", messages=USER, max_tokens=5, top_p=0.5)
    first, second = [seen.params for seen in gateway.sampler.requests]
    assert (first.temperature, first.max_tokens, first.top_p) == (0.0, 9, 0.9)
    assert (second.temperature, second.max_tokens, second.top_p) == (0.0, 5, 0.5)


def test_max_tokens_is_cut_to_the_room_there_is(start: Any) -> None:
    gateway: Running = start(context_length=40)
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, max_tokens=1000)
        long: Any = [{"role": "user", "content": "long " * 100}]
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model="policy", messages=long)
    assert caught.value.code == "context_length_exceeded"
    [seen] = gateway.sampler.requests
    assert seen.params.max_tokens == 40 - len(gateway.renderer.render(USER))


def test_trace_context_and_agent(gateway: Running) -> None:
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{span}-01", "x-agentrl-agent": "player"}
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER, extra_headers=headers)
    [call] = gateway.calls(gateway.claims[0])
    assert (call.trace_id, call.span_id, call.agent) == (trace, span, "player")
    assert answer.system_fingerprint == "policy@3"


def test_what_auto_does_not_enforce_is_recorded(gateway: Running) -> None:
    function = {**TOOLS[0]["function"], "strict": True}
    strict: list[Any] = [{"type": "function", "function": function}]
    with client(gateway) as api:
        api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
        api.chat.completions.create(
            model="policy", messages=USER, tools=strict, parallel_tool_calls=False
        )
    plain, asked = gateway.calls(gateway.claims[0])
    assert "not_enforced" not in plain.params
    assert asked.params["not_enforced"] == ["strict"]


# --- parallel_tool_calls false with tool_choice auto: an answer ends where a second call begins

THREE = f"Let me look.\n{CALL}\n{CALL}\n{CALL}"
ONE_CALL: dict[str, Any] = {"model": "policy", "tools": TOOLS, "parallel_tool_calls": False}


@whole_or_streamed
def test_the_answer_has_one_call_and_the_record_every_token(gateway: Running, stream: bool) -> None:
    gateway.sampler.script = lambda *_: THREE
    with client(gateway) as api:
        made: Any = api.chat.completions.create(messages=USER, stream=stream, **ONE_CALL)
        if stream:
            text, calls, finish, _ = streamed(made)
        else:
            message, finish = made.choices[0].message, made.choices[0].finish_reason
            text, calls = message.content, message.tool_calls
    assert (text, finish) == ("Let me look.", "tool_calls")
    [one] = calls
    assert json.loads(one.function.arguments) == {"q": "köln", "k": 3}
    [seen] = gateway.sampler.requests
    assert seen.cancelled or len(seen.sampled[0]) < len(gateway.renderer.encode(THREE))
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.COMPLETED
    # All that was sampled, and not one token after those that began the second call.
    assert call.response_ids == seen.sampled[0]
    assert gateway.renderer.decode_raw(call.response_ids) == f"Let me look.\n{CALL}\n<tool_call>\n"
    assert len(call.response_logprobs) == len(call.response_ids)
    assert call.params["cut_at_second_call"] is True
    assert not {"not_enforced", "constrained"} & set(call.params)
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("first_says", [CALL, THREE])
def test_one_call_is_continued_exactly(gateway: Running, first_says: str) -> None:
    said = iter([first_says, "It is there."])
    gateway.sampler.script = lambda *_: next(said)
    with client(gateway) as api:
        message = api.chat.completions.create(messages=USER, **ONE_CALL).choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "50.9 N"}
        told = [*USER, message.model_dump(exclude_none=True), result]
        api.chat.completions.create(messages=told, **ONE_CALL)
    first, second = gateway.calls(gateway.claims[0])
    assert second.params["continued"] is True
    prompt = gateway.renderer.decode_raw(second.prompt_ids)
    assert (prompt.count("köln"), prompt.count("50.9 N")) == (1, 1)
    if first_says == CALL:
        assert "cut_at_second_call" not in first.params
        assert gateway.renderer.is_stop(first.response_ids[-1])
        assert extends(second, first)
    else:  # all that was sampled but what began the second call: exactly these tokens
        begun = len(gateway.renderer.encode("\n<tool_call>\n"))
        known = first.prompt_ids + first.response_ids[:-begun]
        assert second.prompt_ids[: len(known)] == known


def test_each_choice_ends_on_its_own(gateway: Running) -> None:
    replies = [THREE, "No call, a longer text here."]
    gateway.sampler.script = lambda ids, params, choice: replies[choice]
    with client(gateway) as api:
        answer = api.chat.completions.create(messages=USER, n=2, **ONE_CALL)
        parallel = api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
    cut, whole = answer.choices
    assert len(cut.message.tool_calls or []) == 1
    assert len(parallel.choices[0].message.tool_calls or []) == 3
    assert (whole.message.content, whole.finish_reason) == (replies[1], "stop")
    calls = sorted(gateway.calls(gateway.claims[0])[:2], key=lambda call: call.choice)
    assert ["cut_at_second_call" in call.params for call in calls] == [True, False]
    assert gateway.renderer.is_stop(calls[1].response_ids[-1])
