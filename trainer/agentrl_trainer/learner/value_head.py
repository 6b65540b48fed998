"""A value function beside the policy: a small head on the decoder's last hidden states.

Knows tensors and datums, not models or adapters. No gradient reaches the hidden states, so that the
policy is what it would be without it, and an adapter can be used without its value function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from agentrl_trainer.data.advantages import Scaling, token_advantages
from agentrl_trainer.data.packing import TrainingRow

_WIDTH = 256


@dataclass(frozen=True, slots=True)
class ValueParams:
    """How the value function learns. ``clip`` 0: the plain squared error."""

    lr: float = 1e-3  # it starts from nothing, so it needs more than a LoRA of a large model
    clip: float = 0.2

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.clip < 0:
            raise ValueError(f"lr must be positive and clip not negative: {self}")


class ValueHead(nn.Module):
    """``[N, hidden] -> [N]`` float32: normalise, one hidden layer, a number; 0 before training."""

    def __init__(self, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(hidden_size)
            self.up = nn.Linear(hidden_size, min(hidden_size, _WIDTH))
            self.out = nn.Linear(min(hidden_size, _WIDTH), 1)
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
    """Half the squared error, summed over tokens; all tensors are [N].

    With ``values``, the predictions when the step began, PPO's clipped form: the larger of the two
    errors with and without the prediction kept within ``clip`` of them (Schulman's code; examined
    in arXiv:2005.12729). Its gradient touches the value function alone, hence no coefficient.
    """
    error = (predicted - returns).square()
    if values is not None and params.clip:
        near = values + (predicted - values).clamp(-params.clip, params.clip)
        error = torch.maximum(error, (near - returns).square())
    half = 0.5 * error if weights is None else 0.5 * error * weights
    sums = {
        "value_loss": half.detach().sum(),
        "value_error": (predicted - returns).detach().abs().sum(),
    }
    return half.sum(), sums


def with_gae(
    datums: Sequence[TrainingRow],
    values: Sequence[list[float]],
    *,
    discount: float = 1.0,
    trace: float = 0.95,
    whiten: bool = False,
    scaling: Scaling | None = None,
) -> list[TrainingRow]:
    """The datums with advantages, ``values`` and ``returns``, from their ``rewards``.

    One step in time is one trained token: what an environment or another agent wrote in between
    belongs to the transition. ``whiten``: centre and scale the advantages over the trained tokens
    of all datums, (A - mean) / (std + epsilon) with ``scaling``'s ddof and epsilon (as PPO
    implementations do per batch: arXiv:2005.12729); the returns stay as they are.

    Raises ValueError for a datum without ``rewards``.
    """
    results: list[tuple[list[int], list[float], list[float]]] = []
    for datum, row in zip(datums, values, strict=True):
        if "rewards" not in datum.extra:
            raise ValueError("datums need rewards in extra for generalised advantage estimation")
        at = [i for i, on in enumerate(datum.mask) if on]
        rewards = datum.extra["rewards"]
        results.append(
            (
                at,
                *token_advantages(
                    [rewards[i] for i in at],
                    [row[i] for i in at],
                    discount=discount,
                    trace=trace,
                ),
            )
        )
    mean, divisor = 0.0, 1.0
    if whiten:
        everything = [value for _, advantages, _ in results for value in advantages]
        mean = math.fsum(everything) / max(len(everything), 1)
        divisor = (scaling or Scaling()).divisor(everything)
    done: list[TrainingRow] = []
    for datum, row, (at, advantages, returns) in zip(datums, values, results, strict=True):
        credit, targets = [0.0] * len(datum.tokens), [0.0] * len(datum.tokens)
        for i, advantage, target in zip(at, advantages, returns, strict=True):
            credit[i] = (advantage - mean) / divisor
            targets[i] = target
        extra = {**datum.extra, "values": row, "returns": targets}
        done.append(replace(datum, advantages=credit, extra=extra))
    return done
