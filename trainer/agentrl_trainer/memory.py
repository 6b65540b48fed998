"""Estimate the memory that training and sampling a model take, before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import get_peft_model
from torch import nn

from agentrl_trainer.inference.adapter_swap import MERGE_BELOW
from agentrl_trainer.learner.logprobs import MAX_LOGITS
from agentrl_trainer.models.lora import lora_config, model_without_weights
from agentrl_trainer.models.lora_targets import no_false_warnings, resolve_targets
from agentrl_trainer.models.moe import expert_count

_ADAM_BYTES = 16
"""For each parameter of the adapter, in float32: itself, its gradient and two moments."""
_NF4_BYTES = 0.53
_LOGITS_BYTES = 12
"""For each of at most ``MAX_LOGITS``: itself in float32, and two that are computed from it."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, each an estimate."""

    parameters: int
    """Of the base model: a number, not bytes."""
    weights: int
    """Of the base model in the trainer."""
    sampler: int
    """Of the base model in the sampler; twice where its lean decoder packs them for a CPU."""
    adapter: int
    """Of one adapter in training, with gradients and optimizer."""
    activation: int
    """Of one token of a micro-batch, kept for the backward."""
    vocabulary: int
    kv: int
    """Keys and values of one token in the sampler."""
    served_adapter: int
    """Of one adapter version in the sampler: by itself, or merged into a copy of the weights."""

    def micro_batch(self, tokens: int) -> int:
        logits = min(tokens * self.vocabulary, MAX_LOGITS)
        return self.activation * tokens + logits * _LOGITS_BYTES


def estimate_memory(
    name: str,
    *,
    rank: int,
    device: torch.device,
    dtype: str = "auto",
    load_in_4bit: bool = False,
    gradient_checkpointing: bool = False,
) -> MemoryEstimate | None:
    """Estimate from a model's configuration; None if only the model's own code could build it."""
    base = model_without_weights(name)
    if base is None:
        return None
    config = base.config.get_text_config()
    stored = getattr(config, "dtype", None) or torch.float32
    kind = torch.float32 if device.type == "cpu" else stored
    kind = kind if dtype == "auto" else getattr(torch, dtype)
    count = sum(parameter.numel() for parameter in base.parameters())
    head = base.get_output_embeddings()
    linears = [m for m in base.modules() if isinstance(m, nn.Linear) and m is not head]
    linear = sum(module.weight.numel() for module in linears)
    merges = kind == torch.float32 and count < MERGE_BELOW and not load_in_4bit
    merges = merges and not expert_count(config)
    weights = count * kind.itemsize
    packs = merges and device.type == "cpu"
    if load_in_4bit:
        weights -= int(linear * (kind.itemsize - _NF4_BYTES))
    wanted = resolve_targets(lora_config(rank, 32.0), base)
    with torch.device("meta"), no_false_warnings():
        attached = get_peft_model(base, wanted)
    adapter = sum(p.numel() for p in attached.parameters() if p.requires_grad)
    return MemoryEstimate(
        parameters=count,
        weights=weights,
        sampler=weights * 2 if packs else weights,
        adapter=adapter * _ADAM_BYTES,
        activation=_activation(config, kind.itemsize, rank, recomputed=gradient_checkpointing),
        vocabulary=config.vocab_size,
        kv=_kv(config) * kind.itemsize,
        served_adapter=4 * (linear * (2 if packs else 1) if merges else adapter),
    )


def _kv(config: object) -> int:
    """Count the keys and values of a token in all layers."""
    heads = getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    return 2 * shared * width * getattr(config, "num_hidden_layers", 1)


def _activation(config: object, size: int, rank: int, *, recomputed: bool) -> int:
    """Count the bytes of a token that the layers keep for the backward.

    For a decoder layer with LoRA on each linear layer: what the two norms and the adapters read,
    queries, keys, values and the output of the attention, and three products of the MLP.
    """
    hidden = getattr(config, "hidden_size", 0)
    heads = getattr(config, "num_attention_heads", 1)
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    active = expert_count(config, ("num_experts_per_tok", "num_experts_per_token")) or 1
    inner = getattr(config, "moe_intermediate_size", None) if active > 1 else None
    inner = (inner or getattr(config, "intermediate_size", None) or 4 * hidden) * active
    layers = getattr(config, "num_hidden_layers", 1)
    kept = 2 * hidden + 2 * width + _kv(config) // layers + 3 * inner
    if size == 4:
        read = 2 * hidden + width + inner + 7 * rank
    else:  # the adapters compute in float32, and each keeps a copy of what it reads
        read = 5 * hidden + width + inner + 7 * rank + 4 * hidden
    of_layer = kept * size + read * 4
    return layers * hidden * size + of_layer if recomputed else layers * of_layer
