"""Functions of another project, asked over a pipe: it lives in a virtual environment of its own.

To each JSON line ``{"function": name, "arguments": {...}}`` the script answers with a JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Ask = Callable[..., Any]
"""``ask(function, **arguments)``"""


@contextmanager
def peer(python: str, script: Path, home: Path) -> Iterator[Ask]:
    """One process for all questions: importing a trainer takes seconds. Its working directory and
    HOME are ``home``."""
    log = home / "log"
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(home)}
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
