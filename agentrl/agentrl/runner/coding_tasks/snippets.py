"""Test pieces of code: ``python -m agentrl.runner.coding_tasks.snippets`` with a job as JSON.

It is a process of its own, because the sandbox ends all children of the process that uses it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.runner.coding_tasks import sandbox


def passed(
    code: str, tests: Sequence[str], seconds: float, memory_mb: float, sandboxed: bool
) -> int:
    """Return how many tests passed. Code that ends the process early has passed none."""
    if sandboxed:
        sandbox.check_bubblewrap()
    env = {name: os.environ[name] for name in sandbox.OF_TESTS if name in os.environ}
    # By its name: of an absolute path, the sandbox shows that file alone.
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])
    count = 0
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        work, home = Path(folder, "work"), Path(folder, "home")
        work.mkdir()
        home.mkdir()
        place = sandbox.Place(work, home, sandboxed, cpu_seconds=seconds + 1, memory_mb=memory_mb)
        for test in tests:
            mark = secrets.token_hex(16)
            (work / "program.py").write_text(f"{code}\n{test}\nprint({mark!r})\n")
            command = ["python", "program.py"]
            done = sandbox.run(command, place, env, keep_output=True, seconds=seconds)
            ended = done.printed.rstrip().endswith(mark)
            count += done.code == 0 and not done.timed_out and ended
    return count


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(passed(**json.load(sys.stdin))))
    except ValueError as error:
        sys.exit(str(error))
