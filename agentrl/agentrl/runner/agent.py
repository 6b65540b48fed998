"""What an agent is: a Python function, an object with a method, or a command line.

``module:function``, ``file.py:function`` (dotted attributes too) and ``any command --with {field}``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_tracer.schemas import Json

_PYTHON = re.compile(r"^(?P<home>[^\s:]+):(?P<name>[A-Za-z_][\w.]*)$")
_ALLOWED = "give module:function, file.py:function, or a command line"

Agent = Callable[[Json], Any]
"""Runs one task; what it returns may be the reward."""


class AgentExit(Exception):
    """A command-line agent ended with an exit code other than 0."""


def validate_agent(spec: str) -> None:
    """Refuses what cannot be an agent, without importing it.

    Raises:
        ValueError: names the field, what it got and what is allowed.
    """
    if match := _PYTHON.match(spec):
        home = match["home"]
        if home.endswith(".py"):
            if not Path(home).is_file():
                raise ValueError(f"agent: {spec!r}: there is no file {home!r} here; {_ALLOWED}")
        elif _find_module(home) is None:
            raise ValueError(
                f"agent: {spec!r}: there is no module {home!r} (looked in {Path.cwd()} too); "
                f"{_ALLOWED}"
            )
        return
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise ValueError(f"agent: {spec!r} is no command line: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"agent: {spec!r} is neither a Python function nor a command found here; {_ALLOWED}"
        )


def load_agent(spec: str) -> Agent:
    """Imports the agent.

    Raises:
        ValueError: there is no such function.
        Exception: whatever importing the user's module raises.
    """
    match = _PYTHON.match(spec)
    if match is None:
        return lambda task: _run_command(spec, task)
    target: Any = _import(match["home"])
    for name in match["name"].split("."):
        if not hasattr(target, name):
            raise ValueError(f"agent: {spec!r}: {target!r} has no {name!r}")
        target = getattr(target, name)
    return lambda task: _run_python(target, task)


def _find_module(name: str) -> Any:
    _look_here()
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _look_here() -> None:
    """The working directory is importable, as under ``python -m``."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _import(home: str) -> Any:
    if not home.endswith(".py"):
        _look_here()
        return importlib.import_module(home)
    path = Path(home).resolve()
    sys.path.insert(0, str(path.parent))  # its neighbours are importable, as under `python file.py`
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"agent: {home!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def _run_python(target: Any, task: Json) -> Any:
    if hasattr(target, "kickoff"):  # CrewAI's crews and flows
        result = target.kickoff(inputs=task)
    elif not callable(target) and hasattr(target, "run"):
        result = target.run(task)
    elif callable(target):
        result = target(task) if _takes_a_task(target) else target()
    else:
        raise ValueError(f"agent: {target!r} is neither callable nor has it run or kickoff")
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


def _takes_a_task(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)


async def _awaited(result: Any) -> Any:
    return await result


def _run_command(spec: str, task: Json) -> None:
    """The task goes to standard input and into ``{field}`` placeholders."""

    def fill(match: re.Match[str]) -> str:
        value = task.get(match[1], match[0])
        return value if isinstance(value, str) else json.dumps(value)

    # Split first: a value with spaces or quotes in it stays one argument, and no shell sees it.
    words = [re.sub(r"\{(\w+)\}", fill, word) for word in shlex.split(spec)]
    done = subprocess.run(words, input=json.dumps(task).encode(), check=False)
    if done.returncode != 0:
        raise AgentExit(f"{words[0]} ended with exit code {done.returncode}")
