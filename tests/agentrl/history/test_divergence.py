"""Where token sequences part."""

from __future__ import annotations

from agentrl.history.divergence import Parting, partings, shared_length


def test_each_sequence_parts_from_the_one_it_follows_for_longest() -> None:
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 7], [1, 2, 3, 4, 5]]
    assert shared_length(sequences) == 2
    assert partings(sequences) == [
        Parting(None, None),  # the last one has all of it
        Parting(3, 0),
        Parting(2, 0),
        Parting(None, None),
    ]


def test_a_sequence_alone_or_empty_parts_from_none() -> None:
    assert partings([[1, 2]]) == [Parting(None, None)]
    assert partings([[], [1]]) == [Parting(None, None), Parting(0, 0)]
    assert shared_length([]) == 0
    assert shared_length([[], [1]]) == 0
