"""Texts of agents in one line, and the texts of what is no text, counts among them."""

from __future__ import annotations

import json
import re
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_READ = 4_000  # characters: agents write lines of megabytes


def excerpt(text: str) -> str:
    """Return a text in one line of at most 240 characters, without control characters."""
    shown = " ".join(text[:_MOST_READ].split())
    shown = _CONTROL.sub("\ufffd", shown)  # a terminal would obey them
    return shown if len(shown) <= 240 and len(text) <= _MOST_READ else f"{shown[:239]}…"


def counted(count: int, thing: str) -> str:
    """Return ``1 call``, ``1,400 calls``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def json_line(value: Any) -> str:
    """Return one line of JSON that can be written as UTF-8: agents send lone surrogates."""
    return json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()


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
