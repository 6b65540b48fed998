"""Equality of mathematics: 1/2 is 0.5 and \\frac{1}{2}, by math-verify in a process of its own.

An answer may ask for a power that no computer finishes. math-verify's limit of time needs the main
thread of its process, and does not end a computation of big integers: the process is ended.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from importlib.util import find_spec
from multiprocessing.pool import Pool

from agentrl.config.errors import ConfigError
from agentrl.rewards.composition import RewardOfTrace, expected_of, makes_reward
from agentrl.scoring.trace import Trace

_START_S = 60.0


@makes_reward
def symbolic(field: str = "answer", *, seconds: float = 5.0) -> RewardOfTrace:
    r"""Reward 1 if the answer equals the task's ``field`` as mathematics; else 0.

    What is in ``\boxed{}`` counts first, else the last expression, in LaTeX or plain. A list in
    ``field`` means any of its items.

    Args:
        seconds: time for one comparison, after which the answer is wrong.

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
    """One process that compares; it is replaced when it takes too long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._pool: Pool | None = None

    def equal(self, right: str, answer: str) -> bool:
        """Raises ValueError if ``right`` is no mathematics."""
        with self._lock:
            if self._pool is None:
                self._pool = multiprocessing.get_context("spawn").Pool(1, _begin)
                self._pool.apply_async(_equal, ("1", "1", 1)).get(_START_S)
            try:
                asked = self._pool.apply_async(_equal, (right, answer, self._seconds))
                return asked.get(2 * self._seconds + 1)
            except multiprocessing.TimeoutError:
                self._pool.terminate()
                self._pool = None
                return False


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends it
    logging.disable()  # math-verify warns of what it cannot parse


def _equal(right: str, answer: str, seconds: float) -> bool:
    from math_verify import parse, verify

    limit = max(int(seconds), 1)
    gold = parse(right, parsing_timeout=limit) or parse(f"${right}$", parsing_timeout=limit)
    if not gold:
        raise ValueError(f"the right answer is no mathematics: {right!r}")
    return verify(gold, parse(answer, parsing_timeout=limit), timeout_seconds=limit)
