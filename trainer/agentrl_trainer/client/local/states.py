"""What ``save_state`` wrote, read again, and given to a client of another name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from agentrl_trainer.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint


def read_state(path: str) -> Checkpoint:
    latest = latest_checkpoint(path)
    if latest.folder is None:
        why = "; ".join(f"{folder.name}: {fault}" for folder, fault in latest.torn.items())
        raise ValueError(
            f"path: {path} holds no whole state{f' ({why})' if why else ''}; give what save_state "
            "returned"
        )
    return load_checkpoint(latest.folder)


def renamed(state: Mapping[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """``kind/owner/key`` of another adapter and its value function (``value.<adapter>``)."""
    found: dict[str, Tensor] = {}
    for whole, tensor in state.items():
        kind, owner, key = whole.split("/", 2)
        part, dot, adapter = owner.rpartition(".")  # no adapter's name has a dot
        if adapter == before:
            found[f"{kind}/{part}{dot}{after}/{key}"] = tensor
    return found
