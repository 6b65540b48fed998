"""The ``agentrl`` command as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def agentrl(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentrl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env, "COLUMNS": "200"},
        check=False,
    )
