"""Logs of attempts that an agent tampers with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.runner.attempt_log import AttemptLog, open_log


def test_a_link_in_a_logs_place_is_not_followed(tmp_path: Path) -> None:
    """An agent may be able to write into the folder, and its runner may be root."""
    precious, log = tmp_path / "precious", tmp_path / "0-1.log"
    precious.write_text("x" * 100)
    log.symlink_to(precious)
    attempt_log = AttemptLog(str(log), limit=10)
    assert attempt_log.trim() is False
    attempt_log.close()
    with pytest.raises(OSError, match="symbolic links"):
        os.close(open_log(str(log), None))
    assert precious.read_text() == "x" * 100
