"""The ``agentrl`` command as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def agentrl(
    *arguments: object, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentrl", *map(str, arguments)],
        capture_output=True, text=True, timeout=175, check=False, cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **env},
    )  # fmt: skip
