"""Draw names, words, numbers and system prompts from a ``Random``; define a chat."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's shape, and the tools offered with them."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def split(text: str) -> list[str]:
    return text.split()


NAMES = split(
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Hugo Julia "
    "Karl Laura Max Nora Omar Peter Ruth Simon Tom Vera Will Ada Alan Bella Chen Diego Eva Farid"
)
CITIES = split(
    "Paris London Berlin Rome Madrid Tokyo Cairo Lima Oslo Vienna Dublin Athens Delhi Boston "
    "Chicago Prague Warsaw Lisbon Zurich Seoul Sydney Toronto Nairobi Hamburg Munich Geneva"
)
COLOURS = split("red blue green yellow black white orange purple pink brown grey silver")
WORDS = split(
    "apple river stone cloud paper window garden music ocean winter summer letter bridge forest "
    "candle mirror pocket rocket silver ticket travel yellow button camera dinner engine flower "
    "hammer island jacket kitten ladder market number orange pencil rabbit school tiger water"
)
ONSETS = split("b d f g h j k l m n p r s t v w z br cl dr fl gr kr pl sh st th tr")
NUCLEI = split("a e i o u ai ea io")
CODAS = ["", "", "l", "n", "r", "s", "m", "t", "x"]


def invented(rng: Random) -> str:
    """A lower-case word that no list holds, so that copying it takes reading it."""
    count = rng.choice((2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(NUCLEI) for _ in range(count)) + rng.choice(
        CODAS
    )


def name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng).capitalize()


def city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.8 else invented(rng).capitalize()


def word(rng: Random) -> str:
    return rng.choice(WORDS) if rng.random() < 0.5 else invented(rng)


def number(rng: Random, digits: tuple[int, ...] = (1, 2, 3, 3, 4, 4, 4, 4, 5)) -> str:
    """A number of a random length; its digits repeat more often than chance would have it."""
    length = rng.choice(digits)
    pool = "0123456789" if rng.random() < 0.6 else rng.sample("0123456789", 2)
    text = "".join(rng.choice(pool) for _ in range(length))
    return text.lstrip("0") or "0"


def weighted(rng: Random, table: dict[str, int]) -> str:
    return rng.choices(list(table), list(table.values()))[0]


def turn(kind: str, user: str, assistant: str, system: str | None = None) -> Chat:
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Chat(kind, messages)


def persona(rng: Random, share: float = 0.15) -> str | None:
    """A system prompt that changes nothing, now and then."""
    if rng.random() > share:
        return None
    return rng.choice(
        ("You are a helpful assistant.", "Be brief.", "You are a helpful agent.", "Answer briefly.")
    )
