"""What memory the machine has free, and what a model will take of it. Does not import torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agentrl_trainer.models.sources import ModelError, resolve_model
from agentrl_trainer.names import SMOLLM2, smollm2_folder

_FLOAT32 = 4
ADAM_BYTES = 16
"""For each parameter of an adapter, in float32: itself, its gradient and two moments."""


def free_on_host() -> int:
    """Return the bytes that this process may still take; a container's limit counts."""
    free: int = psutil.virtual_memory().available
    left = left_in_container()
    return free if left is None else min(free, left)


def left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the control group of a container leaves, file cache that may go included."""
    try:
        limit, used = ((folder / f"memory.{one}").read_text().strip() for one in ("max", "current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return max(int(limit) - int(used) + int(stat.get("inactive_file", 0)), 0)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size of a model on a CPU, in float32, as its files say."""

    weights: int
    """Bytes."""
    widths: int
    """Inputs and outputs of the linear layers, summed: a LoRA has rank times as many parameters."""
    of_token: int
    """Bytes of a token's keys and values."""


def model_size(name: str) -> ModelSize | None:
    """Read a model's size from its configuration and the heads of its weight files.

    None if they are not on this machine yet, cannot be read, or are no safetensors files.
    """
    try:
        folder = _folder(name)
        files = sorted(folder.glob("*.safetensors")) if folder else []
        return _size_of(folder, files) if folder and files else None
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None  # loading the model says what is wrong with its files


def _size_of(folder: Path, files: list[Path]) -> ModelSize:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    inner = [s for name, s in shapes.items() if len(s) == 2 and "embed" not in name]
    heads = config.get("num_attention_heads") or 0
    width = config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1)
    shared = config.get("num_key_value_heads") or heads
    return ModelSize(
        weights=_FLOAT32 * sum(map(math.prod, shapes.values())),
        widths=sum(map(sum, inner)),
        of_token=2 * _FLOAT32 * shared * width * (config.get("num_hidden_layers") or 0),
    )


def _folder(name: str) -> Path | None:
    """Return where the files of a model are, those of the hub in its cache; None: not here."""
    from huggingface_hub import try_to_load_from_cache

    if name == SMOLLM2 and not smollm2_folder().is_dir():  # or it would be fetched
        return None
    try:
        source = resolve_model(name)
    except ModelError:  # which loading it says
        return None
    if Path(source).is_dir():
        return Path(source)
    found = try_to_load_from_cache(source, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _shapes(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file, from its head."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:  # such as a pointer of Git LFS
            raise ValueError(f"{file} is no safetensors file")
        head: dict[str, Any] = json.loads(opened.read(length))
    return {name: one["shape"] for name, one in head.items() if name != "__metadata__"}
