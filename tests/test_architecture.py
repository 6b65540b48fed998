"""The house keeps its shape: imports go down the floors, and the agent's side stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "agentrl_tracer": ROOT / "tracer/agentrl_tracer",
    "agentrl_proxy": ROOT / "proxy/agentrl_proxy",
    "agentrl_trainer": ROOT / "trainer/agentrl_trainer",
    "agentrl": ROOT / "agentrl/agentrl",
}
MAY_IMPORT = {
    "agentrl_tracer": set(),
    "agentrl_proxy": {"agentrl_tracer"},
    "agentrl_trainer": {"agentrl_tracer"},
    "agentrl": {"agentrl_tracer", "agentrl_proxy", "agentrl_trainer"},
}


def imports_of(file: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_go_down(package: str) -> None:
    files = list(PACKAGES[package].rglob("*.py"))
    assert files
    for file in files:
        ours = imports_of(file) & set(PACKAGES) - {package}
        assert ours <= MAY_IMPORT[package], f"{file} imports {ours - MAY_IMPORT[package]}"


@pytest.mark.parametrize(
    ("package", "unknown"),
    [
        ("agentrl_tracer", {"torch", "transformers", "fastapi", "openai", "httpx"}),
        ("agentrl_proxy", {"torch", "peft"}),
        ("agentrl_trainer", {"fastapi", "uvicorn", "httpx", "requests", "starlette"}),
    ],
)
def test_floors_do_not_know(package: str, unknown: set[str]) -> None:
    for file in PACKAGES[package].rglob("*.py"):
        assert not imports_of(file) & unknown, file


HEAVY = {"torch", "litellm", "fastapi", "transformers", "sqlalchemy"}


@pytest.mark.parametrize(
    ("statement", "loads", "without"),
    [
        ("import agentrl", "agentrl", HEAVY | {"opentelemetry", "numpy"}),
        ("from agentrl import emit_reward", "opentelemetry.sdk.trace", HEAVY | {"openai"}),
        ("import agentrl.cli.main", "agentrl.cli.main", {"torch", "transformers", "fastapi"}),
    ],
)
def test_what_starts_is_cheap(statement: str, loads: str, without: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = set(done.stdout.split())
    assert loads in loaded
    assert not loaded & without
