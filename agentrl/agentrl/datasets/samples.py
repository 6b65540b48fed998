"""Examples as token rows, with what they answer, and a count of what was left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Example(Protocol):
    """What an objective learns from."""

    @property
    def task(self) -> str:
        """What it answers: examples of one task are never both trained on and held out."""
        ...

    @property
    def length(self) -> int:
        """The tokens of its longest row."""
        ...


S = TypeVar("S", bound=Example)


@dataclass(slots=True)
class Samples(Generic[S]):
    """Examples, and how many were left out, by reason."""

    kept: list[S]
    left_out: Counter[str] = field(default_factory=Counter[str])
