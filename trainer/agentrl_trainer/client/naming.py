"""What things are called on disk, whichever backend saves them.

<folder>/<client>/weights/<name>          what ``save_state`` writes
<folder>/<client>/sampler_weights/<name>  what ``save_weights_for_sampler`` writes
<folder>/<client>/metrics.jsonl           what ``log`` is given

A folder of sampler weights that are on Tinker holds nothing but POINTER: their ``path`` there, and
the path of the newest ``state`` before them, which Tinker lets one download.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

STATES, SAMPLERS = "weights", "sampler_weights"
POINTER = "tinker.json"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def check_name(name: str) -> None:
    """Raises ValueError for a name that is not fit for a folder."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name: {name!r} must be letters, digits, '-', '_' and '.'")


def new_folder(kind: str) -> Path:
    """Below ``runs/``, named by the time; nothing is made yet."""
    return Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
