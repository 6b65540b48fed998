"""Tell the size of a model without its weights: by its configuration, or by its name."""

from __future__ import annotations

import re
import warnings
from typing import cast

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl_trainer.models.loading import resolve_model
from agentrl_trainer.models.lora import lora_config

_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)B(?![A-Za-z0-9])", re.IGNORECASE)


def count_parameters(name: str, rank: int) -> int | None:
    """Count the parameters of the base and one adapter of this rank; None if only the model's own
    code could build it."""
    try:
        config = AutoConfig.from_pretrained(resolve_model(name), trust_remote_code=False)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
            model = get_peft_model(base, lora_config(rank, 32.0, "all-linear"))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError):
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_in_name(name: str) -> int | None:
    """Read a name: ``Qwen/Qwen3-30B-A3B`` has 30 billion, active or not; None if it has none."""
    found = _BILLIONS.search(name)
    return None if found is None else round(float(found[1]) * 1e9)
