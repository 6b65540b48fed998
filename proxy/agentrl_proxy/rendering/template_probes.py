"""Find out what a chat template does, by letting it render dummy conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        return any(all(one["content"] in text for one in said) for text in _tried(write, said))

    return frozenset(name for name, roles in _ORDERS.items() if not writes(roles))


def takes_text_arguments(write: Write) -> bool:
    """Whether the template expects tool arguments as text (DeepSeek), not as values."""
    values = _tried(write, [_ASKED, _calling({"DUMMYKEY": "v"})])
    if any("DUMMYKEY" in text and "'DUMMYKEY'" not in text for text in values):
        return False  # written, and not as Python writes a dictionary
    texts = _tried(write, [_ASKED, _calling('{"DUMMYKEY": "v"}')])
    return any('"DUMMYKEY"' in text for text in texts)


def refuses_content_beside_thinking(write: Write) -> bool:
    """Whether the template refuses a message with a thought, content and tool calls (gpt-oss)."""
    thought = {"thinking": "x"}
    if not [*_tried(write, [_ASKED, _calling({}) | thought])]:
        return False
    return not [*_tried(write, [_ASKED, _calling({}) | thought | {"content": _REPLY}])]


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tried(write: Write, messages: list[dict[str, Any]]) -> Iterator[str]:
    """The text, if the template does not refuse the messages."""
    try:
        text = write(messages)
    except Exception:
        return
    yield text
