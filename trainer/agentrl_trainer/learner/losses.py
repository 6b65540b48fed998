"""Losses of a policy, token by token, summed: pure functions of tensors.

Knows log-probs, not models. The semantics are Tinker's
(https://tinker-docs.thinkingmachines.ai/losses): with ``lp`` the trainer's log-prob of a
sampled token, ``q`` the sampler's, ``A`` its advantage and ``r = exp(lp - q)``,

    cross_entropy        -sum A * lp                      (A is the token's weight)
    importance_sampling  -sum r * A
    ppo                  -sum min(r * A, clip(r) * A)     (A < 0: never below dual_clip * A)
    cispo                -sum stop_gradient(clip(r)) * lp * A
    dro                  -sum lp * A - beta / 2 * (lp - q)^2
    gspo                 -sum min(s * A, clip(s) * A)     (s: the sequence's ratio)
    dppo                 -sum keep * r * A                (keep: inside the trust region)

where clip has the absolute bounds ``clip_low_threshold`` and ``clip_high_threshold``. Sums, not
means: whoever steps the optimizer knows how many tokens the whole step has.

Around each of them, in this order (``Loss.__call__``): the off-policy correction multiplies a
token's term, the KL to a reference is added to it, the weight of its token multiplies both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossConfig = Mapping[str, float | str]
Sums = dict[str, Tensor]
"""0-d detached tensors. Over micro-batches they add up, but those named ``*_max`` take the max."""

LossResult = tuple[Tensor, Sums]
Options = dict[str, float | str]

LossName = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo"
]  # fmt: skip

SHARED: Options = {
    "kl_coef": 0.0,
    "kl_estimator": "k3",  # k1, k2, k3: what is reported as the KL and added to the loss's value
    "kl_gradient": "unbiased",  # or direct: that of the estimator itself, as GRPO was published
    "correction": "none",  # none, truncate, mask
    "correction_level": "token",  # token, sequence, geometric
    "correction_low": 0.0,
    "correction_high": 2.0,
}
"""Options that every loss takes, and their defaults."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_gradient": ("unbiased", "direct"),
    "correction": ("none", "truncate", "mask"),
    "correction_level": ("token", "sequence", "geometric"),
    "divergence": ("tv", "kl"),
}
_CLIP: Options = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a formula sees: tensors of one shape, with zeros where the mask is off."""

    lp: Tensor
    log_ratio: Tensor  # lp minus the log-prob of the policy that ratios are taken against
    advantages: Tensor
    mask: Tensor
    sequences: Tensor | None  # int64: which sequence a token belongs to, from 0


Formula = Callable[[Tokens, Options], tuple[Tensor, Tensor | None]]
"""Each token's term of the loss, and where the formula's clip or mask took effect."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A formula with its options, and what goes around every formula.

    Called as ``(logprobs, sampling, advantages, mask, config) -> (loss_sum, sums)``. These four
    tensors, and the optional ones, have one shape: flat ``[N]`` or padded ``[B, T]``; mask is bool.
    What stands at masked-out positions has no effect whatsoever, be it infinite.

    Optional:
        sequences: int64, the sequence of each token. Padded tensors do without: rows are sequences.
        weights: of each token's term, for length normalisation.
        proximal: log-probs of the policy at the start of the step. Ratios are taken against it
            rather than against the sampler's, as in decoupled PPO (arXiv:2110.00641); the
            correction then stands for the way from the sampler to it.
        reference: log-probs under the policy to stay close to; needed if ``kl_coef`` is not 0.

    Raises ValueError for options that do not exist, are out of range, or miss their tensor.
    """

    name: str
    formula: Formula
    defaults: Options

    def options(self, config: LossConfig) -> Options:
        """The defaults, overridden. An unknown key is a typo that would silently change nothing."""
        known = {**self.defaults, **SHARED}
        if unknown := set(config) - set(known):
            raise ValueError(f"unknown options of {self.name}: {sorted(unknown)}; {sorted(known)}")
        options = {**known, **config}
        for name, value in options.items():
            choices = _CHOICES.get(name)
            if choices is not None and value not in choices:
                raise ValueError(f"{name} must be one of {list(choices)}, not {value!r}")
            if choices is None and (isinstance(value, str) or not value - value == 0):
                raise ValueError(f"{name} must be a finite number, not {value!r}")
        if _number(options, "kl_coef") < 0:
            raise ValueError("kl_coef must not be negative: it would push away from the reference")
        low, high = _number(options, "correction_low"), _number(options, "correction_high")
        if not 0 <= low <= 1 <= high:
            raise ValueError(f"correction bounds are ratios, low <= 1 <= high; got {low}, {high}")
        return options

    def __call__(
        self,
        logprobs: Tensor,
        sampling: Tensor,
        advantages: Tensor,
        mask: Tensor,
        config: LossConfig,
        *,
        sequences: Tensor | None = None,
        weights: Tensor | None = None,
        proximal: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> LossResult:
        options = self.options(config)
        if sequences is None and mask.dim() == 2:
            sequences = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        lp = _masked(logprobs, mask)
        # Zeroed *before* anybody takes its exp: an overflow at a masked position would make the
        # gradient NaN (inf times 0) while the loss still looks fine.
        drift = _masked(logprobs - sampling, mask)
        against = sampling if proximal is None else proximal
        corrects = options["correction"] != "none"
        if corrects and proximal is None:
            against = logprobs.detach()  # the step's first update: its policy is the proximal one
        tokens = Tokens(
            lp=lp,
            log_ratio=_masked(logprobs - against, mask),
            advantages=_masked(advantages, mask),
            mask=mask,
            sequences=sequences,
        )
        term, clipped = self.formula(tokens, options)
        sums = token_sums(lp, drift, mask)
        if clipped is not None:
            sums["clipped"] = (clipped & mask).sum()
        if corrects:
            gap = _masked(against - sampling, mask).detach()
            correction, dropped = correction_weights(gap, mask, sequences, options)
            term = term * correction
            sums["correction"] = _masked(correction, mask).sum()
            sums["dropped"] = (dropped & mask).sum()
        coefficient = _number(options, "kl_coef")
        if coefficient:
            if reference is None:
                raise ValueError("kl_coef needs the reference policy's log-probs of the tokens")
            kl = kl_penalty(
                lp,
                _masked(reference, mask),
                drift,
                estimator=str(options["kl_estimator"]),
                gradient=str(options["kl_gradient"]),
            )
            term = term + coefficient * kl
            sums["kl_reference"] = _masked(kl, mask).detach().sum()
        if weights is not None:
            term = term * _masked(weights, mask)
        return _masked(term, mask).sum(), sums


# ---- the formulas


def cross_entropy(tokens: Tokens, options: Options) -> tuple[Tensor, None]:
    """Weighted negative log-likelihood, -sum w * lp: maximum likelihood where the weights are 1
    (https://tinker-docs.thinkingmachines.ai/losses). Advantages are the weights, ``sampling`` is
    for metrics."""
    return -(tokens.lp * tokens.advantages), None


def importance_sampling(tokens: Tokens, options: Options) -> tuple[Tensor, None]:
    """Policy gradient, corrected for having been sampled from q: PPO's objective without its clip,
    L^CPI of arXiv:1707.06347, equation 6, which goes back to Kakade and Langford 2002
    ("Approximately optimal approximate reinforcement learning"). Tinker's name and sum
    (https://tinker-docs.thinkingmachines.ai/losses). On policy its gradient is that of
    ``-sum A * lp``, REINFORCE: Williams 1992, doi:10.1007/BF00992696."""
    return -(tokens.log_ratio.exp() * tokens.advantages), None


def ppo(tokens: Tokens, options: Options) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic clipped objective: arXiv:1707.06347, equation 7. The bounds need not be
    symmetric: DAPO's clip-higher, arXiv:2503.14476, is 0.8 and 1.28.

    ``dual_clip_threshold`` c > 1 bounds the loss of tokens with A < 0 whose ratio has exploded:
    max(min(r * A, clip(r) * A), c * A), arXiv:1912.09729, equation 5; 0 is off.
    """
    low, high = _clip_bounds(options)
    dual = _number(options, "dual_clip_threshold")
    if dual and dual <= high:
        raise ValueError(
            f"dual_clip_threshold {dual} must exceed clip_high_threshold {high}, or be 0 (off)"
        )
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(plain, clipped)
    bites = clipped < plain
    if dual:
        floor = dual * advantages
        exploded = (advantages < 0) & (objective < floor)
        objective = torch.where(exploded, floor, objective)
        bites = bites | exploded
    # Counted where the clip was chosen: there the token has no gradient.
    return -objective, bites


def cispo(tokens: Tokens, options: Options) -> tuple[Tensor, Tensor]:
    """Clipped importance *weights*, so that every token keeps a gradient: MiniMax-M1,
    arXiv:2506.13585, equation 4. With bounds 0 and 5 it is truncated importance sampling."""
    low, high = _clip_bounds(options)
    ratio = tokens.log_ratio.detach().exp()
    term = -(ratio.clamp(low, high) * tokens.lp * tokens.advantages)
    return term, (ratio < low) | (ratio > high)


def dro(tokens: Tokens, options: Options) -> tuple[Tensor, None]:
    """Direct reward optimisation: arXiv:2405.19107; token-wise as Tinker has it. ``beta`` weighs
    the square that holds the policy near the sampler's."""
    beta = _number(options, "beta")
    if beta < 0:
        raise ValueError(f"beta must not be negative, got {beta}")
    return -(tokens.lp * tokens.advantages - 0.5 * beta * tokens.log_ratio.square()), None


def gspo(tokens: Tokens, options: Options) -> tuple[Tensor, Tensor]:
    """PPO's clip on the *sequence's* ratio s = exp(mean of its log-ratios): GSPO, arXiv:2507.18071.

    In the paper's GSPO-token form (equation 14), so that advantages may differ along a sequence;
    where they do not, value and gradient are GSPO's (equation 5) times the sequence's length. The
    bounds default to the paper's, which are far tighter than a token's.
    """
    low, high = _clip_bounds(options)
    log_sequence = sequence_means(tokens.log_ratio.detach(), tokens.mask, tokens.sequences)
    # Each token has the sequence's ratio, and a gradient of its own.
    ratio = (log_sequence + tokens.log_ratio - tokens.log_ratio.detach()).exp()
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(low, high) * tokens.advantages
    return -torch.minimum(plain, clipped), clipped < plain


def dppo(tokens: Tokens, options: Options) -> tuple[Tensor, Tensor]:
    """A trust region in probability, not in ratio: DPPO with the binary approximation,
    arXiv:2602.04879. Tokens outside of it that would be pushed further out have no gradient.

    ``divergence`` tv: |p - q| of the sampled token; kl: KL of the two Bernoulli distributions
    "this token or another", q against p. ``divergence_low`` bounds it where p < q and A < 0,
    ``divergence_high`` where p > q and A > 0.
    """
    low, high = _number(options, "divergence_low"), _number(options, "divergence_high")
    if low <= 0 or high <= 0:
        raise ValueError(f"divergence_low and divergence_high must be positive, got {low}, {high}")
    lp, advantages = tokens.lp.detach(), tokens.advantages
    old = lp - tokens.log_ratio.detach()
    divergence = _bernoulli_divergence(lp, old, str(options["divergence"]))
    too_high = (divergence > high) & (lp > old) & (advantages > 0)
    too_low = (divergence > low) & (lp < old) & (advantages < 0)
    outside = too_high | too_low
    objective = tokens.log_ratio.exp() * advantages
    return -torch.where(outside, torch.zeros_like(objective), objective), outside


def _bernoulli_divergence(lp: Tensor, old: Tensor, kind: str) -> Tensor:
    p, q = lp.exp(), old.exp()
    if kind == "tv":
        return (p - q).abs()
    # Where q is 1 the other outcome has no mass: x log x goes to 0.
    other_p, other_q = (1 - p).clamp(min=1e-12), (1 - q).clamp(min=0.0)
    rest = torch.where(other_q > 0, other_q * (other_q.clamp(min=1e-30) / other_p).log(), 0.0)
    return q * (old - lp) + rest


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", cross_entropy, {}),
        Loss("importance_sampling", importance_sampling, {}),
        Loss("ppo", ppo, {**_CLIP, "dual_clip_threshold": 0.0}),
        Loss("cispo", cispo, _CLIP),
        Loss("dro", dro, {"beta": 0.05}),
        Loss("gspo", gspo, {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
        Loss("dppo", dppo, {"divergence": "tv", "divergence_low": 0.2, "divergence_high": 0.2}),
    )
}


# ---- around the formulas


def correction_weights(
    gap: Tensor, mask: Tensor, sequences: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Importance weights for tokens that another policy sampled, made harmless at the tail.

    ``gap``: the proximal policy's log-probs minus the sampler's, 0 where the mask is off. A token's
    weight is exp(gap); at level ``sequence`` the product of its sequence's, at ``geometric`` their
    geometric mean. ``truncate`` clamps it to the bounds (truncated importance sampling: Ionides
    2008, doi:10.1198/106186008X320456; of a policy's past: Espeholt et al.,
    arXiv:1802.01561; for samplers that are not quite the trainer, Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training"). ``mask`` gives tokens, or
    whole sequences, beyond the bounds weight 0 (masked importance sampling, as in IcePop,
    arXiv:2510.18855, and TRL's ``*_mask`` modes).

    Returns the weights and where a bound took effect.
    """
    level = options["correction_level"]
    if level == "sequence":
        gap = _per_sequence(gap, mask, sequences)[0]
    elif level == "geometric":
        gap = sequence_means(gap, mask, sequences)
    weight = gap.exp()
    low, high = _number(options, "correction_low"), _number(options, "correction_high")
    beyond = (weight < low) | (weight > high)
    if options["correction"] == "mask":
        return torch.where(beyond, torch.zeros_like(weight), weight), beyond
    return weight.clamp(low, high), beyond


def kl_penalty(
    lp: Tensor, reference: Tensor, drift: Tensor, *, estimator: str, gradient: str
) -> Tensor:
    """Each token's estimate of KL(policy || reference), from a token that q sampled.

    With d = log reference - lp (http://joschu.net/blog/kl-approx.html):
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

    What one differentiates is another matter than what one reports. The gradient of the KL is
    E[(lp - log reference) * grad lp], which is k2's own gradient; k1's own is zero on average and
    k3's is that of the KL the other way round (arXiv:2506.09477, arXiv:2510.01555). ``unbiased``
    reports the estimator and has that gradient, weighted by exp(``drift``) (the policy over q, up
    to 5) since q sampled; ``direct`` is the estimator as it stands, which GRPO was published with.
    """
    d = reference - lp
    value = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.expm1() - d}[
        estimator
    ]()
    if gradient == "direct":
        return value
    weight = drift.detach().exp().clamp(max=5.0)
    surrogate = weight * -d.detach() * lp
    return value.detach() + surrogate - surrogate.detach()


def sequence_means(values: Tensor, mask: Tensor, sequences: Tensor | None) -> Tensor:
    """For each token, the mean of ``values`` over its sequence's tokens (0 where masked out)."""
    total, count = _per_sequence(values, mask, sequences)
    return total / count


def _per_sequence(values: Tensor, mask: Tensor, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each token, the sum over its sequence, and how many tokens that has (at least 1)."""
    if sequences is None:
        raise ValueError("flat tensors need ``sequences`` for anything at the level of a sequence")
    index = sequences.reshape(-1)
    size = int(index.max()) + 1 if index.numel() else 0
    sums = values.new_zeros(size).index_add(0, index, _masked(values, mask).reshape(-1))
    counts = values.new_zeros(size).index_add(0, index, mask.reshape(-1).to(values.dtype))
    return sums[index].reshape(values.shape), counts.clamp(min=1)[index].reshape(values.shape)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _number(options: Options, name: str) -> float:
    return float(options[name])


def _clip_bounds(options: Options) -> tuple[float, float]:
    low, high = _number(options, "clip_low_threshold"), _number(options, "clip_high_threshold")
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"clip thresholds are ratios, low <= 1 <= high; got {low} and {high}")
    return low, high


# ---- what is reported


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
