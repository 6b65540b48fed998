"""Test pieces of code: ``python -m agentrl.runner.coding_tasks.snippets`` with a job as JSON.

It is a process of its own, because the sandbox ends all children of the process that uses it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.runner.coding_tasks import sandbox
from agentrl.runner.coding_tasks.sandbox import Place, check_bubblewrap
from agentrl.runner.coding_tasks.scoring import score

_OF_TESTS = ("PATH", "LANG", "LC_ALL", "TZ")


def test(code: str, tests: Any, seconds: float, memory_mb: float, sandboxed: bool) -> list[int]:
    """Return how many tests passed, and of how many."""
    if sandboxed:
        check_bubblewrap()
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        run = _Runner(Path(folder), seconds, memory_mb, sandboxed)
        if isinstance(tests, str) and "def test_" in tests:
            return run.pytest(code, tests)
        listed: Sequence[Any] = tests if isinstance(tests, list) else [tests]
        return [sum(run.passes(code, test) for test in listed), len(listed)]


class _Runner:
    def __init__(self, folder: Path, seconds: float, memory_mb: float, sandboxed: bool) -> None:
        self._work, self._report, self._seconds = folder / "work", folder / "report", seconds
        for one in (self._work, self._report, folder / "home"):
            one.mkdir()
        self._place = Place(
            self._work, folder / "home", sandboxed, [self._report], cpu_seconds=seconds + 1,
            memory_mb=memory_mb,
        )  # fmt: skip

    def passes(self, code: str, test: Any) -> bool:
        """Run one test. Code that ends the process early has not passed it."""
        if isinstance(test, Mapping):
            printed = self._print(code, str(test.get("input", "")))
            return printed is not None and _same(printed, str(test["output"]))
        mark = secrets.token_hex(16)
        printed = self._print(f"{code}\n{test}\nprint({mark!r})\n")
        return printed is not None and printed.rstrip().endswith(mark)

    def pytest(self, code: str, tests: str) -> list[int]:
        (self._work / "solution.py").write_text(code)
        (self._work / "test_solution.py").write_text(tests)
        report = self._report / "junit.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        self._execute(["-m", "pytest", *options, "test_solution.py"])
        return [*score(report, "", 1)]

    def _print(self, program: str, given: str = "") -> str | None:
        """Return what a program prints; None if it fails."""
        (self._work / "program.py").write_text(program)
        output = self._execute(["program.py"], given)
        return None if output is None else output.read_bytes().decode(errors="replace")

    def _execute(self, words: Sequence[str], given: str = "") -> Path | None:
        output = self._report.with_name("output")
        env = {name: os.environ[name] for name in _OF_TESTS if name in os.environ}
        # By its name: of an absolute path, the sandbox shows that file alone.
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than the tests
        env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])
        done = sandbox.run(
            ["python", *words], self._place, env, stdin=given.encode(), output=output,
            seconds=self._seconds,
        )  # fmt: skip
        return None if done.code or done.timed_out else output


def _same(printed: str, wanted: str) -> bool:
    """Compare line by line; white space at the ends of lines and of the text does not count."""
    one, other = ([line.rstrip() for line in x.strip().splitlines()] for x in (printed, wanted))
    return one == other


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(test(**json.load(sys.stdin))))
    except KeyError as error:
        sys.exit(f"a test with an input has no {error}")
    except ValueError as error:
        sys.exit(str(error))
