"""A long conversation trains as one row of exactly what was sampled; an edited one as two."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from call_records import check_invariants
from conversations import ODD_CALL, echo, one_by_one
from official_clients import TOOLS, client, streamed
from scripted_sampler import Running

from agentrl_tracer.schemas import Call

TURNS = 12


class Said:
    """A streamed answer as ``echo`` wants a message."""

    def __init__(self, stream: Any) -> None:
        text, calls, _, _ = streamed(stream)
        self.content, self.tool_calls = text, calls


def talk(
    api: openai.OpenAI, *, edit_after: int | None = None, before: Any = None, **asked: Any
) -> None:
    """Twelve streamed turns with tools. With ``edit_after`` the third message is edited then."""
    messages: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Say you are 7."},
    ]
    for turn in range(TURNS):
        if before is not None:
            before(turn)
        with api.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, stream=True, **asked
        ) as stream:
            reply = echo(Said(stream))
        messages.append(reply)
        if reply.get("tool_calls") or turn % 3 == 1:
            messages.append({"role": "tool", "tool_call_id": "theirs-0", "content": f"{turn} N"})
        else:
            messages.append({"role": "user", "content": f"Say you are {turn}."})
        if turn == edit_after:
            messages[2] = {"role": "assistant", "content": "I never said that."}


def check_rows(calls: list[Call], edited: bool) -> None:
    from agentrl_trainer.data.packing import pack
    from agentrl_trainer.data.skip_reasons import SkipRules
    from agentrl_trainer.data.trajectories import build_trajectories

    assert len(calls) == TURNS
    built = build_trajectories(calls, SkipRules(max_length=100_000))
    assert not built.skipped
    assert len(built.trajectories) == (2 if edited else 1)
    # Nothing lost, nothing twice: every call trains once, with the tokens and log-probs it sampled.
    rows = check_invariants(calls, built)
    sampled = sum(len(call.response_ids) for call in calls)
    assert sum(row.trained for row in rows) == sampled
    batches = pack(rows, token_budget=100_000)
    trained = [token for batch in batches for token in batch.targets.tolist()]
    assert len(trained) == sampled
    assert sorted(trained) == sorted(token for call in calls for token in call.response_ids)
    branches = [call.params["branched"] for call in calls if "branched" in call.params]
    assert branches == ["first_call", *(["history_edited"] if edited else [])]


@pytest.mark.parametrize("edited", [False, True])
def test_with_tool_calls(gateway: Running, edited: bool) -> None:
    """Replies in ids that no tokenizer would choose, every other one a tool call."""
    renderer = gateway.renderer

    def say(turn: int) -> None:
        text = ODD_CALL if turn % 2 == 0 else f"Turn {turn}: grüße 日本 👍. "
        gateway.sampler.script = lambda *_: one_by_one(renderer, text)

    gateway.deps.context_length = 50_000
    with client(gateway) as api:
        talk(api, edit_after=5 if edited else None, before=say)
    calls = gateway.calls(gateway.claims[0])
    for call, seen in zip(calls, gateway.sampler.requests, strict=True):
        assert call.prompt_ids == seen.prompt_ids
        assert call.response_ids == seen.sampled[0]
    assert sum(call.finish_reason == "stop" for call in calls) == TURNS
    made = [c.response["choices"][0]["finish_reason"] for c in calls if c.response]
    assert made.count("tool_calls") == TURNS // 2
    check_rows(calls, edited)
