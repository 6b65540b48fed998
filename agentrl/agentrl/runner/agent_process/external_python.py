"""Check another virtual environment's interpreter, and become it: ``--python PATH``.

Agent frameworks pin their dependencies hard, and some cannot be installed beside ours. The other
environment needs OpenTelemetry, requests and wrapt, as the base install of agentrl does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import agentrl
import agentrl_tracer
from agentrl.runner.agent_process.confinement import sandbox_command
from agentrl.runner.protocol import RunnerConfig

# Prints what is wrong with the interpreter that runs it.
_CHECK = """
import importlib.util, sys
def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True
missing = ", ".join(filter(lacks, ["opentelemetry.sdk.trace",
                                   "opentelemetry.exporter.otlp.proto.http", "requests", "wrapt"]))
if sys.version_info < (3, 11):
    print("is Python %d.%d; agents need 3.11 or newer, or a command" % sys.version_info[:2])
elif missing:
    print("lacks %s, which the agent's side needs: %s -m pip install opentelemetry-sdk "
          "opentelemetry-exporter-otlp-proto-http requests wrapt" % (missing, sys.executable))
"""


def check_python(path: str) -> str:
    """Return the interpreter's absolute path, if it can run an attempt.

    Args:
        path: an interpreter or a virtual environment's folder. Links are kept: the interpreter of a
            virtual environment is one.

    Raises:
        ValueError: it does not run, is too old, or lacks what the agent's side needs.
    """
    found = shutil.which(path) or shutil.which(Path(path) / "bin" / "python")
    if found is None:
        raise ValueError(
            f"python: {path!r} is no executable; give a path such as other-venv/bin/python"
        )
    found = os.path.abspath(found)
    try:
        command, env = [found, "-c", _CHECK], _other_environment()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True, env=env
        )
    except (OSError, subprocess.SubprocessError):
        raise ValueError(f"python: {path!r} does not run Python code") from None
    if problem := done.stdout.strip():
        raise ValueError(f"python: {path!r} {problem}")
    return found


def become(config: RunnerConfig, worker_fd: int) -> NoReturn:
    """Replace this process, just forked, by the interpreter, and run attempts there.

    The worker sends the configuration first.

    Raises:
        OSError: it cannot be executed any more.
    """
    python = config.python or sys.executable
    os.set_inheritable(worker_fd, True)
    arguments = json.dumps([_our_folders(), worker_fd])
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    # -P: the bootstrap's folder is ours, not a place to import from.
    command = [python, "-P", bootstrap, arguments]
    if config.sandbox:
        command = [*sandbox_command(config), *command]
    os.execvpe(command[0], command, _other_environment())


def _our_folders() -> dict[str, str]:
    """Return where the packages that an attempt needs lie, by their name."""
    return {
        package.__name__: str(Path(package.__path__[0]).parent)
        for package in (agentrl, agentrl_tracer)
    }


def _other_environment() -> dict[str, str]:
    """Return the environment without what would lead another interpreter into our packages."""
    ours = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    folders = _our_folders().values()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in path if folder and os.path.abspath(folder) not in folders]
    if kept:
        env["PYTHONPATH"] = os.pathsep.join(kept)
    return env
