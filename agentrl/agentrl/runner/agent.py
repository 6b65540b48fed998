"""What the user calls an agent: reading its spec, checking it early, loading it, calling it.

Knows functions, objects and command lines. Does not know rollouts, the gateway or OpenTelemetry;
imports nothing outside the standard library until ``load_agent`` imports the user's module.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
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

from agentrl_tracer.schemas import Json

_ALLOWED = (
    "allowed: 'module:function', 'path/to/file.py:function', or a command line "
    "('node agent.js', '-- ./agent.sh {question}')"
)
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)")
_MODULE = re.compile(
    r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)"
)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class AgentSpecError(ValueError):
    """The ``agent`` setting names nothing that can be run; says what it was and what is allowed."""

    def __init__(self, spec: object, problem: str) -> None:
        super().__init__(f"agent: got {spec!r}: {problem}; {_ALLOWED}")


class CommandFailed(RuntimeError):
    """The agent's command ended with another exit code than 0."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent ready to run. ``run(task)`` returns what it returned, coroutines already awaited."""

    name: str
    run: Callable[[Json], Any]
    run_async: Callable[[Json], Awaitable[Any]] | None = None
    """The same for a running event loop; None if the agent would block it."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """A spec taken apart; ``target`` is a file, a module name, or empty for a command."""

    kind: Literal["file", "module", "command"]
    target: str
    attribute: str
    argv: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """What Python would put first on ``sys.path``: the file's folder, else the current one."""
        return Path(self.target).resolve().parent if self.kind == "file" else Path.cwd()


def parse_agent(spec: str) -> AgentSpec:
    """
    Raises:
        AgentSpecError: it is none of the three kinds.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise AgentSpecError(spec, "it is empty")
    text = spec.strip()
    if text.startswith("-- "):
        return _command(spec, text[3:])
    match = _FILE.fullmatch(text)
    if match and (Path(match["file"]).exists() or not any(c.isspace() for c in text)):
        return AgentSpec("file", match["file"], match["name"])
    match = _MODULE.fullmatch(text)
    if match:
        return AgentSpec("module", match["module"], match["name"])
    if any(c.isspace() for c in text) or _executable(text):
        return _command(spec, text)
    if text.endswith(".py"):
        raise AgentSpecError(spec, f"it names no function; did you mean '{text}:run'?")
    raise AgentSpecError(spec, "it is no spec, and there is no such executable")


def validate_agent(spec: str, python_path: Sequence[str] = (), *, elsewhere: bool = False) -> None:
    """Checks a spec as far as possible without importing anything of the user's.

    ``elsewhere``: another interpreter runs it, whose installed modules we do not know.

    Raises:
        AgentSpecError: a missing file, module, function or executable; a syntax error.
    """
    parsed = parse_agent(spec)
    if parsed.kind == "command":
        if not _executable(parsed.argv[0]):
            raise AgentSpecError(spec, f"there is no executable {parsed.argv[0]!r}")
    elif parsed.kind == "file":
        path = Path(parsed.target)
        if not path.is_file():
            raise AgentSpecError(spec, f"there is no file {path.absolute()}")
        _check_source(spec, path, parsed.attribute)
    elif not elsewhere:
        _check_module(spec, parsed, python_path)


def load_agent(spec: str, python_path: Sequence[str] = ()) -> Agent:
    """Imports the user's module (a command needs none) and wraps what the spec names.

    Raises:
        AgentSpecError: there is no such thing, or it cannot be called with a task.
        Exception: whatever the user's module raises while it is imported.
    """
    parsed = parse_agent(spec)
    if parsed.kind == "command":
        name = Path(parsed.argv[0]).name
        return Agent(name, lambda task: _run_command(parsed.argv, task))
    for folder in reversed([str(parsed.folder), *python_path]):
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
    return _as_agent(spec, parsed.attribute, target)


def _as_agent(spec: str, name: str, target: Any) -> Agent:
    call, is_async = _as_call(spec, target)

    def run(task: Json) -> Any:
        result = call(task)
        return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result

    if _has(target, "kickoff_async"):
        return Agent(name, run, lambda task: _made(target).kickoff_async(inputs=task))
    return Agent(name, run, call if is_async else None)


def _as_call(spec: str, target: Any) -> tuple[Callable[[Json], Any], bool]:
    """A function of the task, and whether it returns a coroutine at once."""
    if _has(target, "kickoff"):
        return lambda task: _made(target).kickoff(inputs=task), False
    if _has(target, "kickoff_async"):
        return lambda task: _made(target).kickoff_async(inputs=task), True
    if _has(target, "run"):
        return lambda task: _made(target).run(task), inspect.iscoroutinefunction(target.run)
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


def _made(target: Any) -> Any:
    """A Flow or Crew class gives every rollout an object of its own; an object is what it is."""
    return target() if inspect.isclass(target) else target


def _takes_task(function: Callable[..., Any]) -> bool:
    """A required positional parameter, or an optional one called ``task``, takes the task."""
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


def _import(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise AgentSpecError(spec, f"there is no module {error.name!r}") from None
        raise  # the user's module exists; something that it imports does not


def _import_file(spec: str, parsed: AgentSpec) -> ModuleType:
    path = Path(parsed.target).resolve()
    loaded = sys.modules.get(path.stem)
    # Under its own name, so that pickle and its neighbours find it; unless that is taken.
    name = path.stem if loaded is None else f"_agentrl_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None or not path.is_file():
        raise AgentSpecError(spec, f"there is no file {path}")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _run_command(argv: Sequence[str], task: Json) -> None:
    """Runs the command with the task on its standard input; output goes where ours goes.

    It stays in our process group, so whoever kills the attempt kills it too.
    """
    process = subprocess.Popen([_filled(word, task) for word in argv], stdin=subprocess.PIPE)
    process.communicate(json.dumps(task).encode() + b"\n")
    code = process.returncode
    if code < 0:
        raise CommandFailed(f"the agent's command was killed by signal {-code}")
    if code > 0:
        raise CommandFailed(f"the agent's command exited with code {code}")


def _filled(word: str, task: Json) -> str:
    """``{field}`` becomes the task's field; braces around anything else stay as they are."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in task:
            return match[0]
        field = task[match[1]]
        return field if isinstance(field, str) else json.dumps(field)

    return _PLACEHOLDER.sub(value, word)


