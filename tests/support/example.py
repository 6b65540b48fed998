"""An example of examples/, run in a short form: the real command line, fewer steps."""

from __future__ import annotations

import contextlib
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

    def train(self) -> str:
        return self.agentrl(
            "train", "--config", f"examples/{self.name}/train.toml",
            "--runs", str(self.runs), "--name", "run",
            *flags(**self.settings),
        )  # fmt: skip

    def agentrl(self, *arguments: str) -> str:
        """Run a command of agentrl; returns what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", *arguments], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=175, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def calls(self, purpose: Purpose = Purpose.TRAIN) -> list[Call]:
        with contextlib.closing(Store(str(self.folder.store))) as store:
            rollouts = store.rollouts(self.folder.run_id.read_text(), purpose=purpose)
            return store.calls(rollout_ids=[rollout.id for rollout in rollouts])

    def accounting(self) -> Accounting:
        with contextlib.closing(Store(str(self.folder.store))) as store:
            return store.accounting(self.folder.run_id.read_text())
