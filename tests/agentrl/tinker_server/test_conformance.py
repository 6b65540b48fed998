"""``python -m agentrl.conformance``: our server passes; one with three faults fails by three."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
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
    done = run_python(home, "-m", "agentrl.conformance", url, "--model", "agentrl-tiny")
    return done.returncode, done.stdout.splitlines()[2:], done.stderr


def run_python(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=170, cwd=home, check=False,
        env={
            "HOME": str(home), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
    )  # fmt: skip


def test_our_own_server_does_all_of_it(shared_server: Any, tmp_path: Path) -> None:
    code, lines, said = asked(shared_server.url, tmp_path)
    assert (code, [line for line in lines if "**no**" in line]) == (0, []), said
    assert len(lines) == 19


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
        "sums the loss over requests", "gradients of two calls add up",
        "goes on from a state with its optimizer",
    ]  # fmt: skip


_PROBE = """
import sys
from agentrl_trainer.client.tinker.service import TinkerServiceClient
service = TinkerServiceClient(base_url=sys.argv[1], api_key="tml-test")
print(service.wrong_objective("agentrl-tiny", 8))
service.close()
"""


def masks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    to_row = rows.to_row

    def unmasked(datum: Any, adapter: str, loss: str | None) -> Any:
        row = to_row(datum, adapter, loss)
        if loss != "cross_entropy":
            return row
        return replace(row, advantages=[one or 1.0 for one in row.advantages])

    monkeypatch.setattr(rows, "to_row", unmasked)


def averages_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_backward = Learner.forward_backward

    def averaged(learner: Learner, rows: Any, loss: str, config: Any, *args: Any, **more: Any):
        return forward_backward(learner, rows, loss, config, len(rows), *args[1:], **more)

    monkeypatch.setattr(Learner, "forward_backward", averaged)


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda _: None, "None"),
        (masks_none, "it learns from tokens whose weight is 0"),
        (averages_requests, "it divides the loss of each request by its rows or tokens"),
    ],
)
def test_what_a_training_asks_at_its_start(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alter: Any, said: str
) -> None:
    """A server that sums is asked six times; one that does otherwise is told apart."""
    alter(monkeypatch)
    assert said in run_python(tmp_path, "-c", _PROBE, served.url).stdout
    if said == "None":
        asked = Counter(served.requests)
        # Two of them only compute log-probs.
        assert (asked["forward_backward"], asked["optim_step"]) == (5, 1)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, _, said = asked("http://127.0.0.1:9", tmp_path)
    assert code == 2
    assert "url: no server answers at http://127.0.0.1:9: " in said
