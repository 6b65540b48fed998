"""What clients save: names on disk, and states.

<folder>/<client>/weights/<name>          states, from ``save_state``
<folder>/<client>/sampler_weights/<name>  adapters, from ``save_weights_for_sampler``
<folder>/<client>/metrics.jsonl           metrics, from ``log``

If the weights are on Tinker, an adapter's folder holds only POINTER: their ``path`` there, and the
path of the newest ``state`` before them, which Tinker offers for download.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from torch import Tensor

from agentrl_trainer.checkpoint import Checkpoint, latest_checkpoint

STATES, SAMPLERS = "weights", "sampler_weights"
POINTER = "tinker.json"


def folder_of(given: str | Path | None, kind: str) -> Path:
    """Return a service's folder, by default one below ``runs/`` named by the time."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Path("runs") / f"{kind}-{stamp}" if given is None else Path(given)


def read_state(path: str | Path) -> Checkpoint:
    """Read what ``save_state`` wrote; ValueError if there is no whole state at ``path``."""
    latest = latest_checkpoint(path)
    if latest.checkpoint is None:
        why = "; ".join(f"{folder.name}: {fault}" for folder, fault in latest.torn.items())
        raise ValueError(
            f"path: {path} holds no whole state{f' ({why})' if why else ''}; give what save_state "
            "returned"
        )
    return latest.checkpoint


def tensors_of(state: Checkpoint, name: str, *, optimizer: bool) -> dict[str, Tensor]:
    """Return a state's tensors for the adapter ``name``, whatever its name was.

    Keys are ``kind/owner/key``; an owner is an adapter, or its value function ``value.<adapter>``.
    """
    found: dict[str, Tensor] = {}
    for whole, tensor in state.tensors.items():
        kind, owner, key = whole.split("/", 2)
        part, dot, adapter = owner.rpartition(".")  # an adapter's name has no dot
        if adapter == state.meta["adapter"] and (optimizer or kind == "weights"):
            found[f"{kind}/{part}{dot}{name}/{key}"] = tensor
    return found
