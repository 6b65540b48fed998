"""A clumsy player: it asks and names at random what the offline answerer understands.

In the full game it never looks at the answers, in the simple one at three of four. It knows
training nouns only.
"""

import random
from typing import Any

from answerer import CATEGORIES, load_nouns, verdict

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


def simple_question(
    rng: random.Random, turns: list[tuple[str, str]], rows: list[dict[str, Any]]
) -> str:
    """Ask for a property first, then name a category, mostly one that fits the answers.

    A player that may name a category at once learns to list three of the four, which wins 75 %,
    and no longer asks.
    """
    if not turns:
        return rng.choice(SIMPLE_QUESTIONS)
    if rng.random() < 0.25:
        return naming(rng.choice(SIMPLE))

    def fits(row: dict[str, Any]) -> bool:
        return all(
            verdict(row["noun"], row["category"], asked)["yes_or_no"] == answer
            for asked, answer in turns
        )

    return naming(rng.choice([row["category"] for row in rows if fits(row)]))


def full_question(rng: random.Random, turn: int, rows: list[dict[str, Any]]) -> str:
    """Ask any question of those that belong early or late in a game."""
    if turn < 3:
        return naming(rng.choice([*CATEGORIES]))
    if turn < 5 or rng.random() < 0.2:
        return rng.choice(QUESTIONS)
    return naming(rng.choice(rows)["noun"])


def game(rng: random.Random, *, simple: bool) -> list[tuple[str, str]]:
    """Return the questions and answers of one game about a training noun."""
    rows = [row for row in load_nouns("train").values() if not simple or row["category"] in SIMPLE]
    secret = rng.choice(rows)
    turns: list[tuple[str, str]] = []
    for turn in range(3 if simple else 20):
        asked = simple_question(rng, turns, rows) if simple else full_question(rng, turn, rows)
        reply = verdict(secret["noun"], secret["category" if simple else "noun"], asked)
        turns.append((asked, reply["yes_or_no"]))
        if reply["correct"]:
            break
    return turns
