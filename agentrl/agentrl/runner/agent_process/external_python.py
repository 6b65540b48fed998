"""Check another virtual environment's interpreter, and become it: ``--python PATH``.

Agent frameworks pin their dependencies hard, and some cannot be installed beside ours. The other
environment needs OpenTelemetry, requests and wrapt, as the base install of agentrl does.
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
needed = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http", "requests", "wrapt")
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print(json.dumps([list(sys.version_info[:2]), [name for name in needed if not there(name)]]))
"""
_OLDEST = (3, 11)
_CHECK_TIMEOUT_S = 60.0


class PythonError(ValueError):
    """The ``python`` setting names no interpreter that can run agents; says why and the remedy."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"python: {path!r} {problem}")


def check_python(path: str) -> str:
    """Return the interpreter's absolute path, if it can run an attempt.

    Args:
        path: an interpreter or a virtual environment's folder. Links are kept: the interpreter of a
            virtual environment is one.

    Raises:
        PythonError: it does not run, is too old, or lacks what the agent's side needs.
    """
    found = shutil.which(path)
    if found is None and (Path(path) / "bin" / "python").is_file():
        found = str(Path(path) / "bin" / "python")
    if found is None:
        raise PythonError(path, "is no executable; give a path such as other-venv/bin/python")
    found = os.path.abspath(found)
    try:
        done = subprocess.run(
            [found, "-c", _CHECK],
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
            env=_foreign_environment(),
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
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http requests wrapt",
        )
    return found


def become(python: str, lines: bytes, report_fd: int, leash_fd: int) -> NoReturn:
    """Replace this process, just forked, by the interpreter with ``lines`` as standard input.

    Raises:
        OSError: it cannot be executed any more.
    """
    with tempfile.TemporaryFile() as file:  # a pipe would hold no more than 64 KiB
        file.write(lines)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.set_inheritable(report_fd, True)
    os.set_inheritable(leash_fd, True)
    arguments = json.dumps([_our_folders(), report_fd, leash_fd])
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    # -P: the bootstrap's folder is ours, not a place to import from.
    os.execve(python, [python, "-P", bootstrap, arguments], _foreign_environment())


def _our_folders() -> dict[str, str]:
    """Return where the packages that an attempt needs lie, by their name."""
    return {
        package.__name__: str(Path(package.__path__[0]).parent)
        for package in (agentrl, agentrl_tracer)
    }


def _foreign_environment() -> dict[str, str]:
    """Return the environment without what would lead another interpreter into our packages."""
    ours = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    folders = _our_folders().values()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in path if folder and os.path.abspath(folder) not in folders]
    if kept:
        env["PYTHONPATH"] = os.pathsep.join(kept)
    return env
