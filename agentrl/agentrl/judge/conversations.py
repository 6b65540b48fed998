"""What a judge reads of a group: each conversation once, in an order that its contents decide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING

from agentrl.runs.excerpts import json_line, text_of
from agentrl_tracer.schemas import Json

if TYPE_CHECKING:
    from agentrl.scoring.trace import Trace


@dataclass(frozen=True)
class Conversations:
    """The distinct conversations of a group's members, shuffled.

    Members whose conversations are equal share one, so they get the same score. The order depends
    on the conversations alone: not on who came first, and the same in a resumed run.
    """

    shown: list[list[Json]]
    place: list[int | None]
    """Of each member: its conversation in ``shown``. None: it has asked no model."""

    @classmethod
    def of(cls, members: Sequence[Trace]) -> Conversations:
        said = [[_message(one) for one in member.messages] for member in members]
        texts = [json_line(one) for one in said]
        seed = "".join(sorted(set(texts)))
        ranks = {text: blake2b((seed + text).encode()).digest() for text in texts}
        by_text = dict(zip(texts, said, strict=True))
        order = [text for text in sorted(by_text, key=lambda text: ranks[text]) if by_text[text]]
        places = {text: at for at, text in enumerate(order)}
        return cls([by_text[text] for text in order], [places.get(text) for text in texts])

    def numbered(self, *places: int) -> Json:
        """Return what the judge reads: what all begin with once, and how each goes on."""
        chosen = [self.shown[place] for place in places or range(len(self.shown))]
        shared = 0
        if len(chosen) > 1:
            columns = zip(*chosen, strict=False)
            shared = len(
                list(takewhile(lambda column: all(m == column[0] for m in column), columns))
            )
        answers = {str(at): one[shared:] for at, one in enumerate(chosen, 1)}
        return {"shared": chosen[0][:shared], "conversations": answers}


def _message(message: Json) -> Json:
    """Return what a judge reads of a message: its text and tool calls. Ids differ in each rollout,
    and reasoning is not part of the answer."""
    said: Json = {"role": message.get("role"), "content": text_of(message.get("content") or "")}
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if calls:
        said["tool_calls"] = [
            {"name": one.get("name"), "arguments": _value(one.get("arguments"))} for one in calls
        ]
    return said


def _value(arguments: object) -> object:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
