"""Functions of another project, asked over a pipe: it may live in an environment of its own.

To each JSON line ``{"function": name, "arguments": {...}}`` the script answers with a JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Ask = Callable[..., Any]
"""``ask(function, **arguments)``"""


def python_with(module: str, variable: str) -> str | None:
    """The Python that the environment variable names, else this one, if it has the module."""
    return os.environ.get(variable) or (sys.executable if find_spec(module) else None)


@contextmanager
def peer(python: str, script: Path, home: Path) -> Iterator[Ask]:
    """One process for all questions: importing a trainer takes seconds. Its working directory and
    HOME are ``home``."""
    log = home / "log"
    environment = {"HF_HUB_OFFLINE": "1", "HOME": str(home)}
    environment |= {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=home,
        ) as process,
    ):
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None

        def ask(function: str, **arguments: Any) -> Any:
            questions.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
            questions.flush()
            answer = answers.readline()
            assert answer, log.read_text()
            return json.loads(answer)

        yield ask


def answer_questions(functions: dict[str, Any]) -> None:
    """Answer until stdin ends; runs in the other process. Only answers go to its stdout, whatever
    the libraries print."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        found = functions[question["function"]](**question["arguments"])
        answers.write(json.dumps(found) + "\n")
        answers.flush()
