"""Parse a task with tests: a repository, an instruction, hidden files and a test command."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, cast

from agentrl_tracer.schemas import Json

SECRET = ("repository", "ref", "hidden", "test", "shaping", "limits", "sandbox")
"""Keys that the agent is not shown."""
Files = str | dict[str, str]
"""A folder, git URL or archive; or the files themselves, by path."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the agent's command may use."""

    seconds: float | None = None
    """Wall time of the command; by default the attempt's own timeout is the only one."""
    test_seconds: float = 120.0
    """Wall time of the test command."""
    cpu_seconds: float | None = None
    """CPU time of each process."""
    memory_mb: float | None = None
    """Writable memory of each process, in MiB."""
    network: bool = False
    """Let the command reach the network; by default it reaches the gateway alone."""


@dataclass(frozen=True, slots=True)
class CodingTask:
    repository: Files
    instruction: str
    test: str
    """Shell command, run in the agent's copy after the hidden files were put in."""
    hidden: Files | None = None
    ref: str | None = None
    """Commit, branch or tag of a git URL."""
    limits: Limits = field(default_factory=Limits)
    shaping: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards besides the share of tests that passed: ``all`` (if every test passed), ``changed``
    (if the agent changed a file)."""
    sandbox: bool = True
    """Run the command and the tests in bubblewrap."""


def is_coding_task(task: Json) -> bool:
    """Return whether a task of a command has tests: the keys ``repository`` and ``test``."""
    return "repository" in task and "test" in task


def visible(task: Json) -> Json:
    """Return what the agent may know of a task."""
    return {name: value for name, value in task.items() if name not in SECRET}


def parse_task(task: Json) -> CodingTask:
    """Parse a task with tests; keys of the user's own are left alone.

    Raises:
        ValueError: names the key and what it must be.
    """
    for name in ("instruction", "test"):
        if not isinstance(task.get(name), str) or not task[name].strip():
            raise ValueError(f"{name}: a task with tests needs a text here")
    if not isinstance(task.get("ref", ""), str):
        raise ValueError("ref: give a commit, branch or tag")
    if not isinstance(task.get("sandbox", True), bool):
        raise ValueError("sandbox: give true or false")
    for name in ("repository", "hidden"):
        if name in task:
            _check_files(name, task[name])
    shaping = task.get("shaping", {})
    if not isinstance(shaping, dict) or not shaping.keys() <= {"all", "changed"}:
        raise ValueError('shaping: give an object of "all" and "changed", such as {"all": 0.5}')
    for name, value in cast(Json, shaping).items():
        _check_number(f"shaping.{name}", value)
    known = {one.name for one in fields(CodingTask)}
    given: Json = {name: value for name, value in task.items() if name in known}
    given["limits"] = _limits(task.get("limits", {}))
    return CodingTask(**given)


def _limits(given: Any) -> Limits:
    known = [one.name for one in fields(Limits)]
    if not isinstance(given, dict) or not given.keys() <= set(known):
        raise ValueError(f"limits: give an object of {', '.join(known)}")
    for name, value in cast(Json, given).items():
        if name == "network":
            if not isinstance(value, bool):
                raise ValueError("limits.network: give true or false")
        elif _check_number(f"limits.{name}", value) <= 0:
            raise ValueError(f"limits.{name}: give a number above 0")
    return Limits(**given)


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: give a number")
    return value


def _check_files(name: str, given: Any) -> None:
    if isinstance(given, str) and given:
        is_folder = name == "repository" or Path(given).is_dir()
        if not is_folder:
            raise ValueError(f"{name}: there is no folder {given!r}")
        return
    if not isinstance(given, dict) or not given:
        raise ValueError(f'{name}: give a path, or files such as {{"a.py": "print(1)"}}')
    for path, content in cast(Json, given).items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or not isinstance(content, str):
            raise ValueError(f"{name}: {path!r} must be a path inside, and its content a text")
