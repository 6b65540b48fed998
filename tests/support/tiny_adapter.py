"""Adapters of the model that ships, as training leaves them."""

from __future__ import annotations

from pathlib import Path

import torch

from agentrl.runs.folder import RunFolder
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter


def tiny_adapter(folder: Path, *, rank: int = 4) -> str:
    """A fresh adapter's PEFT folder."""
    base = load_base("agentrl-tiny", device="cpu")
    save_adapter(attach_adapter(base, "policy", lora_config(rank, 4), 0), "policy", folder)
    return str(folder)


def trained_run(runs: Path) -> RunFolder:
    """A run folder with versions 3 and 7 of an adapter that changes the model."""
    folder = RunFolder.create(runs, "trained", "train")
    folder.write_json(folder.config, {"model": {"name": "agentrl-tiny"}})
    folder.run_id.write_text("run")
    peft = attach_adapter(load_base("agentrl-tiny", device="cpu"), "policy", lora_config(4, 4), 0)
    for version in (3, 7):
        with torch.no_grad():
            for name, weights in peft.named_parameters():
                if "lora_B" in name:
                    weights.normal_(std=0.05 * version)
        save_adapter(peft, "policy", folder.adapter_version("policy", version))
    return folder
