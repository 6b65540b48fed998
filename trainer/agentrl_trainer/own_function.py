"""Name a function that a user wrote in the errors it causes. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any


class FunctionError(RuntimeError):
    """A function that the user gave raised, or returned what it should not."""


@contextmanager
def said_by(function: Callable[..., Any], setting: str) -> Iterator[None]:
    """Turn what goes wrong with a function into a FunctionError that names the setting, the
    function and the line."""
    name = f"{setting}: {getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        yield
    except FunctionError as error:
        raise FunctionError(f"{name}: {error}") from error
    except Exception as error:
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}, line {frame.lineno}"
        raise FunctionError(f"{name}: {type(error).__name__}: {error} ({where})") from error
