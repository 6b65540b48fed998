"""Read how many tests passed: in pytest's JUnit XML, a line ``passed/total``, or the exit code."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

_LINE = re.compile(r"^\s*(\d{1,9})\s*/\s*(\d{1,9})\s*$", re.MULTILINE)
_LARGEST = 64 << 20


def score(report: Path, printed: str, code: int) -> tuple[int, int]:
    """Return how many tests passed, and of how many.

    Tests that were skipped do not count. Without a readable report the last line of the form
    ``passed/total`` counts, else the exit code as one test.
    """
    if (counted := _junit(report)) is not None:
        return counted
    if lines := _LINE.findall(printed):
        passed, total = map(int, lines[-1])
        if total:
            return min(passed, total), total
    return int(code == 0), 1


def _junit(report: Path) -> tuple[int, int] | None:
    """Return the counts of a report; None without one. The agent's code may have written it."""
    try:
        file = os.open(report, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return None
        try:
            root = ElementTree.fromstring(opened.read())
            suites = [_counts(suite) for suite in root.iter("testsuite")]
        except (ElementTree.ParseError, ValueError):
            return None
    total = sum(tests - skipped for tests, _, skipped in suites)
    passed = total - sum(failed for _, failed, _ in suites)
    return (max(passed, 0), total) if total > 0 else (0, 1)


def _counts(suite: ElementTree.Element) -> tuple[int, int, int]:
    def number(name: str) -> int:
        count = int(suite.get(name, "0"))
        if not 0 <= count < 10**9:
            raise ValueError(f"{name}: {count}")
        return count

    return number("tests"), number("failures") + number("errors"), number("skipped")


def rewards(
    passed: int, total: int, shaping: Mapping[str, float], *, changed: bool
) -> dict[str, float]:
    """Return the rewards by name: ``tests``, the share that passed, and what the task adds."""
    earned = {"all": passed == total, "changed": changed}
    extra = {f"tests.{name}": value * earned[name] for name, value in shaping.items()}
    return {"tests": passed / total, **extra}
