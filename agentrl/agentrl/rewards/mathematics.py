"""Equality of mathematics: 1/2 is 0.5 and \\frac{1}{2}, by math-verify in a process of its own.

An answer may ask for a power that no computer finishes. math-verify's own limit of time needs the
main thread of its process, does not end a computation of big integers, and counts what other
processes take. So the process has a limit of CPU time.
"""

from __future__ import annotations

import logging
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.rewards.text import expected_of
from agentrl.scoring.functions import RewardOfTrace
from agentrl.scoring.trace import Trace

_START_S = 60.0


def symbolic(field: str = "answer", *, seconds: float = 5.0) -> RewardOfTrace:
    r"""Reward 1 if the answer equals the task's ``field`` as mathematics; else 0.

    What is in ``\boxed{}`` counts first, else the last expression, in LaTeX or plain. A list in
    ``field`` means any of its items.

    Args:
        seconds: CPU time for one comparison, after which the answer is wrong.

    Raises:
        ConfigError: math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise ConfigError("rewards: symbolic needs math-verify: pip install math-verify")
    checker = _Checker(seconds)

    def score(trace: Trace) -> float:
        rights = [str(one) for one in expected_of(trace, field)]
        return float(any(checker.equal(right, trace.answer) for right in rights))

    return score


class _Checker:
    """One process that compares; the system ends it when a comparison takes too much CPU time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: ProcessPoolExecutor | None = None

    def equal(self, right: str, answer: str) -> bool:
        """Raises ValueError if ``right`` is no mathematics."""
        with self._lock:
            if self._process is None:
                self._process = ProcessPoolExecutor(1, get_context("spawn"), _begin)
                self._process.submit(_equal, "1", "1", _START_S).result()  # imports SymPy
            try:
                return self._process.submit(_equal, right, answer, self._seconds).result()
            except BrokenProcessPool:
                self._process = None
                return False


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends it
    logging.disable()  # math-verify warns of what it cannot parse


def _equal(right: str, answer: str, seconds: float) -> bool:
    import math_verify

    # Its annotations do not know that None is no limit.
    parse: Any = partial(math_verify.parse, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time; its signal ends the process
    try:
        gold = parse(right) or parse(f"${right}$")
        if not gold:
            raise ValueError(f"the right answer is no mathematics: {right!r}")
        return math_verify.verify(gold, parse(answer), timeout_seconds=None)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