def _command(spec: str, text: str) -> AgentSpec:
    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise AgentSpecError(spec, f"the command line does not parse ({error})") from None
    if not argv:
        raise AgentSpecError(spec, "the command line is empty")
    return AgentSpec("command", "", "", argv)


def _executable(word: str) -> bool:
    return shutil.which(word) is not None


def _check_module(spec: str, parsed: AgentSpec, python_path: Sequence[str]) -> None:
    """Looks the module up through folders only: finding ``a.b`` by import would run ``a``."""
    top, _, rest = parsed.target.partition(".")
    search = [*python_path, os.getcwd(), *sys.path]
    found = importlib.machinery.PathFinder.find_spec(top, search)
    if found is None:
        if importlib.util.find_spec(top) is None:  # builtins, frozen, import hooks
            raise AgentSpecError(spec, f"there is no module {top!r}")
        return
    for part in rest.split(".") if rest else ():
        places = list(found.submodule_search_locations or ())
        found = importlib.machinery.PathFinder.find_spec(part, places)
        if found is None:
            raise AgentSpecError(spec, f"there is no module {parsed.target!r}")
    if found.origin and found.origin.endswith(".py"):
        _check_source(spec, Path(found.origin), parsed.attribute)


def _check_source(spec: str, path: Path, attribute: str) -> None:
    """The source must parse and bind the name at its top level."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}"
        raise AgentSpecError(spec, f"syntax error in {where}: {error.msg}") from None
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    dynamic = bound & {"*", "__getattr__"} or "globals" in path.read_text(errors="replace")
    if attribute.partition(".")[0] not in bound and not dynamic:
        functions = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        raise AgentSpecError(spec, f"{path} defines no {attribute!r} (it has {functions})")
