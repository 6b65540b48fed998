"""What a call asked and answered, as messages, whichever protocol it used.

Reads chat completions, completions, Responses and Anthropic's Messages as agents send them. A
provider's bodies may have any shape: what is not understood is shown as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentrl.runs.excerpts import excerpt, text_of
from agentrl_proxy.protocols.response_tools import plain_item
from agentrl_tracer.schemas import Call

_THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)  # of servers that leave it in


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """As the model wrote them: JSON, if it is valid."""


@dataclass(frozen=True)
class Message:
    """``call`` names the tool call that a tool's result answers."""

    role: str
    text: str
    reasoning: str = ""
    tools: tuple[ToolCall, ...] = ()
    call: str = ""

    @property
    def said(self) -> str:
        """What it says, tool calls included."""
        calls = [f"→ {tool.name}({tool.arguments})" for tool in self.tools]
        return "  ".join(filter(None, [self.text, *calls]))


def asked(request: Mapping[str, Any] | None) -> list[Message]:
    """Return the messages of a request, system prompts first."""
    request = request or {}
    system = [request[name] for name in ("system", "instructions") if request.get(name)]
    found = [Message("system", text_of(one)) for one in system]
    said: Any = request.get("messages") or request.get("input")
    if not said:
        said = [request["prompt"]] if request.get("prompt") else []
    for item in said if isinstance(said, list) else [said]:
        found += _messages(item) if isinstance(item, dict) else [Message("user", text_of(item))]
    return found


def answered(response: Mapping[str, Any] | None) -> Message | None:
    """Return the model's answer; None without one. Stored answers are chat completions."""
    match response:
        case None:
            return None
        case {"choices": [{"message": dict(message)}, *_]}:
            return _messages({"role": "assistant", **message})[-1]
        case {"choices": [dict(choice), *_]}:
            return Message("assistant", _text(choice.get("text")))
        case other:
            return Message("assistant", _text(other))


def conversation(call: Call) -> list[Message]:
    """Return what a call asked and answered."""
    answer = answered(call.response)
    return [*asked(call.request), *([answer] if answer else [])]


def new_text(request: Mapping[str, Any] | None) -> str:
    """Return what a request says after the model's last answer in it."""
    new = takewhile(lambda message: message.role != "assistant", reversed(asked(request)))
    return "\n".join(message.text for message in reversed(list(new)))


def answer_text(response: Mapping[str, Any] | None) -> str:
    """Return what a response says, tool calls included."""
    answer = answered(response)
    return answer.said if answer else ""


def prompt_excerpt(request: Mapping[str, Any] | None) -> str:
    """Return the last thing that a request says, in one line: ``user: Who are you?``."""
    messages = asked(request)
    if not messages:
        return ""
    more = f"({len(messages) - 1} earlier) " if len(messages) > 1 else ""
    return excerpt(f"{more}{messages[-1].role}: {messages[-1].said}")


def answer_excerpt(response: Mapping[str, Any] | None) -> str:
    """Return what a response says in one line."""
    return excerpt(answer_text(response))


def shown_before(messages: Sequence[Message], earlier: Sequence[Sequence[Message]]) -> int:
    """Return how many messages at the start are those of one of the earlier conversations."""
    return max((_shared(messages, other) for other in earlier), default=0)


def path_of(call: Call) -> str:
    """Return the path below ``/v1`` that a call's request was sent to."""
    request = call.request or {}
    if "messages" in request:
        return "messages" if call.response_id.startswith("msg_") else "chat/completions"
    return "responses" if "input" in request else "completions"


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Count equal messages at the start. Agents may leave the reasoning of an answer out."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if (a.role, a.text.strip(), a.tools) != (b.role, b.text.strip(), b.tools):
            break
        count += 1
    return count


def _messages(item: dict[str, Any]) -> list[Message]:
    """Return a message, or an item of the Responses API, as messages: results of tools apart."""
    match plain_item(item):
        case {"type": "function_call"} as item:
            return [Message("assistant", "", tools=(_tool(item),))]
        case {"type": "function_call_output"} as item:
            return [Message("tool", _text(item.get("output")), call=_text(item.get("call_id")))]
        case {"type": "reasoning"}:
            thoughts = item.get("content") or item.get("summary")
            return [Message("assistant", "", reasoning=_text(thoughts))]
        case {"role": role}:
            return _chat_messages(item, str(role))
        case _:
            return [Message(str(item.get("type") or "?"), _text(item))]


def _chat_messages(item: dict[str, Any], role: str) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    thoughts = [_text(item.get("reasoning_content") or item.get("reasoning"))]
    called, content = item.get("tool_calls"), item.get("content")
    tools = [_tool(one) for one in called] if isinstance(called, list) else []
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "tool_result"}:
                call = _text(part.get("tool_use_id"))
                results.append(Message("tool", _text(part.get("content")), call=call))
            case {"type": "tool_use"}:
                tools.append(_tool(part))
            case {"type": "thinking", "thinking": thought}:
                thoughts.append(_text(thought))
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case _:
                texts.append(_text(part))
    text = "".join(texts)
    if role == "assistant" and (found := _THINKING.match(text)):
        thoughts.append(found[1].strip())
        text = text[found.end() :]
    reasoning, call = "\n".join(filter(None, thoughts)), _text(item.get("tool_call_id"))
    if results and not (text or reasoning or tools):
        return results
    return [*results, Message(role, text, reasoning, tuple(tools), call)]


def _tool(tool: Any) -> ToolCall:
    """Read a tool call of any protocol."""
    inner = tool.get("function") or tool.get("custom") or tool if isinstance(tool, dict) else None
    if not isinstance(inner, dict):
        return ToolCall("?", _text(tool))
    return ToolCall(str(inner.get("name")), _text(inner.get("arguments", inner.get("input"))))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return text_of(value)
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)
