"""Parse the ``agent`` setting, check it without importing the user's code, and load the agent."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from agentrl.runner.coding_tasks.task import is_coding_task, visible
from agentrl.runner.protocol import HARBOR, AttemptFailed
from agentrl_tracer.schemas import Json

_ALLOWED = (
    "allowed: 'module:function', 'path/to/file.py:function', or a command line "
    "('node agent.js', '-- ./agent.sh {question}')"
)
_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_FILE = re.compile(rf"(?P<file>.+\.py):(?P<name>{_DOTTED})")
_MODULE = re.compile(rf"(?P<module>{_DOTTED}):(?P<name>{_DOTTED})")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_LAST_WORDS_S = 1.0  # of the two seconds after which the worker kills the attempt
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class AgentSpecError(ValueError):
    """The ``agent`` setting names nothing that can be run; says what it was and what is allowed."""

    def __init__(self, spec: object, problem: str) -> None:
        super().__init__(f"agent: got {spec!r}: {problem}; {_ALLOWED}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """A parsed spec; ``target`` is a file, a module name, or empty for a command."""

    kind: Literal["file", "module", "command"]
    target: str
    attribute: str
    argv: tuple[str, ...] = ()


def parse_agent(spec: str) -> AgentSpec:
    """Parse a spec.

    Raises:
        AgentSpecError: it is none of the three kinds.
    """
    text = spec.strip()
    if not text:
        raise AgentSpecError(spec, "it is empty")
    if text.startswith(HARBOR):
        return AgentSpec("module", "agentrl.runner.coding_tasks.harbor", "run_trial")
    has_space = any(c.isspace() for c in text)
    command = text.removeprefix("-- ")
    if command == text:
        match = _FILE.fullmatch(text)
        if match and (Path(match["file"]).exists() or not has_space):
            return AgentSpec("file", match["file"], match["name"])
        if match := _MODULE.fullmatch(text):
            return AgentSpec("module", match["module"], match["name"])
        if not has_space and not shutil.which(text):
            if text.endswith(".py"):
                raise AgentSpecError(spec, f"it names no function: '{text}:NAME'{_has(Path(text))}")
            raise AgentSpecError(spec, "it is no spec, and there is no such executable")
    try:
        argv = tuple(shlex.split(command))
    except ValueError as error:
        raise AgentSpecError(spec, f"the command line does not parse ({error})") from None
    if not argv:
        raise AgentSpecError(spec, "the command line is empty")
    return AgentSpec("command", "", "", argv)


def validate_agent(spec: str, *, other_python: bool = False) -> None:
    """Check a spec as far as possible without importing the user's code.

    Args:
        other_python: another interpreter runs it, whose installed modules are not known here.

    Raises:
        AgentSpecError: a missing file, module, function or executable; a syntax error.
    """
    parsed = parse_agent(spec)
    if parsed.kind == "command":
        if not shutil.which(parsed.argv[0]):
            raise AgentSpecError(spec, f"there is no executable {parsed.argv[0]!r}")
    elif parsed.kind == "file":
        path = Path(parsed.target)
        if not path.is_file():
            raise AgentSpecError(spec, f"there is no file {path.absolute()}")
        _check_source(spec, path, parsed.attribute)
    elif not other_python:
        _check_module(spec, parsed)


def _check_module(spec: str, parsed: AgentSpec) -> None:
    """Look the module up in folders only: finding ``a.b`` by import would run ``a``."""
    top, *parts = parsed.target.split(".")
    find = importlib.machinery.PathFinder.find_spec
    found = find(top, [os.getcwd(), *sys.path])
    if found is None:
        if importlib.util.find_spec(top) is None:  # builtins, frozen, import hooks
            raise AgentSpecError(spec, f"there is no module {top!r}")
        return
    for part in parts:
        found = find(part, list(found.submodule_search_locations or ()))
        if found is None:
            raise AgentSpecError(spec, f"there is no module {parsed.target!r}")
    if found.origin and found.origin.endswith(".py"):
        _check_source(spec, Path(found.origin), parsed.attribute)


def _check_source(spec: str, path: Path, attribute: str) -> None:
    source = path.read_bytes()
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}"
        raise AgentSpecError(spec, f"syntax error in {where}: {error.msg}") from None
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    dynamic = bound & {"*", "__getattr__"} or b"globals" in source
    if attribute.partition(".")[0] not in bound and not dynamic:
        raise AgentSpecError(spec, f"{path} defines no {attribute!r}{_has(path)}")


def _has(path: Path) -> str:
    """Name what a file defines, for an error; nothing if it cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    return f" (it has {[node.name for node in body if isinstance(node, _DEFINITIONS)]})"


