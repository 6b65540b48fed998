"""Importing torch and its like without paying for them three times."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Around imports that make a million objects, all of them there to stay.

    The garbage collector would walk them again and again while they are made (a fifth of the time
    that the import takes), in every later full collection, and for a second at exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
