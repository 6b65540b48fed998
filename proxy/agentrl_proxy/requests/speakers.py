"""Tell which agent (role) sent a request whose client names none.

A coding agent is one process with one key. Its main loop, its sub-agents and its side calls
(titles, summaries, compaction) differ in what they send; rules, which are settings, say how.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

COMPACTION = "compaction"
"""The agent whose answers, summaries, stand in place of others' earlier messages."""


@dataclass(frozen=True, slots=True)
class SpeakerRule:
    """What requests of one agent have. A pattern must be found; without one, anything fits."""

    agent: str
    system: str | None = None  # in the system and developer messages
    last: str | None = None  # in the last message
    model: str | None = None  # in the requested model's name
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # in each header's value
    tools: bool | None = None  # whether there are tools

    def fits(self, chat: Mapping[str, Any], headers: Mapping[str, str], model: str) -> bool:
        messages: Sequence[Mapping[str, Any]] = chat.get("messages") or ()
        found = self.tools in (None, bool(chat.get("tools"))) and _found(self.model, model)
        found = found and all(
            _found(pattern, headers.get(name.lower())) for name, pattern in self.headers.items()
        )
        if found and self.last:
            found = bool(messages) and _found(self.last, _text(messages[-1].get("content")))
        if found and self.system:
            above = [one for one in messages if one.get("role") in ("system", "developer")]
            found = any(_found(self.system, _text(one.get("content"))) for one in above)
        return found


def speaker_of(
    rules: Iterable[SpeakerRule], part: Any, headers: Mapping[str, str], model: str
) -> str | None:
    """Return the agent of the first rule that fits, if one does.

    Args:
        part: a ChatRequest or ProviderRequest.
    """
    chat = getattr(part, "chat", None) or {"messages": part.messages, "tools": part.tools}
    return next((rule.agent for rule in rules if rule.fits(chat, headers, model)), None)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _found(pattern: str | None, text: str | None) -> bool:
    return not pattern or (text is not None and _compiled(pattern).search(text) is not None)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content or ())
