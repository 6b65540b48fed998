"""Generate the chats that ``agentrl-tiny`` is pretrained on, from a seed.

Each kind of chat is one plain function of a ``random.Random``. The last message of every chat is
the assistant's. Tokens and templates are in ``chat_tokenizer``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from dialogs import copy_name, copy_number, identity, say_you_are, small_talk
from nouns import NOUNS, a, describe, fact, guess_player, quiz, what_is, yes_no
from tool_uses import tool_use
from vocabulary import COLOURS, Chat, city, invented, name, number, turn, word


def json_answer(rng: Random) -> Chat:
    """An object for a schema, or for a list of keys."""
    fields: list[tuple[str, str, Any]] = [
        ("name", "string", name(rng)),
        ("age", "integer", int(number(rng, (1, 2, 2)))),
        ("city", "string", city(rng)),
        ("colour", "string", rng.choice(COLOURS)),
        (invented(rng), "string", word(rng)),
        (invented(rng), "integer", int(number(rng, (1, 2, 3, 4)))),
    ]
    chosen = rng.sample(fields, rng.choice((1, 2, 2, 3)))
    if rng.random() < 0.5:
        properties = {key: {"type": kind} for key, kind, _ in chosen}
        keys = [key for key, _, _ in chosen]
        schema = {"type": "object", "properties": properties, "required": keys}
        order = f"Answer in JSON with this schema: {json.dumps(schema)}"
    else:
        order = f"Answer in JSON with the keys {', '.join(key for key, _, _ in chosen)}."
    told = ". ".join(f"The {key} is {value}" for key, _, value in chosen)
    reply = json.dumps({key: value for key, _, value in chosen})
    if rng.random() < 0.3:
        return turn("json", f"{told}.", reply, order)
    return turn("json", f"{told}. {order}" if rng.random() < 0.5 else f"{order}\n{told}.", reply)


def json_verdict(rng: Random) -> Chat:
    """The answering side of 20 Questions, in JSON."""
    one = fact(rng)
    verdict = {
        "brief_reason": f"{one.statement.capitalize()}.",
        "yes_or_no": "yes" if one.holds else "no",
        "correct": False,
    }
    if rng.random() < 0.15:
        guess = one.noun if rng.random() < 0.5 else rng.choice(list(NOUNS))
        right = guess == one.noun
        reason = f"It is {a(one.noun)}." if right else f"It is {a(one.noun)}, not {a(guess)}."
        verdict = {"brief_reason": reason, "yes_or_no": "yes" if right else "no", "correct": right}
        question = f"Is it {a(guess)}?"
    else:
        question = one.about("it")
    keys = "Answer in JSON with the keys brief_reason, yes_or_no, correct."
    secret = f"The secret word is {one.noun}. {question} {keys}"
    return turn("json_verdict", secret, json.dumps(verdict))


REACT = (
    "Answer in this format:\nThought: your reasoning\nFinal Answer: your answer",
    "Use the format Thought: ... Final Answer: ...",
    "To give my best complete final answer to the task respond using the exact following format:"
    "\n\nThought: I now can give a great answer\nFinal Answer: Your final answer must be the great"
    " and the most complete as possible, it must be outcome described.",
)


def react(rng: Random) -> Chat:
    """A question under a system prompt or instruction that wants a thought first."""
    order = rng.choice(REACT)
    inner = rng.choice((yes_no, copy_number, copy_name, identity, say_you_are))(rng)
    question, answer = inner.messages[-2]["content"], inner.messages[-1]["content"]
    thought = "I now can give a great answer" if "great" in order else "I know the answer."
    reply = f"Thought: {thought}\nFinal Answer: {answer}"
    if rng.random() < 0.5:
        return turn("react", question, reply, order)
    return turn("react", f"{question}\n\n{order}", reply)


def several(rng: Random) -> Chat:
    """Two or three small chats in a row."""
    kinds = (identity, small_talk, copy_number, copy_name, yes_no, say_you_are)
    parts = [rng.choice(kinds)(rng) for _ in range(rng.choice((2, 2, 3)))]
    plain = [m for part in parts for m in part.messages if m["role"] != "system"]
    return Chat("several", plain)


MIX: dict[Callable[[Random], Chat], int] = {
    say_you_are: 16,
    identity: 5,
    small_talk: 6,
    copy_number: 9,
    copy_name: 11,
    yes_no: 16,
    quiz: 10,
    describe: 2,
    what_is: 2,
    guess_player: 2,
    tool_use: 12,
    json_answer: 6,
    json_verdict: 3,
    react: 5,
    several: 4,
}


def generate(rng: Random, count: int) -> list[Chat]:
    """``count`` chats in the proportions of ``MIX``."""
    makers = rng.choices(list(MIX), list(MIX.values()), k=count)
    return [make(rng) for make in makers]
