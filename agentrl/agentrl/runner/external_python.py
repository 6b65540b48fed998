"""Agents that live in another virtual environment: ``--python PATH``.

Knows how to check an interpreter and how to become it. Agent frameworks pin hard; beside our own
dependencies some cannot be installed at all. That environment needs OpenTelemetry and requests, the
base install of agentrl, and nothing else of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NoReturn

import agentrl
import agentrl_tracer

_CHECK = """
import importlib.util, json, sys
needed = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http", "requests")
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print(json.dumps([list(sys.version_info[:2]), [name for name in needed if not there(name)]]))
"""
_OLDEST = (3, 11)
_PATIENCE_S = 60.0


class PythonError(ValueError):
    """The ``python`` setting names no interpreter that can run agents; says why and the remedy."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"python: {path!r} {problem}")


def check_python(path: str) -> str:
    """The interpreter's absolute path, once it is known to be able to run an attempt.

    Links are kept: a virtual environment's interpreter is one.

    Raises:
        PythonError: it does not run, is too old, or lacks what the agent's side needs.
    """
    found = shutil.which(path)
    if found is None and (Path(path) / "bin" / "python").is_file():
        found = str(Path(path) / "bin" / "python")  # the environment's folder will do
    if found is None:
        raise PythonError(path, "is no executable; give a path such as other-venv/bin/python")
    found = os.path.abspath(found)
    try:
        done = subprocess.run(
            [found, "-c", _CHECK],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            env=_without_our_path(),
        )
        version, missing = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise PythonError(path, "does not run Python code") from None
    if tuple(version) < _OLDEST:
        raise PythonError(
            path, f"is Python {version[0]}.{version[1]}; agents need 3.11 or newer, or a command"
        )
    if missing:
        raise PythonError(
            path,
            f"lacks {', '.join(missing)}, which the agent's side needs: {found} -m pip install "
            "agentrl (the base install: OpenTelemetry and requests, nothing else)",
        )
    return found


def become(python: str, lines: bytes, report_fd: int, leash_fd: int) -> NoReturn:
    """Replaces this (just forked) process by the interpreter; ``lines`` are its standard input.

    Raises:
        OSError: it cannot be executed any more.
    """
    with tempfile.TemporaryFile() as file:  # a pipe would hold no more than 64 KiB
        file.write(lines)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.set_inheritable(report_fd, True)
    os.set_inheritable(leash_fd, True)
    folders = {
        package.__name__: str(Path(package.__path__[0]).parent)
        for package in (agentrl, agentrl_tracer)
    }
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    what = json.dumps([folders, report_fd, leash_fd])
    # -P: the bootstrap's folder is ours, not a place to import from.
    os.execve(python, [python, "-P", bootstrap, what], _without_our_path())


def _without_our_path() -> dict[str, str]:
    """The environment, but for what would lead that interpreter into ours."""
    ours = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    folders = {str(Path(package.__path__[0]).parent) for package in (agentrl, agentrl_tracer)}
    kept = [
        folder
        for folder in env.get("PYTHONPATH", "").split(os.pathsep)
        if folder and os.path.abspath(folder) not in folders
    ]
    if kept:
        env["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        env.pop("PYTHONPATH", None)
    return env
