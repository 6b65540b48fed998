"""A process that trains a run of a trial: ``agentrl train``, which ends when its sweep is gone."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.process_privacy import open_private
from agentrl.runs.folder import RunFolder
from agentrl.supervisor import end_with_parent


def start_training(
    run: RunFolder, config: Path, seed: int, log: Path, job: Mapping[str, Any] | None = None
) -> subprocess.Popen[bytes]:
    """Start a run with the settings in the file ``config``, or continue it.

    Args:
        job: what the training as a Ray job needs; None trains on this machine.
    """
    if run.exists():
        told = ["--resume", str(run.root)]
    else:
        told = ["--config", str(config), "--name", run.name, "--runs", str(run.root.parent)]
        told += ["--seed", str(seed)]
    run.pruned.unlink(missing_ok=True)
    if job is not None:
        job = {**job, "log": str(log)}
        return start("agentrl.sweep.ray_job", [json.dumps(job), "train", *told], log)
    return start("agentrl.sweep.process", ["train", *told], log)


def start(
    module: str,
    told: list[str],
    log: Path,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a module whose process ends with this one and writes into ``log``."""
    with open_private(log) as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *told],
            stdin=subprocess.PIPE,  # it ends when this end closes
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches the sweep only
            cwd=folder,
            env=environment,
        )


def why_failed(code: int, log: Path) -> str:
    """Say why a process failed; empty if it did not, or a signal ended it."""
    if not 0 < code < 128:
        return ""
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("error: ")]
    return said[-1] if said else f"its run failed; see {log}"


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("agentrl", run_name="__main__", alter_sys=True)
