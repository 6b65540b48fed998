"""Import an agent and wrap it as a function of its task."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.runner.agent_spec import AgentSpec, AgentSpecError, parse_agent
from agentrl_tracer.schemas import Json

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class CommandFailed(RuntimeError):
    """The agent's command ended with another exit code than 0."""


@dataclass(frozen=True, slots=True)
class LoadedAgent:
    """An agent ready to run.

    Attributes:
        run: returns what the agent returned, coroutines already awaited.
        run_async: the same for a running event loop; None if the agent would block it.
    """

    name: str
    run: Callable[[Json], Any]
    run_async: Callable[[Json], Awaitable[Any]] | None = None


def load_agent(spec: str) -> LoadedAgent:
    """Import the user's module (a command needs none) and wrap what the spec names.

    Raises:
        AgentSpecError: there is no such thing, or it cannot be called with a task.
        Exception: whatever the user's module raises while it is imported.
    """
    parsed = parse_agent(spec)
    if parsed.kind == "command":
        name = Path(parsed.argv[0]).name
        return LoadedAgent(name, lambda task: _run_command(parsed.argv, task))
    folder = str(parsed.folder)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    module = _import_file(spec, parsed) if parsed.kind == "file" else _import(spec, parsed.target)
    target: Any = module
    for part in parsed.attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise AgentSpecError(spec, f"{target!r} has no attribute {part!r}") from None
    return _wrap(spec, parsed.attribute, target)


def _import(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise AgentSpecError(spec, f"there is no module {error.name!r}") from None
        raise  # the user's module exists; something that it imports does not


def _import_file(spec: str, parsed: AgentSpec) -> ModuleType:
    path = Path(parsed.target).resolve()
    # Under its own name, so that pickle and its neighbors find it; unless that is taken.
    name = f"_agentrl_{path.stem}" if path.stem in sys.modules else path.stem
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None or not path.is_file():
        raise AgentSpecError(spec, f"there is no file {path}")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _wrap(spec: str, name: str, target: Any) -> LoadedAgent:
    call, is_async = _as_call(spec, target)

    def run(task: Json) -> Any:
        result = call(task)
        return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result

    if _has(target, "kickoff_async"):
        return LoadedAgent(name, run, lambda task: _instance(target).kickoff_async(inputs=task))
    return LoadedAgent(name, run, call if is_async else None)


def _as_call(spec: str, target: Any) -> tuple[Callable[[Json], Any], bool]:
    """Return a function of the task, and whether it returns a coroutine at once."""
    if _has(target, "kickoff"):
        return lambda task: _instance(target).kickoff(inputs=task), False
    if _has(target, "kickoff_async"):
        return lambda task: _instance(target).kickoff_async(inputs=task), True
    if _has(target, "run"):
        return lambda task: _instance(target).run(task), inspect.iscoroutinefunction(target.run)
    if inspect.isclass(target):
        target = target()
    if not callable(target):
        kind = type(target).__name__
        raise AgentSpecError(spec, f"it names a {kind}, which has no kickoff, run or call")
    is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        getattr(target, "__call__", None)  # noqa: B004
    )
    return (target if _takes_task(target) else lambda _task: target()), is_async


def _has(target: Any, method: str) -> bool:
    return not inspect.isroutine(target) and callable(getattr(target, method, None))


def _instance(target: Any) -> Any:
    """Return a new object of a Flow or Crew class for every rollout; an object is shared."""
    return target() if inspect.isclass(target) else target


def _takes_task(function: Callable[..., Any]) -> bool:
    """Tell whether a required positional parameter, or one called ``task``, takes the task."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional and (positional[0].default is inspect.Parameter.empty):
        return True
    if positional and positional[0].name == "task":
        return True
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _run_command(argv: Sequence[str], task: Json) -> None:
    """Run the command with the task on its standard input, in this process group.

    A signal to the attempt's group so reaches the command, too.
    """
    process = subprocess.Popen([_fill(word, task) for word in argv], stdin=subprocess.PIPE)
    process.communicate(json.dumps(task).encode() + b"\n")
    code = process.returncode
    if code < 0:
        raise CommandFailed(f"the agent's command was killed by signal {-code}")
    if code > 0:
        raise CommandFailed(f"the agent's command exited with code {code}")


def _fill(word: str, task: Json) -> str:
    """Replace ``{field}`` by the task's field; braces around anything else stay."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in task:
            return match[0]
        field = task[match[1]]
        return field if isinstance(field, str) else json.dumps(field)

    return _PLACEHOLDER.sub(value, word)
