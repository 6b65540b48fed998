"""Losses of a policy, token by token, summed: pure functions of tensors.

Knows log-probs, not models. The semantics are Tinker's: with ``lp`` the trainer's log-prob of a
sampled token, ``q`` the sampler's, ``A`` its advantage and ``r = exp(lp - q)``,

    cross_entropy        -sum A * lp                      (A is the token's weight)
    importance_sampling  -sum r * A
    ppo                  -sum min(r * A, clip(r) * A)
    cispo                -sum stop_gradient(clip(r)) * lp * A

where clip has the absolute bounds ``clip_low_threshold`` and ``clip_high_threshold``. Sums, not
means: whoever steps the optimizer knows how many tokens the whole step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LossConfig = Mapping[str, float]
Sums = dict[str, Tensor]
"""0-d detached tensors. Over micro-batches they add up, but those named ``*_max`` take the max."""

LossResult = tuple[Tensor, Sums]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, LossConfig], LossResult]
"""``(logprobs, sampling_logprobs, advantages, mask, config) -> (loss_sum, sums)``.

All four tensors have one shape, flat ``[N]`` or padded ``[B, T]``; mask is bool. What stands at
masked-out positions has no effect whatsoever, be it infinite.
"""

_CLIP_DEFAULTS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def cross_entropy(
    logprobs: Tensor, sampling: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig
) -> LossResult:
    """Weighted negative log-likelihood: advantages are weights, ``sampling`` is for metrics."""
    _options(config, {})
    lp, log_ratio, weights = _masked(logprobs, sampling, advantages, mask)
    return -(lp * weights).sum(), token_sums(lp, log_ratio, mask)


def importance_sampling(
    logprobs: Tensor, sampling: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig
) -> LossResult:
    """Policy gradient, corrected for having been sampled from q. On policy its gradient is that of
    ``-sum A * lp``."""
    _options(config, {})
    lp, log_ratio, advantages = _masked(logprobs, sampling, advantages, mask)
    return -(log_ratio.exp() * advantages).sum(), token_sums(lp, log_ratio, mask)


def ppo(
    logprobs: Tensor, sampling: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig
) -> LossResult:
    """PPO's pessimistic clipped objective: arXiv:1707.06347, equation 7."""
    low, high = _clip_bounds(config)
    lp, log_ratio, advantages = _masked(logprobs, sampling, advantages, mask)
    ratio = log_ratio.exp()
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    sums = token_sums(lp, log_ratio, mask)
    # Counted where the clip bites: it was chosen, so the token has no gradient.
    sums["clipped"] = ((clipped < plain) & mask).sum()
    return -torch.minimum(plain, clipped).sum(), sums


def cispo(
    logprobs: Tensor, sampling: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig
) -> LossResult:
    """Clipped importance *weights*, so that every token keeps a gradient: MiniMax-M1,
    arXiv:2506.13585. With bounds 0 and 5 it is truncated importance sampling."""
    low, high = _clip_bounds(config)
    lp, log_ratio, advantages = _masked(logprobs, sampling, advantages, mask)
    ratio = log_ratio.detach().exp()
    sums = token_sums(lp, log_ratio, mask)
    sums["clipped"] = (((ratio < low) | (ratio > high)) & mask).sum()
    return -(ratio.clamp(low, high) * lp * advantages).sum(), sums


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}


def _masked(
    logprobs: Tensor, sampling: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-ratio and advantages, with zeros where the mask is off.

    The log-ratio is zeroed *before* anybody takes its exp: an overflow at a masked position
    would make the gradient NaN (inf times 0) while the loss still looks fine.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return (
        torch.where(mask, logprobs, zero),
        torch.where(mask, logprobs - sampling, zero),
        torch.where(mask, advantages, zero),
    )


def _options(config: LossConfig, defaults: Mapping[str, float]) -> dict[str, float]:
    """The defaults, overridden. An unknown key is a typo that would silently change nothing."""
    unknown = set(config) - set(defaults)
    if unknown:
        raise ValueError(f"unknown loss options {sorted(unknown)}; known: {sorted(defaults)}")
    return {**defaults, **config}


def _clip_bounds(config: LossConfig) -> tuple[float, float]:
    options = _options(config, _CLIP_DEFAULTS)
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"clip thresholds are ratios, low <= 1 <= high; got {low} and {high}")
    return low, high


def token_sums(lp: Tensor, log_ratio: Tensor, mask: Tensor) -> Sums:
    """What every loss reports; ``lp`` and ``log_ratio`` are zero where the mask is off.

    ``kl_k1`` and ``kl_k3`` sum to estimates of KL(q || policy) from tokens sampled by q
    (http://joschu.net/blog/kl-approx.html); k3 is never negative.
    """
    lp, log_ratio = lp.detach(), log_ratio.detach()
    ratio = log_ratio.exp()
    kept = torch.where(mask, ratio, torch.zeros_like(ratio))
    # expm1 keeps the digits which exp(x) - 1 would lose where trainer and sampler agree.
    k3 = log_ratio.expm1() - log_ratio
    difference = log_ratio.abs()
    nothing = lp.new_zeros(())
    return {
        "tokens": mask.sum(),
        "logprob": lp.sum(),
        "ratio": kept.sum(),
        "ratio_max": kept.max() if kept.numel() else nothing,
        "clipped": mask.new_zeros((), dtype=torch.int64),
        "kl_k1": -log_ratio.sum(),
        "kl_k3": k3.sum(),
        "difference": difference.sum(),
        "difference_max": difference.max() if difference.numel() else nothing,
    }


def add_sums(total: Sums, part: Sums) -> Sums:
    """Merge the sums of two micro-batches."""
    merged = dict(total)
    for name, value in part.items():
        if name not in merged:
            merged[name] = value
        elif name.endswith("_max"):
            merged[name] = torch.maximum(merged[name], value)
        else:
            merged[name] = merged[name] + value
    return merged
