"""Pairs of answers to the game of examples/hello: the right one, and the model's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chat_data import asked, write_lines


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair(number: int, other: int | None = None) -> dict[str, Any]:
    """The right number is preferred to another one: nothing but the question tells which it is."""
    wrong = number + 1 if other is None else other
    return {
        "prompt": [asked(number)],
        "chosen": [answer(f"I am {number}.")],
        "rejected": [answer(f"I am {wrong}.")],
    }


def scored(number: int) -> list[dict[str, Any]]:
    said = ((f"I am {number}.", 1.0), ("I am Qwen.", -1.0))
    return [{"messages": [asked(number), answer(text)], "score": score} for text, score in said]


def qwen(number: int) -> dict[str, Any]:
    """What the base model would say is rejected."""
    return pair(number) | {"rejected": [answer(f"I am Qwen, not {number}.")]}


def write_pairs(path: Path, numbers: Iterable[int], make: Any = qwen) -> Path:
    return write_lines(path, [make(number) for number in numbers])
