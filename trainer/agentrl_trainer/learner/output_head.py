"""Compute log-probs of tokens from the decoder's hidden states, without holding all logits.

The vocabulary is the widest dimension of a model. Only positions that train something meet it, and
only a chunk of them at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class OutputHead:
    """Hidden states [n, hidden] to logits [n, vocabulary]: the output embedding, and what some
    families do to logits after it."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.embedding: Any = model.get_output_embeddings()
        self._cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self._factor = factor / (getattr(config, "logits_scaling", None) or 1.0)  # Granite

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.embedding(hidden)
        if self._factor != 1.0:
            logits = logits * self._factor
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None) -> Tensor:
        """Compute the float32 log-prob [n] of each target, at temperature 1 or those given [n]."""
        return pick(self(hidden), targets, temperatures)

    @property
    def is_frozen_linear(self) -> bool:
        """Whether ``slopes`` applies."""
        plain = type(self.embedding) is nn.Linear
        return plain and not any(p.requires_grad for p in self.embedding.parameters())

    def slopes(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute ``logprobs``, and the gradient [n, hidden] of each with respect to its own hidden
        state.

        The gradient of a log-softmax, a one-hot vector minus the softmax, is computed in the place
        of the logits: a quarter of autograd's memory.
        """
        logits = self(hidden).float()
        slope_of_cap = None if self._cap is None else 1 - (logits / self._cap).square_()
        if temperatures is not None:
            logits /= temperatures[:, None]
        logits -= logits.amax(-1, keepdim=True)
        picked = logits.gather(1, targets[:, None])[:, 0]
        total = logits.exp_().sum(-1)
        logits *= -1.0 / total[:, None]
        logits.scatter_add_(1, targets[:, None], torch.ones_like(picked)[:, None])
        if temperatures is not None:
            logits /= temperatures[:, None]
        if slope_of_cap is not None:
            logits *= slope_of_cap
        slopes = logits.to(self.embedding.weight.dtype) @ self.embedding.weight
        return picked - total.log(), slopes if self._factor == 1.0 else slopes * self._factor


def pick(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Compute the float32 log-prob [n] of each target under logits [n, vocabulary]."""
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return -F.cross_entropy(logits, targets, reduction="none")


class FrozenHead(torch.autograd.Function):
    """Compute log-probs through a head without trainable parameters.

    The log-prob of a row depends on no other row. So its gradient with respect to the row's hidden
    state is computed in the forward, while the logits exist, and the backward only scales it:
    logits are neither kept nor computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: OutputHead,
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
            logprobs[part], slopes[part] = head.slopes(hidden[part], targets[part], warm)
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return None, (slopes * grads[0][:, None]).to(slopes.dtype), None, None, None
