"""Read records as pairs of answers, one of which is preferred.

The forms: TRL's, with the prompt apart or in both answers (UltraFeedback binarized and ``agentrl
runs export --format pairs`` among them), Anthropic's HH, HelpSteer3, and UltraFeedback.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.datasets.chats import Chat, to_chat
from agentrl.datasets.files import Record
from agentrl_tracer.schemas import Json

_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; messages are in OpenAI's form."""

    prompt: list[Json]
    chosen: list[Json]
    rejected: list[Json]
    tools: list[Json] | None = None

    def chats(self) -> tuple[Chat, Chat]:
        """Return the chosen and the rejected conversation; only their answers have a weight."""
        before = [0.0] * len(self.prompt)
        chosen, rejected = (
            Chat([*self.prompt, *answer], self.tools, [*before, *([1.0] * len(answer))])
            for answer in (self.chosen, self.rejected)
        )
        return chosen, rejected


def to_pair(record: Record) -> Pair | str:
    """Read a record as a pair, or say why it prefers neither answer.

    Raises:
        ConfigError: names the file, the line and the field that does not fit.
    """
    data = record.data
    reader = next((read for has, read in _FORMS if has <= _given(data)), None)
    if reader is None:
        raise ConfigError(
            f"{record.where}: is no pair: it has {', '.join(data) or 'no fields'}; give chosen and "
            "rejected (with or without prompt), or the fields of HelpSteer3 or UltraFeedback"
        )
    try:
        found = reader(data)
    except ValueError as error:
        raise ConfigError(f"{record.where}: {error}") from error
    if isinstance(found, str):
        return found
    prompt, chosen, rejected = found
    if chosen == rejected:
        return "pairs whose answers are equal"
    chats = [
        to_chat(Record(f"{record.where}: {name}", {"messages": [*prompt, *answer], **_tools(data)}))
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    ]
    checked = [chat.messages for chat in chats]
    for name, messages in zip(("chosen", "rejected"), checked, strict=True):
        if messages[-1]["role"] != "assistant":
            raise ConfigError(
                f"{record.where}: {name}: ends with a message of {messages[-1]['role']}; the last "
                "message is the assistant's answer"
            )
    start = len(prompt)
    return Pair(checked[0][:start], checked[0][start:], checked[1][start:], chats[0].tools)


Messages = list[Json]
Parts = tuple[Messages, Messages, Messages]
"""The prompt, the chosen answer and the rejected one."""


def _given(data: Json) -> set[str]:
    return {name for name, value in data.items() if value is not None}


def _tools(data: Json) -> Json:
    return {"tools": data["tools"]} if data.get("tools") else {}


def _trl(data: Json) -> Parts | str:
    """TRL's form. A score of each answer, as UltraFeedback's have, must not contradict it."""
    better, worse = data.get("score_chosen"), data.get("score_rejected")
    if better is not None and worse is not None and better <= worse:
        return "pairs whose scores do not prefer the chosen answer"
    texts = [data["chosen"], data["rejected"]]
    if data.get("prompt") is None and all(isinstance(one, str) for one in texts):
        return _without_prompt(*map(_transcript, ("chosen", "rejected"), texts))
    chosen, rejected = (_messages(data[name], name, "assistant") for name in ("chosen", "rejected"))
    if data.get("prompt") is None:
        return _without_prompt(chosen, rejected)
    prompt = _messages(data["prompt"], "prompt", "user")
    size = len(prompt)
    # In UltraFeedback binarized the answers begin with the prompt as well.
    if chosen[:size] == prompt == rejected[:size]:
        return prompt, chosen[size:], rejected[size:]
    return prompt, chosen, rejected


def _without_prompt(chosen: Messages, rejected: Messages) -> Parts:
    """Take what both conversations begin with as the prompt; each keeps its last message."""
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    size = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
    if size == 0:
        raise ValueError("chosen: begins otherwise than rejected, so there is no prompt; give one")
    return chosen[:size], chosen[size:], rejected[size:]


def _transcript(name: str, text: str) -> Messages:
    """Read a conversation as Anthropic's HH has it: ``\\n\\nHuman: ...\\n\\nAssistant: ...``."""
    before, *turns = _TURN.split(text)
    if before.strip() or not turns:
        raise ValueError(
            f"{name}: is text without a prompt, and no transcript that begins with an empty line "
            "and Human:; give prompt"
        )
    return [
        {"role": _HH_ROLES[who], "content": said.strip()}
        for who, said in zip(turns[0::2], turns[1::2], strict=True)
    ]


def _helpsteer(data: Json) -> Parts | str:
    """HelpSteer3 (arXiv:2505.11475): ``overall_preference`` is below 0 if response1 is better."""
    preference = _number(data["overall_preference"], "overall_preference")
    if preference == 0:
        return "pairs that prefer neither answer"
    answers = [_messages(data[f"response{at}"], f"response{at}", "assistant") for at in (1, 2)]
    chosen, rejected = answers if preference < 0 else reversed(answers)
    return _messages(data["context"], "context", "user"), chosen, rejected


def _ultrafeedback(data: Json) -> Parts | str:
    """UltraFeedback (arXiv:2310.01377): the best and the worst of several completions."""
    scored = scored_completions(data)
    best, worst = max(scored, key=lambda one: one[1]), min(scored, key=lambda one: one[1])
    if best[1] == worst[1]:
        return "prompts whose answers have the same score"
    return _messages(data["instruction"], "instruction", "user"), best[0], worst[0]


def scored_completions(data: Json) -> list[tuple[Messages, float]]:
    """Return UltraFeedback's completions, each with its ``overall_score``.

    Raises:
        ValueError: names the field that does not fit.
    """
    given = data["completions"]
    if not isinstance(given, list) or not given:
        raise ValueError("completions: give a list of answers")
    found: list[tuple[Messages, float]] = []
    for at, one in enumerate(given):
        what = f"completions[{at}]"
        if not isinstance(one, dict) or not {"response", "overall_score"} <= one.keys():
            raise ValueError(f"{what}: give an object with response and overall_score")
        answer = _messages(one["response"], f"{what}.response", "assistant")
        found.append((answer, _number(one["overall_score"], f"{what}.overall_score")))
    return found


def _messages(value: Any, name: str, role: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: give text, or a list of messages")
    return value


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: give a number, not {value!r}") from error


_FORMS: tuple[tuple[set[str], Callable[[Json], Parts | str]], ...] = (
    ({"chosen", "rejected"}, _trl),
    ({"context", "response1", "response2", "overall_preference"}, _helpsteer),
    ({"instruction", "completions"}, _ultrafeedback),
)
"""Fields that tell a form, and what reads it."""
