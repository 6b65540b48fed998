"""Run the code of an answer against tests, in the sandbox of tasks with tests."""

from __future__ import annotations

import json
import subprocess
import sys

from agentrl.rewards.answers import last_block
from agentrl.rewards.composition import RewardOfTrace, field_of
from agentrl.scoring.trace import Trace

_PROGRAM = "agentrl.runner.coding_tasks.snippets"


def code_tests(
    field: str = "tests", *, seconds: float = 10.0, memory_mb: float = 1024.0,
    sandboxed: bool = True,
) -> RewardOfTrace:  # fmt: skip
    """Reward the share of tests that the answer's last Python code block passes.

    The task's ``field`` is a list of tests, or one. A test is Python code, such as an ``assert``,
    that runs after the answer's, in one program. An answer without a code block gets 0.

    Args:
        seconds, memory_mb: limits of one test.
        sandboxed: run in bubblewrap, without network and the user's files.
    """
    limits = {"seconds": seconds, "memory_mb": memory_mb, "sandboxed": sandboxed}

    def score(trace: Trace) -> float:
        tests, code = field_of(trace, field), last_block(trace.answer, "python", "py", "python3")
        tests = [tests] if isinstance(tests, str) else tests
        if not tests or not all(isinstance(test, str) for test in tests):
            raise ValueError(f"the task's field {field!r} is no list of Python code")
        if code is None:
            return 0.0
        job = json.dumps({"code": code, "tests": tests, **limits})
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM], input=job, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["the tests did not run"])[-1])
        return json.loads(done.stdout) / len(tests)

    return score
