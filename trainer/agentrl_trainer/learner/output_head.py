"""Compute log-probs of tokens from the decoder's hidden states, without holding all logits.

The vocabulary is the widest dimension of a model. Only positions that train something meet it, and
only a chunk of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

Head = Callable[[Tensor], Tensor]
"""Hidden states [n, hidden] to logits [n, vocabulary]."""
Slope = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Hidden states [n, hidden], targets [n] and their temperatures [n] (None: all are 1) to the
targets' log-probs [n] in float32, and the gradient [n, hidden] of each with respect to its own
hidden state."""


def logprobs_of_hidden(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    max_logits: int,
) -> Tensor:
    """Compute [N] the targets' log-probs, never holding more than ``max_logits`` logits."""
    head, embedding = logits_head(model), cast(Any, model.get_output_embeddings())
    step = max(1, max_logits // embedding.weight.shape[0])
    if not torch.is_grad_enabled():
        parts = _chunks(hidden, targets, temperatures, step)
        return torch.cat([pick(head(h), t, warm) for h, t, warm in parts])
    if any(p.requires_grad for p in embedding.parameters()):
        return _recomputed(head, hidden, targets, temperatures, step)
    slope = _choose_slope(model)
    return cast(Tensor, _FrozenHead.apply(slope, hidden, targets, temperatures, step))


def _choose_slope(model: PreTrainedModel) -> Slope:
    """Choose how log-probs and their gradients are computed under this model's frozen head."""
    head, embedding = logits_head(model), cast(Any, model.get_output_embeddings())
    plain = type(embedding) is nn.Linear and embedding.bias is None
    if not plain or getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        return partial(_slope_by_autograd, head)
    return partial(_slope_in_place, embedding, _logit_factor(model))


def _slope_by_autograd(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        own = hidden.detach().requires_grad_()
        picked = pick(head(own), targets, temperatures)
        (slope,) = torch.autograd.grad(picked.sum(), own)
    return picked.detach(), slope


def _slope_in_place(
    embedding: nn.Linear,
    factor: float,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of a log-softmax, a one-hot vector minus the softmax, in the place of
    the logits: a quarter of autograd's memory."""
    scale = factor if temperatures is None else (factor / temperatures)[:, None]
    scaled = temperatures is not None or factor != 1.0  # a pass over all logits
    logits = embedding(hidden).float()
    if scaled:
        logits *= scale
    logits -= logits.amax(-1, keepdim=True)
    picked = logits.gather(1, targets[:, None])[:, 0]
    total = logits.exp_().sum(-1)
    logits *= -1.0 / total[:, None]
    logits.scatter_add_(1, targets[:, None], torch.ones_like(picked)[:, None])
    if scaled:
        logits *= scale
    return picked - total.log(), logits.to(embedding.weight.dtype) @ embedding.weight


class _FrozenHead(torch.autograd.Function):
    """Compute log-probs through a head without trainable parameters.

    The log-prob of a row depends on no other row. So its gradient with respect to the row's hidden
    state is computed in the forward, while the logits exist, and the backward only scales it:
    logits are neither kept nor computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slope: Slope,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        step: int,
    ) -> Tensor:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        slopes = torch.empty_like(hidden)
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            warm = None if temperatures is None else temperatures[part]
            logprobs[part], slopes[part] = slope(hidden[part], targets[part], warm)
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return None, (slopes * grads[0][:, None]).to(slopes.dtype), None, None, None


def _recomputed(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, step: int
) -> Tensor:
    """Compute log-probs through a head with LoRA: chunks are computed again in the backward."""

    def logprobs(states: Tensor, tokens: Tensor, warm: Tensor | None) -> Tensor:
        return pick(head(states), tokens, warm)

    return torch.cat(
        [
            cast(Tensor, checkpoint(logprobs, *part, use_reentrant=False))
            for part in _chunks(hidden, targets, temperatures, step)
        ]
    )


def _chunks(
    hidden: Tensor, targets: Tensor, temperatures: Tensor | None, step: int
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    parts = list(zip(hidden.split(step), targets.split(step), strict=True))
    warm = [None] * len(parts) if temperatures is None else list(temperatures.split(step))
    return [(h, t, w) for (h, t), w in zip(parts, warm, strict=True)]


def pick(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Compute the float32 log-prob [n] of each target under logits [n, vocabulary]."""
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return -F.cross_entropy(logits, targets, reduction="none")


def logits_head(model: PreTrainedModel) -> Head:
    """Return the output embedding, with what some families do to logits after it."""
    embedding: Any = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    factor = _logit_factor(model)

    def logits(hidden: Tensor) -> Tensor:
        found = embedding(hidden)
        if factor != 1.0:
            found = found * factor
        if cap is not None:
            found = torch.tanh(found / cap) * cap
        return found

    return logits


def _logit_factor(model: PreTrainedModel) -> float:
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    return factor / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
