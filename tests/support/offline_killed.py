"""An ``agentrl`` command that trains on examples and kills itself in the middle of a step.

    python offline_killed.py STEP SIGNAL sft ...

The optimizer has stepped, and nothing of the step has been written.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from agentrl.__main__ import main
from agentrl.offline import run


def kill_at(step: int, number: int) -> None:
    original = run.OfflineRun.log

    def log(self: Any, at: int, row: Any) -> None:
        if at == step:
            os.kill(os.getpid(), number)
        original(self, at, row)

    setattr(run.OfflineRun, "log", log)  # noqa: B010


if __name__ == "__main__":
    kill_at(int(sys.argv[1]), int(sys.argv[2]))
    sys.argv = ["agentrl", *sys.argv[3:]]
    main()
