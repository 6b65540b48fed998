"""Names on disk of what clients save.

<folder>/<client>/weights/<name>          states, from ``save_state``
<folder>/<client>/sampler_weights/<name>  adapters, from ``save_weights_for_sampler``
<folder>/<client>/metrics.jsonl           metrics, from ``log``

If the weights are on Tinker, an adapter's folder holds only POINTER: their ``path`` there, and the
path of the newest ``state`` before them, which Tinker offers for download.
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
    """Raise ValueError for a name that cannot name a folder."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name: {name!r} must be letters, digits, '-', '_' and '.'")


def new_folder(kind: str) -> Path:
    """Return a path below ``runs/`` named by the time; does not create it."""
    return Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
