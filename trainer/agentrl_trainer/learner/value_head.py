"""Predict returns beside the policy: a small head on the decoder's last hidden states.

Knows tensors, not models or adapters. No gradient reaches the hidden states, so the policy is the
same with and without it, and an adapter can be used without its value function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from agentrl_trainer.learner.loss_options import ValueParams


class ValueHead(nn.Module):
    """``[N, hidden] -> [N]`` float32: normalize, one hidden layer, a number; 0 before training."""

    def __init__(self, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(hidden_size)
            self.up = nn.Linear(hidden_size, min(hidden_size, 256))
            self.out = nn.Linear(min(hidden_size, 256), 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(nn.functional.silu(self.up(self.norm(hidden.float())))).squeeze(-1)


def value_loss(
    predicted: Tensor,
    *,
    returns: Tensor,
    params: ValueParams,
    values: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the squared error, summed over tokens; all tensors are [N].

    With ``values``, the predictions when the step began, in PPO's clipped form: the larger of the
    errors with and without the prediction kept within ``clip`` of them (Schulman's code; examined
    in arXiv:2005.12729). Its gradient touches the value function alone, hence no coefficient.
    """
    error = (predicted - returns).square()
    if values is not None and params.clip:
        near = values + (predicted - values).clamp(-params.clip, params.clip)
        error = torch.maximum(error, (near - returns).square())
    half = 0.5 * error if weights is None else 0.5 * error * weights
    missed = (predicted - returns).detach().abs().sum()
    sums = {"value_loss": half.detach().sum(), "value_error": missed}
    return half.sum(), sums
