"""Find out what a chat template does, by letting it render dummy conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Write = Callable[..., str]
"""The chat template: messages, and ``add_generation_prompt``, to text. May raise anything."""

_REPLY = "DUMMYREPLY"
_ASKED = {"role": "user", "content": "x"}
_ORDERS = {
    "system": "system user",
    "system again": "system system user",
    "later system": "user assistant system user",
    "user again": "user user",
}


class Turns(NamedTuple):
    """What a template writes around the content of an assistant's turn; "" where it is not known,
    and where it is nothing."""

    generation_prompt: str = ""
    before_content: str = ""  # after the generation prompt
    end: str = ""


def turns(write: Write) -> Turns:
    try:
        asked = write([_ASKED])
        opened = write([_ASKED], add_generation_prompt=True)
        replied = write([_ASKED, {"role": "assistant", "content": _REPLY}])
    except Exception:
        return Turns()
    turn, found, end = replied.rpartition(_REPLY)
    opening = opened[len(asked) :] if opened.startswith(asked) else ""
    if not found:
        return Turns(opening)
    return Turns(opening, turn[len(opened) :] if turn.startswith(opened) else "", end)


def refused_orders(write: Write) -> frozenset[str]:
    """Which orders of messages the template refuses or leaves out: any system message (Gemma 2), a
    second or a later one (Qwen 3.5), two of the user in a row (Gemma 3)."""

    def writes(roles: str) -> bool:
        said = [{"role": role, "content": f"DUMMY{i}"} for i, role in enumerate(roles.split())]
        text = _written(write, said)
        return text is not None and all(one["content"] in text for one in said)

    return frozenset(name for name, roles in _ORDERS.items() if not writes(roles))


def takes_text_arguments(write: Write) -> bool:
    """Whether the template expects tool arguments as text (DeepSeek), not as values."""
    of_values = _written(write, [_ASKED, _calling({"DUMMYKEY": "v"})]) or ""
    if "DUMMYKEY" in of_values and "'DUMMYKEY'" not in of_values:
        return False  # written, and not as Python writes a dictionary
    return '"DUMMYKEY"' in (_written(write, [_ASKED, _calling('{"DUMMYKEY": "v"}')]) or "")


def refuses_content_beside_thinking(write: Write) -> bool:
    """Whether the template refuses a message with a thought, content and tool calls (gpt-oss)."""
    thought = _calling({}) | {"thinking": "x"}
    alone = _written(write, [_ASKED, thought])
    beside = _written(write, [_ASKED, thought | {"content": _REPLY}])
    return alone is not None and beside is None


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _written(write: Write, messages: list[dict[str, Any]]) -> str | None:
    """The text; None if the template refuses the messages."""
    try:
        return write(messages)
    except Exception:
        return None
