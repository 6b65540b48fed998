"""Our clients take every call that those of Tinker's SDK take, but for docs/client.md's exceptions.

The SDK is in the dev extra; AGENTRL_TEST_TINKER_PYTHON names another Python that has one.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from peer import python_with

from agentrl_trainer.client import SamplingClient, ServiceClient, TrainingClient

PYTHON = python_with("tinker", "AGENTRL_TEST_TINKER_PYTHON")
DOCS = Path(__file__).parents[2] / "docs" / "client.md"
OURS = {kind.__name__: kind for kind in (ServiceClient, TrainingClient, SamplingClient)}
# {class: {method: [[parameter, kind, has a default, its repr]]}} of the SDK.
SDK = """
import inspect, json, warnings
import tinker
warnings.simplefilter("ignore")
found = {}
for kind in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient):
    methods = {n: f for n, f in inspect.getmembers(kind) if n[0] != "_" and callable(f)}
    methods["__init__"] = kind.__init__
    found[kind.__name__] = {
        name: [
            [p.name, int(p.kind), p.default is not p.empty, repr(p.default)]
            for p in inspect.signature(inspect.unwrap(function)).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        for name, function in methods.items()
    }
del found["SamplingClient"]["__init__"], found["TrainingClient"]["__init__"]  # made by others
print(json.dumps(found))
"""

Parameter = tuple[str, int, bool, str]
KEYWORD_ONLY = int(inspect.Parameter.KEYWORD_ONLY)


def named(section: str) -> list[str]:
    """The first cells of a table of docs/client.md."""
    text = DOCS.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def ours(kind: type, method: str) -> list[Parameter]:
    return [
        (p.name, int(p.kind), p.default is not p.empty, repr(p.default))
        for p in inspect.signature(getattr(kind, method)).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]


def differences(theirs: list[Parameter], mine: list[Parameter]) -> list[str]:
    """Parameters of theirs that mine do not take in the same place with the same default, and
    parameters that only mine want."""
    positions = {p[0]: i for i, p in enumerate(mine) if p[1] != KEYWORD_ONLY}
    known = {p[0]: p for p in mine}
    found: list[str] = []
    for position, (name, kind, has_default, default) in enumerate(theirs):
        own = known.get(name)
        moved = kind != KEYWORD_ONLY and positions.get(name) != position
        if own is None or moved or (has_default and own[2:] != (True, default)):
            found.append(name)
    extra = {p[0] for p in mine if not p[2]} - {p[0] for p in theirs}
    return found + sorted(extra)


@pytest.mark.tinker
@pytest.mark.skipif(PYTHON is None, reason="no tinker here, see the top")
def test_every_parameter_of_the_sdk_is_taken(tmp_path: Path) -> None:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-c", SDK], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    theirs: Mapping[str, Mapping[str, list[Any]]] = json.loads(done.stdout)
    absent, other = [], []
    for name, methods in theirs.items():
        for method, parameters in methods.items():
            if not hasattr(OURS[name], method):
                absent.append(f"{name}.{method}")
                continue
            wanted = [tuple(parameter) for parameter in parameters]
            for odd in differences(wanted, ours(OURS[name], method)):
                other.append(f"{name}.{method}({odd})")
    assert sorted(absent) == sorted(named("Absent methods"))
    assert sorted(other) == sorted(named("Other defaults"))
    assert sum(map(len, theirs.values())) > 50


def test_a_difference_is_seen() -> None:
    def theirs(self: Any, a: int, b: int = 1, *, c: str | None = None) -> None: ...
    def more(self: Any, a: int = 0, b: int = 1, d: int = 2, *, c: str | None = None) -> None: ...
    def swapped(self: Any, b: int = 1, a: int = 0, *, c: str | None = None) -> None: ...
    def default(self: Any, a: int, b: int = 2, *, c: str | None = None) -> None: ...
    def fewer(self: Any, a: int, b: int = 1) -> None: ...
    def demanding(self: Any, a: int, b: int = 1, *, c: str | None = None, d: int) -> None: ...

    def of(function: Any) -> list[Parameter]:
        return ours(type("K", (), {"m": function}), "m")

    found = [
        differences(of(theirs), of(f)) for f in (theirs, more, swapped, default, fewer, demanding)
    ]
    assert found == [[], [], ["a", "b"], ["b"], ["c"], ["d"]]


def test_what_the_page_calls_absent_or_ours_is() -> None:
    for name in named("Absent methods"):
        kind, _, method = name.partition(".")
        assert not hasattr(OURS[kind], method)
    for kind in OURS.values():  # and every twin has its operation's parameters
        for name in dir(kind):
            if name.endswith("_async") and not name.startswith("_"):
                assert ours(kind, name) == ours(kind, name.removesuffix("_async"))
