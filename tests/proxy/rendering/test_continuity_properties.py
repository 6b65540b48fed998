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

import pytest
from gateway_client import HTTP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_clients import TOOLS
from scripted_sampler import Running

from agentrl_proxy.protocols.messages import messages_request
from agentrl_proxy.protocols.responses import responses_request
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

    def after(
        self, turn: Turn, reply: dict[str, Any], count: int, *, alternating: bool = False
    ) -> None:
        self._after(turn, reply, count)
        if alternating:
            self.messages = alternate(self.messages)

    def _after(self, turn: Turn, reply: dict[str, Any], count: int) -> None:
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


def alternate(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the younger protocols want it: no result without its call before it, somebody else's words
    between two replies and after the last."""
    out: list[dict[str, Any]] = []
    called = set[str]()
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            continue
        if message["role"] == "assistant" and out and out[-1]["role"] == "assistant":
            out.append({"role": "user", "content": "Go on."})
        called |= {call["id"] for call in message.get("tool_calls") or []}
        out.append(message)
    if not out or out[-1]["role"] in ("assistant", "system"):
        out.append({"role": "user", "content": "Go on."})
    return out


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
    """What a message says, whoever spelled it."""
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


class Chat:
    """A conversation as it is."""

    path = "chat/completions"
    alternating = False

    def body(self, talk: Conversation, turn: Turn) -> dict[str, Any]:
        asked = {"messages": talk.messages, "tools": talk.tools}
        return asked | {"stop": turn.stop, "max_tokens": turn.max_tokens}

    def read(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer["choices"][0]["message"]

    def added_up(self, text: str) -> dict[str, Any]:
        return added_up(text)

    def prompt(self, gateway: Running, talk: Conversation, call: Call) -> list[int]:
        return gateway.renderer.render(talk.messages, talk.tools)


class Responses:
    """Its items, each a part of a message."""

    path = "responses"
    alternating = True

    def body(self, talk: Conversation, turn: Turn) -> dict[str, Any]:
        items = [item for message in talk.messages for item in self.items(message)]
        tools = [{"type": "function", **tool["function"]} for tool in talk.tools]
        asked = {"input": items, "tools": tools}
        return asked | {"stop": turn.stop, "max_output_tokens": turn.max_tokens}

    def items(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["role"] == "tool":
            kind = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            return [{**kind, "output": message["content"]}]
        if message["role"] != "assistant":
            return [message]
        items: list[dict[str, Any]] = []
        thought, calls = message.get("reasoning_content"), message.get("tool_calls") or []
        if thought:
            summary = [{"type": "summary_text", "text": thought}]
            items.append({"type": "reasoning", "summary": summary})
        if message["content"] or not (thought or calls):
            part = {"type": "output_text", "text": message["content"] or "", "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        return items + [
            {"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls
        ]

    def read(self, answer: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for item in answer["output"]:
            if item["type"] == "reasoning":
                message["reasoning_content"] = item["summary"][0]["text"]
            elif item["type"] == "message":
                message["content"] = item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return message

    def added_up(self, text: str) -> dict[str, Any]:
        said: dict[str, dict[str, str]] = {}
        for event in events(text):
            if event["type"].endswith(".delta"):
                kind = event["type"].removeprefix("response.").removesuffix(".delta")
                place = said.setdefault(kind, {})
                item = event["item_id"]
                place[item] = place.get(item, "") + event["delta"]
        whole = self.read(events(text)[-1]["response"])
        spoken = "".join(said.get("output_text", {}).values())
        assert spoken == (whole["content"] or "")
        thought = "".join(said.get("reasoning_summary_text", {}).values())
        assert thought == whole.get("reasoning_content", "")
        return whole

    def prompt(self, gateway: Running, talk: Conversation, call: Call) -> list[int]:
        request = responses_request(call.request or {})
        return gateway.renderer.render(request.messages, request.tools)


class Messages:
    """Blocks; a result is the user's. A call without its whole arguments has no place in them."""

    path = "messages"
    alternating = True

    def body(self, talk: Conversation, turn: Turn) -> dict[str, Any]:
        tools = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
            for tool in talk.tools
        ]
        asked: dict[str, Any] = {"messages": [*map(self.message, talk.messages)], "tools": tools}
        asked |= {} if turn.stop is None else {"stop_sequences": [turn.stop]}
        return asked | {"max_tokens": turn.max_tokens or 256}

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            return {"role": "user", "content": [{**block, "content": message["content"]}]}
        if message["role"] != "assistant":
            return message
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            thought = message["reasoning_content"]
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or []:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            blocks.append({**block, "input": json.loads(function["arguments"])})
        return {"role": "assistant", "content": blocks}

    def read(self, answer: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for block in answer["content"]:
            if block["type"] == "thinking":
                message["reasoning_content"] = block["thinking"]
            elif block["type"] == "text":
                message["content"] = block["text"]
            elif isinstance(block["input"], dict):
                function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                call = {"id": block["id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return message

    def added_up(self, text: str) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        for event in events(text):
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name, of in (("text", "text"), ("thinking", "thinking"), ("partial_json", "")):
                    if name in delta:
                        block[of or "json"] += delta[name]
        for block in blocks:
            if block["type"] == "tool_use":
                whole = _is_json(block["json"])
                block["input"] = json.loads(block["json"]) if whole else block["json"]
        return self.read({"content": blocks})

    def prompt(self, gateway: Running, talk: Conversation, call: Call) -> list[int]:
        request = messages_request(call.request or {})
        return gateway.renderer.render(request.messages, request.tools)


Spoken = Chat | Responses | Messages


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]


def ask(
    gateway: Running, claim: Any, talk: Conversation, turn: Turn, spoken: Spoken
) -> dict[str, Any]:
    """The message the agent gets, added up from the chunks where it streams."""
    body = spoken.body(talk, turn) | {"model": "policy", "stream": turn.stream}
    answer = HTTP.post(
        f"{gateway.base_url(claim)}/{spoken.path}",
        json=body,
        headers={"x-api-key": claim.key},
        timeout=30,
    )
    assert answer.status_code == 200, (answer.text, body)
    return spoken.added_up(answer.text) if turn.stream else spoken.read(answer.json())


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
    asked: set[str] = field(default_factory=set[str])

    def put(self, messages: list[dict[str, Any]], tools: Any, call: Call) -> None:
        self.known[key(messages, tools)] = call
        self.said.add(key(messages, None))
        self.asked.add(key(messages[:-1], None))

    def branch(self, talk: Conversation, ends: list[int]) -> Branch:
        """Why a request does not go on from the last reply in it."""
        if not self.known:
            return Branch.FIRST_CALL
        if not ends:
            return Branch.NEW_CONVERSATION
        if key(talk.messages[: ends[-1]], None) in self.said:
            return Branch.TOOLS_CHANGED
        for end in ends:
            if key(talk.messages[:end], None) not in self.said:
                edited = key(talk.messages[: end - 1], None) not in self.asked
                return Branch.HISTORY_EDITED if edited else Branch.UNKNOWN_REPLY
        raise AssertionError("the last reply was said, and was not")


def check(
    gateway: Running, call: Call, past: Past, talk: Conversation, spoken: Spoken
) -> Branch | None:
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
    assert call.params.get("branched") == branch
    if not matches:
        assert call.prompt_ids == spoken.prompt(gateway, talk, call)
        return branch
    earlier = known[key(talk.messages[: matches[-1]], talk.tools)]
    stopped = earlier.params["stop"] and earlier.finish_reason == "stop"
    tokens = earlier.prompt_ids + ([] if stopped else earlier.response_ids)
    assert call.prompt_ids[: len(tokens)] == tokens
    return branch


@pytest.mark.parametrize("spoken", [Chat(), Responses(), Messages()], ids=lambda one: one.path)
def test_conversations(shared_gateway: Running, spoken: Spoken) -> None:
    found: Counter[Branch | None] = Counter()

    @settings(
        max_examples=60 if isinstance(spoken, Chat) else 30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(plan=st.lists(turns, min_size=2, max_size=7))
    def test(plan: list[Turn]) -> None:
        found.update(converse(shared_gateway, plan, spoken))

    test()
    assert {None, Branch.FIRST_CALL} < {*found}


def converse(gateway: Running, plan: list[Turn], spoken: Spoken) -> list[Branch | None]:
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
        reply = ask(gateway, claim, talk, turn, spoken)
        calls = gateway.calls(claim)
        assert len(calls) == count
        branches.append(check(gateway, calls[-1], past, talk, spoken))
        assert calls[-1].response is not None
        assert value(spoken.read(calls[-1].response)) == value(reply)
        past.put([*talk.messages, reply], talk.tools, calls[-1])
        if calls[-1].finish_reason != "tool_calls":
            without = {**reply, "tool_calls": []}
            unfinished = value(reply) != value(without)
            complete = all(
                _is_json(c["function"]["arguments"]) for c in reply.get("tool_calls", [])
            )
            if unfinished and not complete:  # calls that broke off may be left out
                kept = [c for c in reply["tool_calls"] if _is_json(c["function"]["arguments"])]
                without = {**reply, "tool_calls": kept}
                past.put([*talk.messages, without], talk.tools, calls[-1])
        talk.after(turn, reply, count, alternating=spoken.alternating)
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
