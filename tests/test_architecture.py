"""The agent's side stays cheap. That imports go down, `make check` sees to (import-linter)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    loaded = set(done.stdout.split())
    assert loads in loaded
    assert not loaded & without
