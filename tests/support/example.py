"""An example of examples/, run in a short form: the real command line, fewer steps."""

from __future__ import annotations

import os
import subprocess
import sys
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
