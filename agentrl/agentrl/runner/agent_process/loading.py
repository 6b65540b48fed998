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

from agentrl.runner.agent_spec import AgentSpecError, parse_agent
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
        AgentSpecError: the module has no such thing, or it cannot be called with a task.
        Exception: whatever the user's module raises while it is imported.
    """
    parsed = parse_agent(spec)
    if parsed.kind == "command":
        name = Path(parsed.argv[0]).name
        return LoadedAgent(name, lambda task: _run_command(parsed.argv, task))
    # As Python does: first the file's folder, else the current one.
    file = Path(parsed.target).resolve() if parsed.kind == "file" else None
    folder = str(Path.cwd() if file is None else file.parent)
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    target: Any = importlib.import_module(parsed.target) if file is None else _import_file(file)
    for part in parsed.attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise AgentSpecError(spec, f"{target!r} has no attribute {part!r}") from None
    call, call_async = _calls(spec, target)

    def run(task: Json) -> Any:
        result = call(task)
        return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result

    return LoadedAgent(parsed.attribute, run, call_async)


def _import_file(path: Path) -> ModuleType:
    # Under its own name, so that pickle and its neighbors find it; unless that is taken.
    name = f"_agentrl_{path.stem}" if path.stem in sys.modules else path.stem
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _calls(
    spec: str, target: Any
) -> tuple[Callable[[Json], Any], Callable[[Json], Awaitable[Any]] | None]:
    """Return functions of the task: one for ``run``, and one for an event loop, if there is one."""

    def method(name: str, by_keyword: bool = True) -> Callable[[Json], Any] | None:
        if inspect.isroutine(target) or not callable(getattr(target, name, None)):
            return None

        def call(task: Json) -> Any:
            # A new object of a Flow or Crew class for every rollout; an object is shared.
            bound = getattr(target() if inspect.isclass(target) else target, name)
            return bound(inputs=task) if by_keyword else bound(task)

        return call

    kickoff, kickoff_async = method("kickoff"), method("kickoff_async")
    if found := kickoff or kickoff_async:
        return found, kickoff_async
    if found := method("run", by_keyword=False):
        return found, found if inspect.iscoroutinefunction(target.run) else None
    if inspect.isclass(target):
        target = target()
    if not callable(target):
        kind = type(target).__name__
        raise AgentSpecError(spec, f"it names a {kind}, which has no kickoff, run or call")
    is_async = any(map(inspect.iscoroutinefunction, (target, target.__call__)))
    call: Any = target if _takes_task(target) else lambda _task: target()  # pyright: ignore[reportUnknownLambdaType]
    return call, call if is_async else None


def _takes_task(function: Callable[..., Any]) -> bool:
    """Tell whether a required positional parameter, or one called ``task``, takes the task."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins without a signature
        return True
    first = next(
        (p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None
    )
    if first is not None and (first.default is first.empty or first.name == "task"):
        return True
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _run_command(argv: Sequence[str], task: Json) -> None:
    """Run the command with the task on its standard input, in this process group.

    A signal to the attempt's group so reaches the command, too.
    """

    def value(match: re.Match[str]) -> str:
        field = task.get(match[1], match[0])  # braces around anything but a field stay
        return field if isinstance(field, str) else json.dumps(field)

    process = subprocess.Popen(
        [_PLACEHOLDER.sub(value, word) for word in argv], stdin=subprocess.PIPE
    )
    process.communicate(json.dumps(task).encode() + b"\n")
    if code := process.returncode:
        ended = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise CommandFailed(f"the agent's command {ended}")
