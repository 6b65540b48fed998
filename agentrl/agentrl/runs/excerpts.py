"""What a request and a response say, whichever protocol they are of: in one line, and whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MOST_READ = 4_000  # characters: agents write lines of megabytes


def excerpt(text: str) -> str:
    """Return a text in one line of at most 240 characters, without control characters."""
    shown = " ".join(text[:_MOST_READ].split())
    shown = _CONTROL.sub("\ufffd", shown)  # a terminal would obey them
    return shown if len(shown) <= 240 and len(text) <= _MOST_READ else f"{shown[:239]}…"


def prompt_excerpt(request: Mapping[str, Any] | None) -> str:
    """Return the last thing that a request says: ``user: Who are you?``."""
    request = request or {}
    said: Any = request.get("messages") or request.get("input") or request.get("prompt") or ""
    last = said[-1] if isinstance(said, list) and said else said
    if not isinstance(last, dict):
        return excerpt(text_of(last))
    more = f"({len(said) - 1} before)  " if len(said) > 1 else ""
    role = str(last.get("role") or last.get("type") or "?")
    return excerpt(f"{more}{role}: {text_of(last.get('content') or last.get('output') or '')}")


def new_messages_text(request: Mapping[str, Any] | None) -> str:
    """Return what a request says after the model's last answer in it."""
    request = request or {}
    said: Any = request.get("messages") or request.get("input") or request.get("prompt") or ""
    if not isinstance(said, list):
        return text_of(said)
    new: list[str] = []
    for message in reversed(said):
        if not isinstance(message, dict):
            new.append(str(message))
        elif message.get("role") == "assistant":
            break
        else:
            new.append(text_of(message.get("content") or message.get("output") or ""))
    return "\n".join(reversed(new))


def answer_excerpt(response: Mapping[str, Any] | None) -> str:
    """Return what a response says, tool calls included, in one line."""
    return excerpt(answer_text(response))


def answer_text(response: Mapping[str, Any] | None) -> str:
    """Return what a response says, tool calls included."""
    response = response or {}
    for choice in response.get("choices") or []:
        message = choice.get("message") or {}
        tools = [tool.get("function") or {} for tool in message.get("tool_calls") or []]
        parts = [text_of(choice.get("text") or message.get("content") or "")]
        parts += [f"→ {one.get('name')}({one.get('arguments')})" for one in tools]
        return "  ".join(filter(None, parts))
    return text_of(response.get("output") or response.get("content") or "")


def text_of(content: Any) -> str:
    """Return the text of a string, or of a list of parts: text, tool calls, tool results."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    parts: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            parts.append(str(part))
        elif "name" in part:
            arguments = part.get("arguments", part.get("input"))
            parts.append(f"→ {part['name']}({text_of(arguments)})")
        else:
            inner = part.get("text") or part.get("content") or part.get("refusal")
            parts.append(text_of(inner) if inner else f"[{part.get('type', 'part')}]")
    return " ".join(parts)
