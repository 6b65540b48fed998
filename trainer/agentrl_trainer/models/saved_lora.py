"""Read how a saved LoRA is made, to train it on; refuse what cannot be trained here.

The folder is PEFT's form, whether agentrl, PEFT, TRL or Unsloth wrote it. Loads no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_trainer.models.sources import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_READ = (
    "peft_type task_type base_model_name_or_path r lora_alpha use_rslora lora_dropout "
    "init_lora_weights target_modules target_parameters rank_pattern"
)
_WITHOUT_EFFECT = (
    "auto_mapping peft_version revision inference_mode fan_in_fan_out megatron_core "
    "qalora_group_size loftq_config eva_config layers_pattern"
)
"""Fields that say nothing of the weights, or act only through a field that is refused."""
_OF_ITS_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initializations that change the base model: their adapters do not fit the model itself."""
_INSTEAD = (
    "Merge it into its base where it was made (PEFT's merge_and_unload), and train a fresh adapter "
    "over that model: --model FOLDER"
)


@dataclass(frozen=True, slots=True)
class SavedLora:
    """A LoRA in a PEFT folder that can be trained on."""

    folder: Path
    base: str | None
    """The base model as its maker named it."""
    rank: int
    alpha: float
    """The scale is alpha / rank; a rank-stabilized LoRA's alpha is given in this form."""
    targets: str | list[str]
    """PEFT's target_modules, and the weights of experts."""
    notes: tuple[str, ...]
    """What is done otherwise here than where it was made."""


def is_reward_model(folder: Path) -> bool:
    """Tell whether a PEFT folder is of a reward model, which scores texts and writes none."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return config.get("task_type") == "SEQ_CLS"


def read_lora(folder: Path, *, scores: bool = False) -> SavedLora:
    """Read the configuration of a saved LoRA.

    A rank-stabilized LoRA (arXiv:2312.03732) is scaled by alpha / √rank, which is the scale of
    alpha · √rank without it. ``scores``: it is a reward model's, whose head is read elsewhere.

    Raises:
        ModelError: it is no LoRA, has a feature that is not trained here, or its file is missing.
    """
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(
            f"{folder} has no {WEIGHTS_FILE}; save it again with PEFT's save_pretrained, which "
            "writes safetensors"
        )
    of_head: dict[str, Any] = {"task_type": None, "modules_to_save": None} if scores else {}
    _refuse_features(folder, config | of_head)
    rank, alpha, notes = int(config["r"]), float(config["lora_alpha"]), list[str]()
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)
        notes.append(f"use_rslora: its scale is kept as alpha {alpha:g}")
    if dropout := config.get("lora_dropout"):
        notes.append(f"lora_dropout {dropout:g}: here is none, so that what samples is what trains")
    targets = config.get("target_modules") or []
    if not isinstance(targets, str):
        experts = config.get("target_parameters") or []
        targets = sorted({*targets, *(one.removesuffix(".weight") for one in experts)})
    base = config.get("base_model_name_or_path")
    return SavedLora(folder, base, rank, alpha, targets, tuple(notes))


def _refuse_features(folder: Path, config: dict[str, Any]) -> None:
    def refuse(name: str) -> ModelError:
        said = f"{name} = {json.dumps(config.get(name))}"
        return ModelError(f"{folder} has {said}, which is not trained here. {_INSTEAD}")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type")
    if (kind := config.get("task_type")) not in (None, "CAUSAL_LM"):
        raise ModelError(f"{folder} has task_type {kind}; give an adapter that writes answers")
    if str(config.get("init_lora_weights")).lower().startswith(_OF_ITS_BASE):
        raise refuse("init_lora_weights")
    if config.get("rank_pattern") and not config.get("target_parameters"):  # experts have one
        raise refuse("rank_pattern")
    for name in config.keys() - f"{_READ} {_WITHOUT_EFFECT}".split():
        if config[name] and config[name] != "none":  # bias
            raise refuse(name)
