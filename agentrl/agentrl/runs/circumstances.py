"""What surrounds a run: versions, machine, how many steps it plans, and why it failed."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from importlib import metadata

from agentrl import __version__
from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import Json

_PACKAGES = ("torch", "transformers", "peft", "vllm", "tinker", "litellm", "openai", "crewai",
             "langgraph", "ray", "verl")  # fmt: skip
_STARTED, _FAILED = "started.json", "failed.json"


def note_start(folder: RunFolder, steps: int | None = None) -> None:
    """Write ``started.json`` when a run starts or resumes; forget how it ended before.

    Args:
        steps: that it plans; None: it has none, as an evaluation.
    """
    versions = {"agentrl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    machine = {"host": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()}
    folder.write_json(
        folder.root / _STARTED,
        {"at": time.time(), "steps": steps, "versions": versions, "machine": machine},
    )
    for path in (folder.root / _FAILED, folder.pruned, folder.summary):
        path.unlink(missing_ok=True)


def note_failure(folder: RunFolder, error: BaseException) -> None:
    """Write ``failed.json``: the error that ends the run."""
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    folder.write_json(folder.root / _FAILED, {"at": time.time(), "why": said})


def circumstances(folder: RunFolder) -> Json:
    """Return ``at``, ``steps``, ``versions`` and ``machine`` as far as they were written."""
    return _read(folder, _STARTED)


def why_failed(folder: RunFolder) -> str | None:
    """Return the error that ended the run; None if it did not fail, or an earlier version ran."""
    return _read(folder, _FAILED).get("why")


def _read(folder: RunFolder, name: str) -> Json:
    try:
        return json.loads((folder.root / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
