"""Tell that a text has more tokens than a context holds, without tokenizing all of it."""

from __future__ import annotations

from collections.abc import Callable

_ORDINARY = 8  # characters a token: a text with fewer is tokenized whole, which takes no longer
_PIECE = 64 * 1024
_SEARCHED = 1024  # a piece ends at a space, if there is one among so many of its last characters
_MARGIN = 9 / 8
"""Pieces that are tokenized apart have a few tokens more than the whole, at each cut. Only a count
that is larger by this factor is one that the whole exceeds as well."""


def exceeds(text: str, limit: int, count: Callable[[str], int]) -> bool:
    """Return whether a text certainly has more than ``limit`` tokens; False: it may fit.

    Args:
        count: returns how many tokens a text has.
    """
    if len(text) <= limit * _ORDINARY:
        return False
    counted, start = 0, 0
    while start < len(text):
        end = start + _PIECE
        space = text.rfind(" ", end - _SEARCHED, end)
        end = space if space > 0 and end < len(text) else end
        counted += count(text[start:end])
        if counted > limit * _MARGIN:
            return True
        start = end
    return False
