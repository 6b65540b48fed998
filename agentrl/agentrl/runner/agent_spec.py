"""Parse and check the ``agent`` setting, without importing the user's code.

Imports the standard library only.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ALLOWED = (
    "allowed: 'module:function', 'path/to/file.py:function', or a command line "
    "('node agent.js', '-- ./agent.sh {question}')"
)
_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_FILE = re.compile(rf"(?P<file>.+\.py):(?P<name>{_DOTTED})")
_MODULE = re.compile(rf"(?P<module>{_DOTTED}):(?P<name>{_DOTTED})")


class AgentSpecError(ValueError):
    """The ``agent`` setting names nothing that can be run; says what it was and what is allowed."""

    def __init__(self, spec: object, problem: str) -> None:
        super().__init__(f"agent: got {spec!r}: {problem}; {_ALLOWED}")


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
                raise AgentSpecError(spec, f"it names no function; did you mean '{text}:run'?")
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
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, definitions):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    dynamic = bound & {"*", "__getattr__"} or b"globals" in source
    if attribute.partition(".")[0] not in bound and not dynamic:
        functions = [node.name for node in tree.body if isinstance(node, definitions)]
        raise AgentSpecError(spec, f"{path} defines no {attribute!r} (it has {functions})")
