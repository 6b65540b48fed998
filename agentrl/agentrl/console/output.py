"""The consoles that commands print to.

Lines that users copy are not wrapped: a terminal shows them on several rows, and copies them whole.
Sentences wrap between words, and never within a path. A pipe or a file has no width: nothing wraps.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from agentrl.runs.excerpts import json_line
from agentrl.runs.folder import strict

_UNLIMITED = 100_000
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\].*?(\x07|\x1b\\)|[@-Z\\-_])")


def _console(*, to_stderr: bool = False) -> Console:
    made = Console(stderr=to_stderr)
    if not made.is_terminal:
        made.width = _UNLIMITED
    return made


console = _console()
stderr = _console(to_stderr=True)

Part = str | tuple[str, str]
"""A text, or a text and its style."""


def plain(text: str) -> str:
    """Return what an agent wrote without what a terminal would obey."""
    shown = _ESCAPES.sub("", text)
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in shown)


def whole(*parts: Part) -> Text:
    """Join texts to lines that ``print_block`` leaves whole, whatever the terminal's width."""
    known = [(plain(one), "") if isinstance(one, str) else (plain(one[0]), one[1]) for one in parts]
    return Text.assemble(*known, no_wrap=True, overflow="ignore")


def print_line(*parts: Part, to: Console = console) -> None:
    """Print a line that users copy: not wrapped, and printed as it is."""
    to.print(Text.assemble(*parts), soft_wrap=True)


def print_block(what: RenderableType, to: Console = console) -> None:
    """Print a table, a tree or lines of ``whole``; without spaces at the ends of piped lines."""
    if to.is_terminal:
        to.print(what, crop=False, highlight=False)
        return
    with to.capture() as printed:
        to.print(what, crop=False)
    print_line("\n".join(map(str.rstrip, printed.get().splitlines())), to=to)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; numbers that JSON does not have are null."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    try:
        sys.stdout.write(json_line(strict(value)) + "\n")
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def print_sentences(text: str, style: str = "", to: Console = console) -> None:
    """Print what users read; several lines, as of a traceback, are not wrapped."""
    if to.is_terminal and "\n" not in text:
        text = textwrap.fill(text, to.width, break_long_words=False, break_on_hyphens=False)
    print_line((text, style), to=to)


def print_error(message: str) -> None:
    print_sentences(f"error: {message}", "red", stderr)


class LogLines(logging.Handler):
    """Prints what is logged: on a terminal above the live panel, which is on the same one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            both = console.is_terminal and stderr.is_terminal
            print_sentences(self.format(record), "yellow", console if both else stderr)
        except Exception:
            self.handleError(record)
