"""A clumsy player: it asks at random, and what it names fits the answers three times of four.

The offline answerer understands all that it asks. It knows training nouns only.
"""

import functools
import random
from typing import Any

from answerer import load_nouns, verdict

SIMPLE = ("animal", "clothing", "food", "vehicle")
QUESTIONS = str.splitlines("""\
Is it alive?
Can it move?
Can it fly?
Can you eat it?
Is it sweet?
Can you wear it?
Is it soft?
Is it made by people?
Is it made of metal?
Is it made of wood?
Does it have wheels?
Does it have an engine?
Is it electric?
Does it have strings?
Does it make music?
Is it sharp?
Does it have legs?
Does it have fur?
Does it grow?
Does it live in water?
Is it big?
Is it small?
Do you find it in a house?""")
SIMPLE_QUESTIONS = str.splitlines("""\
Is it alive?
Can it move?
Can you eat it?
Can you wear it?
Is it soft?
Is it made by people?
Does it have legs?
Do you find it in a house?""")


def naming(word: str) -> str:
    article = "an " if word[0] in "aeiou" else "a "
    return f"Is it {'' if word in ('clothing', 'food', 'furniture') else article}{word}?"


@functools.cache
def answer_of(noun: str, asked: str) -> str:
    return verdict(noun, noun, asked)["yes_or_no"]


def simple_question(rng: random.Random, candidates: list[dict[str, Any]], *, first: bool) -> str:
    """Ask for a property first, then name a category, mostly one that fits the answers.

    A player that may name a category at once learns to list three of the four, which wins 75 %,
    and no longer asks.
    """
    if first:
        return rng.choice(SIMPLE_QUESTIONS)
    if rng.random() < 0.25:
        return naming(rng.choice(SIMPLE))
    return naming(rng.choice(candidates)["category"])


def full_question(
    rng: random.Random, candidates: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> str:
    """Name categories until one is right, then ask for properties and name nouns of it."""
    categories = {row["category"] for row in candidates}
    known = len(categories) == 1
    if known and rng.random() < 0.4:
        return rng.choice(QUESTIONS)
    if rng.random() < 0.25:
        candidates = [row for row in rows if not known or row["category"] in categories]
    return naming(rng.choice(candidates)["noun" if known else "category"])


def game(rng: random.Random, *, simple: bool) -> list[tuple[str, str]]:
    """Return the questions and answers of one game about a training noun."""
    rows = [*load_nouns("simple_train" if simple else "train").values()]
    secret = rng.choice(rows)
    candidates = rows  # the nouns that every answer so far fits
    turns: list[tuple[str, str]] = []
    for _ in range(3 if simple else 20):
        asked = (
            simple_question(rng, candidates, first=not turns)
            if simple
            else full_question(rng, candidates, rows)
        )
        reply = verdict(secret["noun"], secret["category" if simple else "noun"], asked)
        answer = reply["yes_or_no"]
        turns.append((asked, answer))
        if reply["correct"]:
            break
        candidates = [row for row in candidates if answer_of(row["noun"], asked) == answer]
    return turns
