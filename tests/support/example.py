"""An example of examples/, run in a short form: the real command line, fewer steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from settings import flags

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Accounting, Call, Purpose
from agentrl_tracer.store import Store

ROOT = Path(__file__).parents[2]


@dataclass
class Example:
    """``agentrl train --config examples/NAME/train.toml``, some of it replaced by ``settings``."""

    name: str
    runs: Path
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    run: str = "run"

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.runs / self.run)

    def start(self) -> subprocess.Popen[str]:
        return self.agentrl(
            "train", "--config", f"examples/{self.name}/train.toml",
            "--runs", str(self.runs), "--name", "run",
            *flags(**self.settings),
        )  # fmt: skip

    def agentrl(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "agentrl", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def train(self) -> str:
        return finish(self.start())

    def kill_after(self, step: int) -> None:
        """Starts it, and kills it with all that it started once a step is checkpointed."""
        process = self.start()
        checkpoint = self.folder.checkpoints / f"step-{step:08d}"
        deadline = time.monotonic() + 150
        while not checkpoint.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def resume(self) -> str:
        return finish(self.agentrl("train", "--resume", str(self.folder.root)))

    def curve(self) -> list[dict[str, Any]]:
        """What the run decided, without what the clock did."""
        clocked = ("seconds/", "tokens_per_second")
        return [
            {name: value for name, value in row.items() if not name.startswith(clocked)}
            for row in self.folder.read_metrics()
        ]

    def calls(self, purpose: Purpose = Purpose.TRAIN) -> list[Call]:
        store = Store(str(self.folder.store))
        rollouts = store.rollouts(self.folder.run_id.read_text(), purpose=purpose)
        calls = store.calls(rollout_ids=[rollout.id for rollout in rollouts])
        store.close()
        return calls

    def accounting(self) -> Accounting:
        store = Store(str(self.folder.store))
        accounting = store.accounting(self.folder.run_id.read_text())
        store.close()
        return accounting


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=175)[0]
    assert process.returncode == 0, output
    return output
