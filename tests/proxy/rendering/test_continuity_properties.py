"""Whatever agents do to a conversation: what was sampled is stored, and goes on or branches right.

The model below knows nothing of the gateway: it keeps every conversation an attempt has had, by
value, and says which of them a new request must go on from.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gateway_client import HTTP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_clients import TOOLS
from scripted_sampler import Running

from agentrl_proxy.rendering.continuity import Branch
from agentrl_tracer.schemas import Call, CallState

OTHER_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": {}}}]
SAID = [
    "I'm Qwen.",
    "",
    "  spaces  \n",
    "grüße 日本語 👍🏽 STOP not reached",
    '<tool_call>\n{"arguments":  {"q":"köln",   "n": 1.50}, "name":"search"}\n</tool_call>',
    'Look.\n<tool_call>\n{"name": "search", "arguments": {"b": {"y": 1, "x": [2]}, "a": null}}\n'
    '</tool_call>\n<tool_call>{"name":"other"}</tool_call>\n',
    '<tool_call>\n{"name": "search", "arguments": {"q": "never ends',
    '<tool_call>{"name": "search", "arguments": {"q": 1}}</tool_call> <tool_call>{"name": "x", '
    '"arguments": {"q": ,}}</tool_call>',
    "<think>\nlet me see\n</think>\n\nDone.",
    "<think>never closed",
]


@dataclass(frozen=True)
class Turn:
    """What the model says, how it is asked, and what the agent then does."""

    said: str
    odd_tokens: bool
    stream: bool
    stop: str | None
    max_tokens: int | None
    then: str
    where: int


turns = st.builds(
    Turn,
    said=st.sampled_from(SAID) | st.text(st.characters(codec="utf-8"), max_size=12),
    odd_tokens=st.booleans(),
    stream=st.booleans(),
    stop=st.sampled_from([None, None, "STOP", "o"]),
    max_tokens=st.sampled_from([None, None, 1, 5]),
    then=st.sampled_from(
        ["on", "on", "on", "on", "again", "edit", "drop", "system", "tools", "back", "lose_calls"]
    ),
    where=st.integers(0, 10),
)


@dataclass
class Conversation:
    """An agent's list of messages, as frameworks keep it."""

    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "user", "content": "Where is Köln?"}]
    )
    tools: list[dict[str, Any]] = field(default_factory=lambda: TOOLS)

    def after(self, turn: Turn, reply: dict[str, Any], count: int) -> None:
        reply = dict(reply)
        if turn.then == "again":  # the same request once more
            return
        if turn.then == "lose_calls":
            reply.pop("tool_calls", None)
            reply["content"] = reply["content"] or ""
        reply = reordered(reply, count)
        self.messages.append(reply)
        for call in reply.get("tool_calls") or []:
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {count}"}
            )
        if not reply.get("tool_calls"):
            self.messages.append({"role": "user", "content": f"And {count}?"})
        at = turn.where % len(self.messages)
        if turn.then == "edit":
            self.messages[at] = {**self.messages[at], "content": f"edited {count}"}
        elif turn.then == "drop" and len(self.messages) > 2:
            del self.messages[at]
        elif turn.then == "system":
            self.messages.insert(0, {"role": "system", "content": f"Rules {count}."})
        elif turn.then == "tools":
            self.tools = OTHER_TOOLS if self.tools == TOOLS else TOOLS
        elif turn.then == "back":
            del self.messages[at + 1 :]


def reordered(message: dict[str, Any], count: int) -> dict[str, Any]:
    """The message as a framework sends it back: other ids, keys in another order, other spaces."""
    calls = list[dict[str, Any]]()
    for i, call in enumerate(message.get("tool_calls") or []):
        arguments = call["function"]["arguments"]
        try:
            value = json.loads(arguments)
            arguments = json.dumps(dict(reversed(value.items())), indent=2)
        except ValueError:
            pass
        function = {"arguments": arguments, "name": call["function"]["name"]}
        calls.append({"function": function, "id": f"mine-{count}-{i}", "type": "function"})
    return {**message, "tool_calls": calls} if calls else message


def value(message: dict[str, Any]) -> Any:
    """Return a message by value: tool-call JSON parsed, ids left out."""
    calls = list[Any]()
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
        calls.append([call["function"]["name"], arguments])
    thought = message.get("reasoning_content") or ""
    return [message["role"], message.get("content") or "", calls, thought]


def key(messages: list[dict[str, Any]], tools: Any) -> str:
    return json.dumps([[value(message) for message in messages], tools], sort_keys=True)


