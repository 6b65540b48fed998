"""docs/devices.md lists every branch of the code on the type of a device, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w/]+\.py)` `([\w.]+)` \|(.*)\|([^|]*)\|$", re.M)
PACKAGES = [
    "agentrl/agentrl",
    "proxy/agentrl_proxy",
    "trainer/agentrl_trainer",
    "tracer/agentrl_tracer",
]


def names_a_device(node: ast.AST) -> bool:
    """Tell whether an expression names CUDA or MPS, or compares something with the CPU."""
    match node:
        case ast.Constant(value=str(text)):
            known = text in ("cuda", "mps", "CUDA_VISIBLE_DEVICES", "num_gpus")
            return known or text.startswith(("cuda:", "mps:"))
        case ast.keyword(arg="num_gpus"):
            return True
        case ast.Attribute(attr=("cuda" | "mps" | "is_cuda" | "is_mps" | "is_cpu")):
            return True
        case ast.Compare():
            return any(isinstance(x, ast.Constant) and x.value == "cpu" for x in node.comparators)
        case _:
            return False


def branches(tree: ast.AST, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the qualified name of the function around each such expression."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from branches(node, (*path, node.name))
            continue
        if names_a_device(node):
            yield ".".join(path)
        yield from branches(node, path)


def in_code() -> set[tuple[str, str]]:
    return {
        (str(file.relative_to(ROOT)), name)
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for name in branches(ast.parse(file.read_text(encoding="utf-8")))
    }


def test_the_page_lists_every_branch() -> None:
    listed = {(file, name) for file, name, *_ in ROW.findall(PAGE)}
    found = in_code()
    assert len(found) > 10
    assert found - listed == set(), "add these branches to docs/devices.md"
    assert listed - found == set(), "docs/devices.md lists branches that are gone"


@pytest.mark.parametrize("row", ROW.findall(PAGE), ids=lambda row: row[1])
def test_each_branch_names_its_test(row: tuple[str, ...]) -> None:
    tested = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])
    for file, test in tested:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"
    assert tested or "never run" in row[3]
