"""Wall-clock seconds by what they went into."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """``with clock("rollouts"):`` adds to ``spent["rollouts"]``."""

    spent: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started

    def add(self, other: Clock) -> None:
        for name, seconds in other.spent.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
