"""What a judge reads of a group: each conversation once, in an order that its contents decide."""

from __future__ import annotations

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
        by_text = {text: one for text, one in zip(texts, said, strict=True) if one}
        order = sorted(by_text, key=lambda text: blake2b((seed + text).encode()).digest())
        places = {text: at for at, text in enumerate(order)}
        return cls([by_text[text] for text in order], [places.get(text) for text in texts])

    def numbered(self, *places: int) -> Json:
        """Return what the judge reads: what all begin with once, and how each goes on."""
        chosen = [self.shown[place] for place in places or range(len(self.shown))]
        columns = zip(*chosen, strict=False)
        same = takewhile(lambda column: all(one == column[0] for one in column), columns)
        shared = len(list(same)) if len(chosen) > 1 else 0
        answers = {str(at): one[shared:] for at, one in enumerate(chosen, 1)}
        return {"shared": chosen[0][:shared], "conversations": answers}


def _message(message: Json) -> Json:
    """Return what a judge reads of a message: its text and tool calls. Ids differ in each rollout,
    and reasoning is not part of the answer."""
    said: Json = {"role": message.get("role"), "content": text_of(message.get("content") or "")}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [call.get("function") for call in calls]
    return said
