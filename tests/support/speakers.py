"""One conversation with the policy, told in each protocol by its official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from official_clients import FUNCTION, SCHEMA, TOOLS, claude, client, streamed
from scripted_sampler import Running

from agentrl_tracer.schemas import Claim

CLAUDE_TOOL: Any = {"name": "search", "description": "looks things up", "input_schema": SCHEMA}


@dataclass
class Answer:
    """What a client has read."""

    id: str
    text: str
    thought: str
    calls: list[tuple[str, Any]]  # name and arguments
    reason: str
    usage: Any
    turn: list[Any]  # the answer and its tools' results, as the client sends them back


def chat(gateway: Running, claim: Claim, turns: list[Any], stream: bool) -> Answer:
    asked = [{"role": "system", "content": "s"}, *turns]
    with client(gateway, claim) as api:
        made: Any = api.chat.completions.create(
            model="policy", messages=asked, tools=TOOLS, stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        if stream:
            chunks = list(made)
            text, calls, reason, usage = streamed(chunks)
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            answer_id = chunks[0].id
        else:
            message = made.choices[0].message
            text, calls = message.content or "", message.tool_calls or []
            thought = getattr(message, "reasoning_content", None) or ""
            reason, usage, answer_id = made.choices[0].finish_reason, made.usage, made.id
    said: dict[str, Any] = {"role": "assistant", "content": text}
    said |= {"reasoning_content": thought} if thought else {}
    said |= {"tool_calls": [call.model_dump(exclude={"index"}) for call in calls]} if calls else {}
    results = [{"role": "tool", "tool_call_id": c.id, "content": "found"} for c in calls]
    turn = [said, *(results or [{"role": "user", "content": "Go on."}])]
    made_calls = [(c.function.name, json.loads(c.function.arguments)) for c in calls]
    return Answer(answer_id, text, thought, made_calls, reason or "", usage, turn)


def messages(gateway: Running, claim: Claim, turns: list[Any], stream: bool) -> Answer:
    asked: Any = {"model": "policy", "max_tokens": 200, "messages": turns, "tools": [CLAUDE_TOOL],
                  "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                  }  # fmt: skip
    with claude(gateway, claim) as api:
        if stream:
            with api.messages.stream(**asked) as events:
                made = events.get_final_message()
        else:
            made = api.messages.create(**asked)
    calls = [block for block in made.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c.id, "content": "found"} for c in calls]
    turn = [
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": results or "Go on."},
    ]
    text = "".join(block.text for block in made.content if block.type == "text")
    thought = "".join(block.thinking for block in made.content if block.type == "thinking")
    reason = {"end_turn": "stop", "tool_use": "tool_calls"}[str(made.stop_reason)]
    made_calls = [(c.name, c.input) for c in calls]
    return Answer(made.id, text, thought, made_calls, reason, made.usage, turn)


def responses(gateway: Running, claim: Claim, turns: list[Any], stream: bool) -> Answer:
    tools: Any = [{"type": "function", **FUNCTION}]
    asked: Any = {"model": "policy", "input": turns, "tools": tools, "instructions": "s"}
    with client(gateway, claim) as api:
        if stream:
            with api.responses.stream(**asked) as events:
                made: Any = events.until_done().get_final_response()
        else:
            made = api.responses.create(**asked)
    calls = [item for item in made.output if item.type == "function_call"]
    thoughts = [item.summary[0].text for item in made.output if item.type == "reasoning"]
    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "found"} for c in calls
    ]
    turn = [item.model_dump(exclude_none=True) for item in made.output]
    turn += results or [{"role": "user", "content": "Go on."}]
    made_calls = [(c.name, json.loads(c.arguments)) for c in calls]
    reason = "tool_calls" if calls else "stop"
    text = made.output_text
    return Answer(made.id, text, "".join(thoughts), made_calls, reason, made.usage, turn)


SPEAKERS: dict[str, Callable[[Running, Claim, list[Any], bool], Answer]] = {
    "chat/completions": chat,
    "messages": messages,
    "responses": responses,
}
