"""What a call asked and answered, as messages, whichever protocol it used.

Reads chat completions, completions, Responses and Anthropic's Messages as agents send them. A
provider's bodies may have any shape: what is not understood is shown as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.runs.excerpts import text_of
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


def asked(request: Mapping[str, Any] | None) -> list[Message]:
    """Return the messages of a request, system prompts first."""
    request = request or {}
    found: list[Message] = []
    for name in ("system", "instructions"):
        if request.get(name):
            found.append(Message("system", text_of(request[name])))
    for name in ("messages", "input", "prompt"):
        said: Any = request.get(name)
        if not said:
            continue
        items = said if name != "prompt" and isinstance(said, list) else [said]
        for item in items:
            found += _messages(item) if isinstance(item, dict) else [Message("user", text_of(item))]
    return found


def answered(call: Call) -> Message | None:
    """Return the model's answer; None without one. Stored answers are chat completions."""
    choices = (call.response or {}).get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None if call.response is None else Message("assistant", _text(call.response))
    message = choices[0].get("message")
    if not isinstance(message, dict):
        return Message("assistant", _text(choices[0].get("text") or ""))
    [first, *_] = _messages({"role": "assistant", **message}) or [Message("assistant", "")]
    return first


def shown_before(messages: Sequence[Message], earlier: Sequence[Sequence[Message]]) -> int:
    """Return how many messages at the start are those of one of the earlier conversations."""
    return max((_shared(messages, other) for other in earlier), default=0)


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
    kind, role = item.get("type"), str(item.get("role") or item.get("type") or "?")
    match kind:
        case "function_call":
            tool = ToolCall(str(item.get("name")), _text(item.get("arguments")))
            return [Message("assistant", "", tools=(tool,))]
        case "function_call_output":
            return [Message("tool", _text(item.get("output")), call=str(item.get("call_id") or ""))]
        case "reasoning":
            thoughts = item.get("content") or item.get("summary")
            return [Message("assistant", "", reasoning=_text(thoughts))]
        case _:
            pass
    if "role" not in item:
        return [Message(role, _text(item))]
    results: list[Message] = []
    texts: list[str] = []
    thoughts = [_text(item[n]) for n in ("reasoning_content", "reasoning") if item.get(n)][:1]
    called, content = item.get("tool_calls"), item.get("content")
    tools = (
        [_tool(one) for one in called if isinstance(one, dict)] if isinstance(called, list) else []
    )
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": "tool_result"}:
                call = str(part.get("tool_use_id") or "")
                results.append(Message("tool", _text(part.get("content")), call=call))
            case {"type": "tool_use", "name": name}:
                tools.append(ToolCall(str(name), _text(part.get("input"))))
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
    if not (text or thoughts or tools) and results:
        return results
    call = str(item.get("tool_call_id") or "")
    return [*results, Message(role, text, "\n".join(thoughts), tuple(tools), call)]


def _tool(tool: dict[str, Any]) -> ToolCall:
    inner = tool.get("function") or tool.get("custom") or tool
    if not isinstance(inner, dict):
        return ToolCall("?", _text(inner))
    return ToolCall(str(inner.get("name")), _text(inner.get("arguments", inner.get("input"))))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return text_of(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
