"""Where the token sequences of a group's members part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Parting:
    """``place`` is the first token of a member that differs from every other member; until there it
    has the tokens of the member ``nearest``. Both are None for a sequence that another one has
    whole, or without others."""

    place: int | None
    nearest: int | None


def shared_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return how many tokens at the start all sequences have."""
    arrays = [np.asarray(one) for one in sequences]
    return min((_same(arrays[0], other) for other in arrays), default=0) if arrays else 0


def partings(sequences: Sequence[Sequence[int]]) -> list[Parting]:
    """Compare each sequence with all others."""
    arrays = [np.asarray(one) for one in sequences]
    found: list[Parting] = []
    for i, one in enumerate(arrays):
        lengths = [(_same(one, other), j) for j, other in enumerate(arrays) if j != i]
        place, nearest = max(lengths, key=lambda pair: pair[0], default=(len(one), 0))
        found.append(Parting(place, nearest) if place < len(one) else Parting(None, None))
    return found


def _same(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    size = min(len(one), len(other))
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if len(apart) else size