# ---- loading


class CommandFailed(AttemptFailed):
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


async def awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def run_once(awaitable: Awaitable[Any]) -> Any:
    """Wait for an awaitable on an event loop of its own."""
    return asyncio.run(awaited(awaitable))


def load_agent(spec: str, wait: Callable[[Awaitable[Any]], Any] = run_once) -> LoadedAgent:
    """Import the user's module (a command needs none) and wrap what the spec names.

    Args:
        wait: runs what an async agent returned to its end, in ``LoadedAgent.run``.

    Raises:
        AgentSpecError: the module has no such thing, or it cannot be called with a task.
        Exception: whatever the user's module raises while it is imported.
    """
    parsed = parse_agent(spec)
    if parsed.kind == "command":
        name = Path(parsed.argv[0]).name
        return LoadedAgent(name, lambda task: _run_command(parsed.argv, task))
    call, call_async = _calls(spec, load_target(spec, parsed))

    def run(task: Json) -> Any:
        result = call(task)
        return wait(result) if inspect.isawaitable(result) else result

    return LoadedAgent(parsed.attribute, run, call_async)


def load_target(spec: str, parsed: AgentSpec) -> Any:
    """Import the module or file of a spec, and return what it names there.

    Raises:
        AgentSpecError: the module has no such thing.
        Exception: whatever the user's module raises while it is imported.
    """
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
    return target


def _import_file(path: Path) -> ModuleType:
    # Under its own name, so that pickle and its neighbors find it; unless that is taken.
    for name in (path.stem, f"_agentrl_{path.stem}"):
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
    found: Any = importlib.util.spec_from_file_location(name, path)
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


def _run_command(argv: Sequence[str], task: Json) -> None:
    """Run the command with the task on its standard input, in this process group.

    A signal to the attempt's group so reaches the command, too, and it may clean up. A task with
    tests runs elsewhere: in a copy of its repository.
    """
    if is_coding_task(task):
        from agentrl.runner.coding_tasks.attempt import run_attempt  # which imports OpenTelemetry

        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in argv]
        run_attempt(_filled_in(words, visible(task)), task)
        return
    process = subprocess.Popen(_filled_in(argv, task), stdin=subprocess.PIPE)
    try:
        process.communicate(json.dumps(task).encode() + b"\n")
    except SystemExit:  # of SIGTERM
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        raise
    if code := process.returncode:
        ended = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise CommandFailed(f"the agent's command {ended}")


def unknown_placeholders(spec: str, tasks: Sequence[Json]) -> list[str]:
    """Return the ``{name}`` of a command that no task has a field for: they stay as they are."""
    names = [name for word in parse_agent(spec).argv for name in _PLACEHOLDER.findall(word)]
    return [name for name in dict.fromkeys(names) if not any(name in task for task in tasks)]


def _filled_in(argv: Sequence[str], task: Json) -> list[str]:
    """Return the command line with the task's values in place of ``{name}``."""

    def value(match: re.Match[str]) -> str:
        field = task.get(match[1], match[0])  # braces around anything but a field stay
        return field if isinstance(field, str) else json.dumps(field)

    return [_PLACEHOLDER.sub(value, word) for word in argv]
