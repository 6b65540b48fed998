"""The tasks of both games, from generators."""

import random
from collections.abc import Iterator


def piles(seed: int) -> Iterator[dict]:
    """Yield positions of Nim, all equally often."""
    rng = random.Random(seed)
    while True:
        yield {"pile": rng.randint(2, 9)}


def secrets(seed: int) -> Iterator[dict]:
    """Yield numbers to guess, all equally often."""
    rng = random.Random(seed)
    while True:
        yield {"secret": rng.randint(1, 7)}
