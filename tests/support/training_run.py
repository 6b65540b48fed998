"""``agentrl train`` as a subprocess on a small task, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import until
from settings import flags
from sqlalchemy.exc import OperationalError

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Accounting, Call
from agentrl_tracer.store import Store

SUPPORT = Path(__file__).parent
HELLO = SUPPORT.parents[1] / "examples/hello/agent.py"


class Run:
    """A run of an agent of ``train_agents`` or another file (``FILE:NAME``), or a command.

    By default 2 steps of 4 groups of 4 rollouts.
    """

    def __init__(self, folder: Path, agent: str, *, task_count: int = 40, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tasks, held_out = folder / "tasks.jsonl", folder / "held_out.jsonl"
        tasks.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(task_count)))
        held_out.write_text("".join(json.dumps({"n": n}) + "\n" for n in (1000, 1001)))
        settings = {
            "tasks": tasks, "eval_tasks": held_out, "runs": folder, "name": "run",
            "batch_size": 4, "group_size": 4, "steps": 2, "runners": 2, "lease": 2,
        } | settings  # fmt: skip
        entrypoint = agent if {":", " "} & set(agent) else f"{SUPPORT / 'train_agents.py'}:{agent}"
        self.arguments = ["train", entrypoint]
        self.arguments += flags(**{k: v for k, v in settings.items() if v is not None})
        self.changes: list[str] = []
        """Flags with which it is resumed."""
        self.cores = 1
        self.folder = RunFolder(folder / "run")
        self.output = ""

    def start(self, *program: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start or resume the run, by default with ``agentrl``."""
        arguments = self.arguments
        if self.folder.config.exists():
            arguments = ["train", "--resume", str(self.folder.root), *self.changes]
        return subprocess.Popen(
            [sys.executable, *(program or ("-m", "agentrl")), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(self.cores),
                 "TEST_RUN": str(self.folder.root)}, cwd=cwd,
        )  # fmt: skip

    def finish(
        self, process: subprocess.Popen[str] | None = None, code: int = 0, timeout_s: float = 280
    ) -> Run:
        process = process or self.start()
        self.output = process.communicate(timeout=timeout_s)[0]
        assert process.returncode == code, self.output
        return self

    def kill_at(self, moment: str, step: int, by: int = signal.SIGKILL) -> None:
        """Start or resume the run, which kills itself at a moment that ``killed_at`` names.

        Nothing that it has started lives much longer.
        """
        process = self.start(str(SUPPORT / "killed_at.py"), moment, str(step), str(int(by)))
        self.finish(process, -by if by == signal.SIGKILL else 128 + by)
        until(lambda: not self.processes(), 15)

    def processes(self) -> list[str]:
        """Return the commands of the processes of this run, where the system tells."""
        mark, found = f"TEST_RUN={self.folder.root}\0".encode(), list[str]()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text())
        return found

    @property
    def run_id(self) -> str:
        return self.folder.run_id.read_text()

    def store(self) -> closing[Store]:
        return closing(Store(str(self.folder.store)))

    def accounting(self) -> Accounting:
        """Return the accounting of calls, which must balance."""
        with self.store() as store:
            verified = store.verify(self.run_id)
        assert verified.fault is None
        accounting = verified.kept
        assert accounting.pending == 0
        return accounting

    def calls(self, **which: Any) -> list[Call]:
        """Return the calls of the run's rollouts, as ``Store.rollouts`` selects them."""
        with self.store() as store:
            rollouts = store.rollouts(self.run_id, **which)
            return store.calls(rollout_ids=[rollout.id for rollout in rollouts])

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the training steps."""
        return [row for row in self.folder.read_metrics() if "reward/mean" in row]

    def curve(self) -> list[dict[str, Any]]:
        """Return the metrics that do not depend on the clock."""
        # Clocks, and what a sampler that was started again has not cached.
        clocked = ("seconds/", "tokens_per_second", "tokens/prompts")
        return [
            {name: value for name, value in row.items() if not name.startswith(clocked)}
            for row in self.folder.read_metrics()
        ]

    def weights(self) -> dict[str, bytes]:
        """Return the final adapters' files by path."""
        return {
            str(path.relative_to(self.folder.adapter)): path.read_bytes()
            for path in sorted(self.folder.adapter.rglob("*.safetensors"))
        }


def hello(folder: Path, **settings: Any) -> Run:
    """Return a run of examples/hello, long enough to solve all held-out tasks."""
    return Run(folder, f"{HELLO}:agent", **{
        "task_count": 100, "runners": 8, "rollouts_per_process": 50, "batch_size": 8,
        "group_size": 8, "steps": 12, "max_tokens": 32,
    } | settings)  # fmt: skip


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 60) -> Any:
    """Wait until ``what`` returns something while ``process`` runs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{process.communicate()[0]}")
        try:
            if found := what():
                return found
        except (FileNotFoundError, OperationalError):
            pass  # not there yet
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"waited in vain:\n{process.communicate()[0]}")


def workers(pool: int) -> list[int]:
    """Return the workers of a pool, whose process with the store is ``pool``."""
    return [worker for process in children(pool) for worker in children(process)]


def children(pid: int) -> list[int]:
    """Return the child processes of ``pid``."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    rows = [tuple(map(int, line.split())) for line in table.stdout.splitlines()]
    return [child for child, parent in rows if parent == pid]