def ask(gateway: Running, claim: Any, talk: Conversation, turn: Turn) -> dict[str, Any]:
    """The message the agent gets, added up from the chunks where it streams."""
    body = {
        "model": "policy", "messages": talk.messages, "tools": talk.tools,
        "stop": turn.stop, "max_tokens": turn.max_tokens, "stream": turn.stream,
    }  # fmt: skip
    url = gateway.base_url(claim) + "/chat/completions"
    answer = HTTP.post(url, json=body, headers={"x-api-key": claim.key}, timeout=30)
    assert answer.status_code == 200, (answer.text, body)
    return added_up(answer.text) if turn.stream else answer.json()["choices"][0]["message"]


def added_up(text: str) -> dict[str, Any]:
    lines = [line for line in text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for line in lines[:-1]:
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({k: v for k, v in piece.items() if k != "index"})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


@dataclass
class Past:
    """Of an attempt, by value."""

    known: dict[str, Call] = field(default_factory=dict[str, Call])
    """Conversations with their replies, and the tools they were said with."""
    said: set[str] = field(default_factory=set[str])  # the same, whatever the tools

    def put(self, messages: list[dict[str, Any]], tools: Any, call: Call) -> None:
        self.known[key(messages, tools)] = call
        self.said.add(key(messages, None))

    def branch(self, talk: Conversation, ends: list[int]) -> Branch:
        """Why a request does not go on from the last reply in it."""
        if not self.known:
            return Branch.FIRST_CALL
        if not ends:
            return Branch.NEW_CONVERSATION
        if key(talk.messages[: ends[-1]], None) in self.said:
            return Branch.TOOLS_CHANGED
        return Branch.HISTORY_EDITED


def check(gateway: Running, call: Call, past: Past, talk: Conversation) -> Branch | None:
    """Returns why the call branched."""
    known = past.known
    seen = gateway.sampler.requests[-1]
    assert call.state is CallState.COMPLETED
    assert call.prompt_ids == seen.prompt_ids
    assert call.response_ids == seen.sampled.get(0, [])
    assert len(call.response_logprobs) == len(call.response_ids)
    ends = [i for i, m in enumerate(talk.messages, 1) if m["role"] == "assistant"]
    matches = [i for i in ends if key(talk.messages[:i], talk.tools) in known]
    assert call.params["continued"] == bool(matches)
    fully = bool(matches) and matches[-1] == ends[-1]
    branch = None if fully else past.branch(talk, ends)
    if not matches:
        assert call.prompt_ids == gateway.renderer.render(talk.messages, talk.tools)
        assert call.params.get("branched") == branch
        return branch
    earlier = known[key(talk.messages[: matches[-1]], talk.tools)]
    stopped = earlier.params["stop"] and earlier.finish_reason == "stop"
    tokens = earlier.prompt_ids + ([] if stopped else earlier.response_ids)
    assert call.prompt_ids[: len(tokens)] == tokens
    whole = earlier.prompt_ids + earlier.response_ids
    if fully and call.prompt_ids[: len(whole)] != whole:
        branch = Branch.REPLY_CUT
    assert call.params.get("branched") == branch
    return branch


def test_conversations(shared_gateway: Running) -> None:
    found: Counter[Branch | None] = Counter()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(plan=st.lists(turns, min_size=2, max_size=7))
    def test(plan: list[Turn]) -> None:
        found.update(converse(shared_gateway, plan))

    test()
    assert {None, Branch.FIRST_CALL} < {*found}


def converse(gateway: Running, plan: list[Turn]) -> list[Branch | None]:
    """Why each call branched."""
    renderer = gateway.renderer
    [claim] = gateway.new_claims()
    talk = Conversation()
    past = Past()
    branches: list[Branch | None] = []
    before = gateway.stats
    count = 0
    for count, turn in enumerate(plan, 1):
        ids = renderer.encode(turn.said)
        if turn.odd_tokens:
            ids = [i for char in turn.said for i in renderer.encode(char)]
        said = [*ids, renderer.tokenizer.eos_token_id]
        gateway.sampler.script = lambda *_, said=said: said
        reply = ask(gateway, claim, talk, turn)
        calls = gateway.calls(claim)
        assert len(calls) == count
        branches.append(check(gateway, calls[-1], past, talk))
        assert calls[-1].response is not None
        assert value(calls[-1].response["choices"][0]["message"]) == value(reply)
        past.put([*talk.messages, reply], talk.tools, calls[-1])
        whole = [c for c in reply.get("tool_calls", []) if _is_json(c["function"]["arguments"])]
        if len(whole) < len(reply.get("tool_calls", [])):  # calls that broke off may be left out
            past.put([*talk.messages, {**reply, "tool_calls": whole}], talk.tools, calls[-1])
        talk.after(turn, reply, count)
    after = gateway.stats
    assert after["accepted"] - before["accepted"] == count
    stored = [call.params for call in gateway.calls(claim)]
    assert after["continued"] - before["continued"] == sum(p["continued"] for p in stored)
    branched = sum(after["branched"].values()) - sum(before["branched"].values())
    assert branched == sum("branched" in p for p in stored)
    return branches


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
