"""Estimate the memory that training and sampling a model take, and choose what fits into it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from peft import get_peft_model
from torch import nn

from agentrl_trainer.inference.adapter_swap import MERGE_BELOW
from agentrl_trainer.learner.learner import default_token_budget
from agentrl_trainer.learner.logprobs import MAX_LOGITS
from agentrl_trainer.models.host_memory import ADAM_BYTES
from agentrl_trainer.models.lora import lora_config, model_without_weights
from agentrl_trainer.models.lora_product import width_computed_again
from agentrl_trainer.models.lora_targets import no_false_warnings, resolve_targets
from agentrl_trainer.models.moe import expert_count
from agentrl_trainer.names import SamplerWeights

_NF4_BYTES = 0.53
_ROUNDED_BYTES = {"bfloat16": 2, "int8": 1}
_LOGITS_BYTES = 12
"""For each of at most ``MAX_LOGITS``: itself in float32, and two that are computed from it."""
_VERSIONS = 2
"""Of an adapter that the sampler holds while it changes from one to the next."""

_FOR_ACTIVATIONS = 0.4
"""Of a GPU's memory, which weights and the sampler's keys and values take as well."""
_FEWEST_TOKENS = 1024


def fitting_token_budget(
    name: str, *, rank: int, device: torch.device, dtype: str = "auto",
    gradient_checkpointing: bool = False,
) -> int:  # fmt: skip
    """Return the default tokens of a micro-batch, halved until a GPU holds their activations,
    but at least 1024.

    It depends on the kind of GPU, not on what is free: a resumed run makes the same micro-batches.
    """
    tokens = default_token_budget(device.type)
    if device.type != "cuda":
        return tokens
    room = _FOR_ACTIVATIONS * torch.cuda.get_device_properties(device).total_memory
    while tokens > _FEWEST_TOKENS:
        parts = estimate_memory(
            name, tokens=tokens, cached=0, rank=rank, device=device, dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
        )  # fmt: skip
        if parts is None or parts[f"activations of {tokens} tokens"] <= room:
            return tokens
        tokens //= 2
    return tokens


P = ParamSpec("P")


def _none_if_unknown(
    estimate: Callable[P, dict[str, int] | None],
) -> Callable[P, dict[str, int] | None]:
    """Return None where a configuration has other names than most."""

    @functools.wraps(estimate)
    def estimated(*args: P.args, **named: P.kwargs) -> dict[str, int] | None:
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            return estimate(*args, **named)
        return None

    return estimated


@_none_if_unknown
def estimate_memory(
    name: str,
    *,
    tokens: int,
    cached: int,
    rank: int,
    device: torch.device,
    adapters: int = 1,
    dtype: str = "auto",
    load_in_4bit: bool = False,
    gradient_checkpointing: bool = False,
    parts: int | None = None,
    sampler_weights: SamplerWeights = "model",
) -> dict[str, int] | None:
    """Estimate the bytes of each part; None if the architecture is not known.

    Args:
        tokens: of a micro-batch.
        parts: into which FSDP2 spreads the base model; the trainer holds one. None: it does not.
        cached: tokens whose keys and values the embedded sampler holds; 0: another one samples.
        sampler_weights: the embedded sampler's.
    """
    base = model_without_weights(name)
    if base is None:
        return None
    config, on_cpu = base.config.get_text_config(), device.type == "cpu"
    kind = torch.float32 if on_cpu else getattr(config, "dtype", None) or torch.float32
    size = (kind if dtype == "auto" else getattr(torch, dtype)).itemsize
    count = sum(parameter.numel() for parameter in base.parameters())
    head = base.get_output_embeddings()
    linears = [m.weight for m in base.modules() if isinstance(m, nn.Linear) and m is not head]
    linear = sum(weight.numel() for weight in linears)
    weights = count * size - load_in_4bit * int(linear * (size - _NF4_BYTES))
    with torch.device("meta"), no_false_warnings():
        attached = get_peft_model(base, resolve_targets(lora_config(rank, 32.0), base))
    lora = {name: p for name, p in attached.named_parameters() if p.requires_grad}
    adapter = adapters * sum(p.numel() for p in lora.values())
    active, activation = expert_count(config, ("num_experts_per_tok", "num_experts_per_token")), 0
    # Of a token, layers keep what each adapted one reads and writes, those of its experts, which
    # are stacked, as well. Inputs that layers share count for each of them: norms and products of
    # the MLP keep as much. Adapters compute in float32, on a copy of what they read.
    for name, matrix in lora.items():
        reads = "lora_A" in name
        width, ranks = matrix.shape[::-1] if reads else matrix.shape
        copied = 4 if reads and size < 4 else 0
        activation += width * (size + copied) * (active if ranks > rank else 1) + reads * 4 * rank
    if size == 4 and not load_in_4bit and parts is None:
        activation -= size * width_computed_again(attached)
    if gradient_checkpointing:  # the input of each layer, and all of one
        layers = config.num_hidden_layers
        activation = activation // layers + layers * config.hidden_size * size
    logits = min(tokens * config.vocab_size, MAX_LOGITS) * _LOGITS_BYTES
    found = {
        "weights": weights // (parts or 1),
        "adapter and optimizer": adapter * ADAM_BYTES,
        f"activations of {tokens} tokens": activation * tokens + logits,
    }
    if cached:
        # A small model's sampler merges each version into a copy of the linear layers.
        merges = size == 4 and count < MERGE_BELOW and not load_in_4bit and not expert_count(config)
        if rounded := _ROUNDED_BYTES.get(sampler_weights):
            of_head = 0 if head is None else head.weight.numel()
            tied = head is None or head.weight is base.get_input_embeddings().weight
            kept = count - linear - (0 if tied else of_head)
            own, version = size * kept + rounded * (linear + of_head), adapter
        else:
            own, version = weights, linear * adapters if merges else adapter
        found["sampler"] = own + _VERSIONS * 4 * version
        heads = getattr(config, "num_attention_heads", 0)  # 0: a state space, without keys
        width = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        shared = getattr(config, "num_key_value_heads", None) or heads
        found[f"KV cache of {cached} tokens"] = (
            2 * shared * width * config.num_hidden_layers * size * cached
        )
    return found
