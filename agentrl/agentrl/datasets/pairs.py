"""Read records as pairs of answers, one of which is preferred, and as answers with scores.

The forms: TRL's, with the prompt apart or in both answers (UltraFeedback binarized and ``agentrl
runs export --format pairs`` among them), Anthropic's HH, HelpSteer3, and UltraFeedback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from agentrl.datasets.chats import Chat, to_chat, turns, with_system, without_nulls
from agentrl_tracer.schemas import Json

_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}

Messages = list[Json]
Parts = tuple[Messages, Messages, Messages]
"""The prompt, the chosen answer and the rejected one."""


def to_pair(data: Json) -> tuple[Chat, Chat] | str:
    """Read a record as the chats of a chosen and a rejected answer, or say why it prefers neither.

    The weights are 0 for the messages of the prompt and 1 for those of the answers.

    Raises:
        ValueError: names the field that does not fit.
    """
    given = {name for name, value in data.items() if value is not None}
    reader = next((read for has, read in _FORMS if has <= given), None)
    if reader is None:
        raise ValueError(
            f"is no pair: it has {', '.join(data) or 'no fields'}; give chosen and rejected (with "
            "or without prompt), or the fields of HelpSteer3 or UltraFeedback"
        )
    found = reader(data)
    if isinstance(found, str):
        return found
    prompt, chosen, rejected = found
    if chosen == rejected:
        return "pairs whose answers are equal"
    answers = {"chosen": chosen, "rejected": rejected}
    better, worse = (_chat(prompt, *one, data.get("tools")) for one in answers.items())
    return better, worse


def to_scored(data: Json) -> list[tuple[Chat, float]]:
    """Read a record as chats with a number for the last answer of each.

    Raises:
        ValueError: names the field that does not fit.
    """
    if data.get("instruction") is None or data.get("completions") is None:
        score = _number(data.get("score"), "score")
        return [(_answered(to_chat(data), 0, "messages"), score)]
    prompt = turns(data["instruction"], "instruction", "user")
    scored = enumerate(_completions(data))
    return [(_chat(prompt, f"completions[{at}]", *one), score) for at, (score, *one) in scored]


def _chat(prompt: Messages, name: str, answer: Messages, tools: Any = None) -> Chat:
    try:
        chat = to_chat({"messages": [*prompt, *answer], "tools": tools})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return _answered(chat, len(prompt), name)


def _answered(chat: Chat, start: int, name: str) -> Chat:
    """Return a chat that ends with an answer, of which messages from ``start`` on have a weight."""
    if (role := chat.messages[-1]["role"]) != "assistant":
        raise ValueError(
            f"{name}: ends with a message of {role}; the last message is the assistant's answer"
        )
    return replace(chat, weights=[float(at >= start) for at in range(len(chat.messages))])


def _trl(data: Json) -> Parts | str:
    """TRL's form. A score of each answer, as UltraFeedback's have, must not contradict it."""
    names = ("score_chosen", "score_rejected")
    scores = [_number(data[name], name) for name in names if data.get(name) is not None]
    if len(scores) == 2 and scores[0] <= scores[1]:
        return "pairs whose scores do not prefer the chosen answer"
    if (given := data.get("prompt")) is None:
        found = _without_prompt(*(_transcript(data[name], name) for name in ("chosen", "rejected")))
        return with_system(data, found[0]), *found[1:]
    prompt = without_nulls(turns(given, "prompt", "user"))
    chosen, rejected = (
        without_nulls(turns(data[name], name, "assistant")) for name in ("chosen", "rejected")
    )
    if chosen and isinstance(chosen[0], dict) and chosen[0].get("role") in ("system", "user"):
        # In UltraFeedback binarized the answers begin with the prompt as well.
        whole, chosen, rejected = _without_prompt(chosen, rejected)
        size = len(prompt)
        if whole[-size:] != prompt and whole[:size] != prompt:
            raise ValueError(
                f"chosen: begins with a message of {whole[0]['role']} that is not of the prompt"
            )
        prompt = whole
    return with_system(data, prompt), chosen, rejected


def _without_prompt(chosen: Messages, rejected: Messages) -> Parts:
    """Take what both conversations begin with as the prompt; each keeps its last message."""
    both = zip(chosen[:-1], rejected[:-1], strict=False)
    size = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
    if size == 0:
        raise ValueError("chosen: begins otherwise than rejected, so there is no prompt; give one")
    return chosen[:size], chosen[size:], rejected[size:]


def _transcript(value: Any, name: str) -> Messages:
    """Read messages, or text as Anthropic's HH has it: ``\\n\\nHuman: ...\\n\\nAssistant: ...``."""
    if not isinstance(value, str):
        return turns(value, name, "assistant")
    before, *said = _HH_TURN.split(value)
    if before.strip() or not said:
        raise ValueError(
            f"{name}: is text without a prompt, and no transcript that begins with an empty line "
            "and Human:; give prompt"
        )
    both = zip(said[0::2], said[1::2], strict=True)
    return [{"role": _HH_ROLES[who], "content": text.strip()} for who, text in both]


def _helpsteer(data: Json) -> Parts | str:
    """HelpSteer3 (arXiv:2505.11475): ``overall_preference`` is below 0 if response1 is better."""
    preference = _number(data["overall_preference"], "overall_preference")
    if preference == 0:
        return "pairs that prefer neither answer"
    better, worse = ("response1", "response2") if preference < 0 else ("response2", "response1")
    chosen, rejected = (turns(data[name], name, "assistant") for name in (better, worse))
    return turns(data["context"], "context", "user"), chosen, rejected


def _ultrafeedback(data: Json) -> Parts | str:
    """UltraFeedback (arXiv:2310.01377): the best and the worst of several completions."""
    scored = _completions(data)
    best, worst = (choose(scored, key=lambda one: one[0]) for choose in (max, min))
    if best[0] == worst[0]:
        return "prompts whose answers have the same score"
    return turns(data["instruction"], "instruction", "user"), best[1], worst[1]


def _completions(data: Json) -> Sequence[tuple[float, Messages]]:
    given = data["completions"]
    if not isinstance(given, list) or not given:
        raise ValueError("completions: give a list of answers")
    found: list[tuple[float, Messages]] = []
    for at, one in enumerate(given):
        what = f"completions[{at}]"
        if not isinstance(one, dict) or not {"response", "overall_score"} <= one.keys():
            raise ValueError(f"{what}: give an object with response and overall_score")
        score = _number(one["overall_score"], f"{what}.overall_score")
        found.append((score, turns(one["response"], f"{what}.response", "assistant")))
    return found


def _number(value: Any, name: str) -> float:
    try:
        if math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name}: give a number, not {value!r}")


_FORMS: tuple[tuple[set[str], Callable[[Json], Parts | str]], ...] = (
    ({"chosen", "rejected"}, _trl),
    ({"context", "response1", "response2", "overall_preference"}, _helpsteer),
    ({"instruction", "completions"}, _ultrafeedback),
)
"""Fields that tell a form, and what reads it."""
