"""``python -m agentrl.conformance``: our server passes; one with three faults fails by three."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

from agentrl_trainer.client import TrainingClient, rows
from agentrl_trainer.learner.learner import Learner

pytestmark = pytest.mark.tinker


def asked(url: str, home: Path) -> tuple[int, list[str], str]:
    """Exit code, the lines of the table, and what was said on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.conformance", url, "--model", "agentrl-tiny"],
        capture_output=True, text=True, timeout=170, cwd=home, check=False,
        env={"HOME": str(home), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"},
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()[2:], done.stderr


def test_our_own_server_does_all_of_it(shared_server: Any, tmp_path: Path) -> None:
    code, lines, said = asked(shared_server.url, tmp_path)
    assert (code, [line for line in lines if "**no**" in line]) == (0, []), said
    assert len(lines) == 17


def test_what_a_server_does_otherwise_is_found(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It averages over a row's tokens, keeps the last call's gradient only, forgets moments."""
    to_row, forward_backward = rows.to_row, Learner.forward_backward

    def averaged(*args: Any) -> Any:
        row = to_row(*args)
        return replace(row, advantages=[one / max(row.trained, 1) for one in row.advantages])

    def alone(learner: Learner, rows: Any, *args: Any, **options: Any) -> Any:
        learner.discard_gradients({row.adapter for row in rows})
        return forward_backward(learner, rows, *args, **options)

    monkeypatch.setattr(rows, "to_row", averaged)
    monkeypatch.setattr(Learner, "forward_backward", alone)
    monkeypatch.setattr(TrainingClient, "load_state_with_optimizer", TrainingClient.load_state)
    code, lines, said = asked(served.url, tmp_path)
    assert code == 1
    assert "agentrl cannot train over it: sums the loss over tokens" in said
    wrong = [line for line in lines if "**no**" in line]
    assert "it divides the loss of each row by the row's tokens" in wrong[0]
    assert [line.split("|")[1].strip() for line in wrong[1:]] == [
        "gradients of two calls add up", "goes on from a state with its optimizer",
    ]  # fmt: skip


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, _, said = asked("http://127.0.0.1:9", tmp_path)
    assert code == 2
    assert "url: no server answers at http://127.0.0.1:9: " in said
