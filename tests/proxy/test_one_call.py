"""parallel_tool_calls false with tool_choice auto: an answer ends where a second call begins."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversations import extends
from official_clients import CALL, TOOLS, USER, client, streamed
from scripted_sampler import Running

from agentrl_tracer.schemas import CallState

SAID = f"Let me look.\n{CALL}\n{CALL}\n{CALL}"
ASKED: dict[str, Any] = {"model": "policy", "tools": TOOLS, "parallel_tool_calls": False}


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_has_one_call_and_the_record_every_token(gateway: Running, stream: bool) -> None:
    gateway.sampler.script = lambda *_: SAID
    with client(gateway) as api:
        made: Any = api.chat.completions.create(messages=USER, stream=stream, **ASKED)
        if stream:
            text, calls, finish, _ = streamed(made)
        else:
            choice = made.choices[0]
            text, calls, finish = (
                choice.message.content, choice.message.tool_calls, choice.finish_reason,
            )  # fmt: skip
    assert (text, finish) == ("Let me look.", "tool_calls")
    [one] = calls
    assert json.loads(one.function.arguments) == {"q": "köln", "k": 3}
    [seen] = gateway.sampler.requests
    assert seen.cancelled or len(seen.sampled[0]) < len(gateway.renderer.encode(SAID))
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.COMPLETED
    # All that was sampled, and not one token after those that began the second call.
    assert call.response_ids == seen.sampled[0]
    assert gateway.renderer.decode_raw(call.response_ids) == f"Let me look.\n{CALL}\n<tool_call>\n"
    assert len(call.response_logprobs) == len(call.response_ids)
    assert call.params["cut_at_second_call"] is True
    assert "not_enforced" not in call.params
    assert "constrained" not in call.params
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_one_call_ends_by_itself_and_is_continued_exactly(gateway: Running) -> None:
    said = iter([CALL, "It is there."])
    gateway.sampler.script = lambda *_: next(said)
    with client(gateway) as api:
        answer = api.chat.completions.create(messages=USER, **ASKED)
        message = answer.choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "50.9 N"}
        api.chat.completions.create(
            messages=[*USER, message.model_dump(exclude_none=True), result], **ASKED
        )
    first, second = gateway.calls(gateway.claims[0])
    assert "cut_at_second_call" not in first.params
    assert gateway.renderer.is_stop(first.response_ids[-1])
    assert extends(second, first)


def test_a_cut_answer_is_gone_on_from_what_was_kept(gateway: Running) -> None:
    said = iter([SAID, "It is there."])
    gateway.sampler.script = lambda *_: next(said)
    with client(gateway) as api:
        answer = api.chat.completions.create(messages=USER, **ASKED)
        message = answer.choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "50.9 N"}
        api.chat.completions.create(
            messages=[*USER, message.model_dump(exclude_none=True), result], **ASKED
        )
    first, second = gateway.calls(gateway.claims[0])
    prompt = gateway.renderer.decode_raw(second.prompt_ids)
    assert prompt.count("köln") == 1
    assert "50.9 N" in prompt
    # All that was sampled but what began the second call: exactly these tokens.
    assert second.params["continued"] is True
    begun = len(gateway.renderer.encode("\n<tool_call>\n"))
    known = first.prompt_ids + first.response_ids[:-begun]
    assert second.prompt_ids[: len(known)] == known


def test_each_choice_ends_on_its_own(gateway: Running) -> None:
    gateway.sampler.script = lambda ids, params, choice: [SAID, "No call, a longer text here."][
        choice
    ]
    with client(gateway) as api:
        answer = api.chat.completions.create(messages=USER, n=2, **ASKED)
    cut, whole = answer.choices
    assert len(cut.message.tool_calls or []) == 1
    assert (whole.message.content, whole.finish_reason) == ("No call, a longer text here.", "stop")
    calls = sorted(gateway.calls(gateway.claims[0]), key=lambda call: call.choice)
    assert ["cut_at_second_call" in call.params for call in calls] == [True, False]
    assert gateway.renderer.is_stop(calls[1].response_ids[-1])


def test_parallel_calls_stay_allowed(gateway: Running) -> None:
    gateway.sampler.script = lambda *_: SAID
    with client(gateway) as api:
        answer = api.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
    assert len(answer.choices[0].message.tool_calls or []) == 3
