"""What GiGPO takes for the same state, in each of the protocols that agents speak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from call_records import make

from agentrl_tracer.schemas import Call
from agentrl_trainer.data.state_grouping import anchor_states


def turn(
    name: str, request: dict[str, Any] | None, prompt: list[int], answer: list[int], seq: int
) -> Call:
    return make(f"{name}{seq}", prompt, answer, seq, rollout_id=name, request=request)


QUESTION = {"role": "user", "content": "Where to?"}


def chat(call: str, found: str) -> list[dict[str, Any]]:
    question = [{"role": "system", "content": "Play."}, QUESTION]
    asked = {"id": call, "type": "function", "function": {"name": "go", "arguments": call}}
    answer = {"role": "assistant", "content": None, "tool_calls": [asked]}
    result = {"role": "tool", "tool_call_id": call, "content": found}
    return [{"messages": question}, {"messages": [*question, answer, result]}]


def messages(call: str, found: str) -> list[dict[str, Any]]:
    asked = {"type": "tool_use", "id": call, "name": "go", "input": {"where": call}}
    answer = {"role": "assistant", "content": [asked]}
    answered = {"type": "tool_result", "tool_use_id": call, "content": found}
    result = {"role": "user", "content": [answered]}
    return [
        {"system": "Play.", "messages": [QUESTION]},
        {"system": "Play.", "messages": [QUESTION, answer, result]},
    ]


def responses(call: str, found: str) -> list[dict[str, Any]]:
    """As openai-agents sends it: reasoning, text and calls are items of their own."""
    asked = {"type": "function_call", "id": f"fc_{call}", "call_id": call, "name": "go"}
    said = {"type": "message", "role": "assistant", "content": [{"text": call}]}
    answered = {"type": "function_call_output", "call_id": call, "output": found}
    return [
        {"input": "Where to?"},
        {"input": [QUESTION, {"type": "reasoning", "id": call}, said, asked, answered]},
    ]


def continued(call: str, found: str) -> list[dict[str, Any]]:
    """Responses whose conversation the server keeps: only what is new is sent."""
    answered = {"type": "function_call_output", "call_id": call, "output": found}
    return [
        {"input": [QUESTION]},
        {"input": [answered], "previous_response_id": call},
    ]


def completions(call: str, found: str) -> list[dict[str, Any]]:
    return [{"prompt": "Where to?"}, {"prompt": f"Where to? {call} {found}"}]


def states(wire: Any, name: str, found: str) -> list[Any]:
    """Of a rollout of two turns; what the model says in the first, no other rollout says."""
    mark = 100 + sum(map(ord, name))
    requests = wire(f"call_{name}", found)
    first = turn(name, requests[0], [1, 2], [mark], 0)
    last = turn(name, requests[1], [1, 2, mark, *map(ord, found)], [3], 1)
    return anchor_states([first, last])


WIRES = [chat, messages, responses, continued, completions]


@pytest.mark.parametrize("wire", WIRES)
def test_the_same_state_after_different_answers(wire: Any) -> None:
    one, two, other = (
        states(wire, name, found) for name, found in (("a", "door"), ("b", "door"), ("c", "wall"))
    )
    assert one == two
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[0] != one[1]


def test_one_state_in_two_forms_of_the_responses_api() -> None:
    """A string stands for one user message."""
    assert states(responses, "a", "door")[0] == states(continued, "b", "door")[0]


def test_a_prefilled_answer_is_part_of_the_state() -> None:
    def begun(*said: str) -> Any:
        talk = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Hm."}]
        new = [{"role": "user", "content": said[0]}]
        prefill = [{"role": "assistant", "content": said[1]}]
        return anchor_states([turn("a", {"messages": talk + new + prefill}, [1], [2], 0)])

    assert begun("door", "I") == begun("door", "I")
    assert begun("door", "I") != begun("wall", "I")
    assert begun("door", "I") != begun("door", "We")


def test_agents_do_not_share_states() -> None:
    call = turn("a", {"input": "Where to?"}, [1, 2], [3], 0)
    [one], [two] = anchor_states([call]), anchor_states([replace(call, agent="guide")])
    assert one != two


def test_a_bare_prompt_that_goes_on_from_nothing_is_the_whole_of_it() -> None:
    calls = [turn("a", None, [1, 2], [3], 0), turn("a", None, [1, 9, 3], [4], 1)]
    assert anchor_states(calls) == [(None, 1, 2), (None, 1, 9, 3)]
