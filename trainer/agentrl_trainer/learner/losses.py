"""Compute the losses of a policy, token by token, summed: pure functions of tensors.

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

where clip has the absolute bounds ``clip_low_threshold`` and ``clip_high_threshold``. These are
sums, not means: the caller divides by the tokens of the whole optimizer step.

Around each formula, in this order (``Loss.__call__``): the off-policy correction multiplies a
token's term, the KL to a reference is added to it, the weight of its token multiplies both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from agentrl_trainer.learner.loss_options import (
    ClipOptions,
    CorrectionOptions,
    DppoOptions,
    DroOptions,
    GspoOptions,
    KlOptions,
    LossConfig,
    Options,
    PpoOptions,
    parse_loss_options,
)

Sums = dict[str, Tensor]
"""0-d detached tensors. Over micro-batches they add up, but those named ``*_max`` take the max."""

D = TypeVar("D")
CustomLoss: TypeAlias = Callable[[Sequence[D], list[Tensor]], tuple[Tensor, Mapping[str, float]]]
"""``(data, logprobs) -> (loss, metrics)``, a differentiable function of the log-probs.

``logprobs`` holds one tensor for each datum or row of ``data``. Of a ``TrainingRow`` it has the
shape [tokens of the row] and is 0 where nothing trains; of a client's ``Datum`` it is aligned with
the targets, [T]. The loss counts as it is: divide it yourself."""


def custom_slopes(
    data: Sequence[D], logprobs: Sequence[list[float]], function: CustomLoss[D]
) -> tuple[float, dict[str, float], list[list[float]]]:
    """Return a custom loss, its metrics, and its gradient by each log-prob.

    Raises:
        ValueError: the loss is no scalar that depends on the log-probs.
    """
    given = [torch.tensor(row, requires_grad=True) for row in logprobs]
    loss, metrics = function(data, given)
    if loss.dim() != 0 or not loss.requires_grad:
        raise ValueError("a custom loss must return a scalar that depends on the log-probs")
    grads = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
    return loss.item(), dict(metrics), [grad.tolist() for grad in grads]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a formula sees: tensors [N], one entry for each token."""

    lp: Tensor
    log_ratio: Tensor  # lp minus the log-prob of the policy that ratios are taken against
    drift: Tensor  # lp minus the sampler's log-prob
    advantages: Tensor
    sequences: Tensor | None  # int64: the sequence of each token, from 0


Formula = Callable[[Tokens, Any], tuple[Tensor, Tensor | None]]
"""Each token's term of the loss, and where the formula's clip or mask took effect."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A formula, and what goes around every formula.

    Called as ``(logprobs, sampling, advantages, config) -> (loss_sum, sums)``. These three tensors,
    and the optional ones, are [N]: of the tokens that train, and of no others.

    Optional:
        sequences: int64, the sequence of each token.
        weights: of each token's term, for length normalization.
        proximal: log-probs of the policy at the start of the step. Ratios are taken against it
            instead of the sampler's, as in decoupled PPO (arXiv:2110.00641); the correction then
            covers the way from the sampler to it.
        reference: log-probs under the policy to stay close to; needed if ``kl_coef`` is not 0.

    Raises:
        ValueError: an option is unknown, out of bounds, or lacks its tensor.
    """

    name: str
    formula: Formula

    def __call__(
        self,
        logprobs: Tensor,
        sampling: Tensor,
        advantages: Tensor,
        config: LossConfig,
        *,
        sequences: Tensor | None = None,
        weights: Tensor | None = None,
        proximal: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, Sums]:
        options = parse_loss_options(self.name, config)
        drift = logprobs - sampling
        against = sampling if proximal is None else proximal
        corrects = options.correction.mode != "none"
        if corrects and proximal is None:
            against = logprobs.detach()  # the step's first update: its policy is the proximal one
        tokens = Tokens(logprobs, logprobs - against, drift, advantages, sequences)
        term, clipped = self.formula(tokens, options.own)
        sums = token_sums(logprobs, drift)
        if clipped is not None:
            sums["clipped"] = clipped.sum()
        if corrects:
            gap = (against - sampling).detach()
            correction, dropped = correction_weights(gap, sequences, options.correction)
            term = term * correction
            sums["correction"] = correction.sum()
            sums["dropped"] = dropped.sum()
        if options.kl.coef:
            if reference is None:
                raise ValueError("kl_coef needs the reference's log-probs: Learner.with_reference")
            kl = kl_penalty(logprobs, reference, drift, options.kl)
            term = term + options.kl.coef * kl
            sums["kl_reference"] = kl.detach().sum()
        if weights is not None:
            term = term * weights
        return term.sum(), sums


# ---- the formulas


def cross_entropy(tokens: Tokens, options: Options) -> tuple[Tensor, None]:
    """Weight the negative log-likelihood, -sum w * lp: maximum likelihood where the weights are 1
    (https://tinker-docs.thinkingmachines.ai/losses). Advantages are the weights; ``sampling`` only
    enters metrics."""
    return -(tokens.lp * tokens.advantages), None


def importance_sampling(tokens: Tokens, options: Options) -> tuple[Tensor, None]:
    """Compute the policy gradient's objective for tokens sampled from q: PPO without its clip,
    L^CPI of arXiv:1707.06347, equation 6, after Kakade and Langford 2002 ("Approximately optimal
    approximate reinforcement learning"). Tinker's name and sum
    (https://tinker-docs.thinkingmachines.ai/losses). On policy its gradient is that of
    ``-sum A * lp``, REINFORCE: Williams 1992, doi:10.1007/BF00992696."""
    return -(tokens.log_ratio.exp() * tokens.advantages), None


def ppo(tokens: Tokens, options: PpoOptions) -> tuple[Tensor, Tensor]:
    """Compute PPO's pessimistic clipped objective: arXiv:1707.06347, equation 7. The bounds need
    not be symmetric: DAPO's clip-higher, arXiv:2503.14476, is 0.8 and 1.28.

    ``dual_clip_threshold`` c > 1 bounds the loss of tokens with A < 0 whose ratio has exploded:
    max(min(r * A, clip(r) * A), c * A), arXiv:1912.09729, equation 5; 0 is off. A token counts as
    clipped where it has no gradient.
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    low, high = options.clip_low_threshold, options.clip_high_threshold
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    objective = torch.minimum(plain, clipped)
    bites = clipped < plain
    if options.dual_clip_threshold:
        floor = options.dual_clip_threshold * advantages
        exploded = (advantages < 0) & (objective < floor)
        objective = torch.where(exploded, floor, objective)
        bites = bites | exploded
    return -objective, bites


def cispo(tokens: Tokens, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """Clip importance *weights*, so that every token keeps a gradient: MiniMax-M1,
    arXiv:2506.13585, equation 4. With bounds 0 and 5 it is truncated importance sampling."""
    low, high = options.clip_low_threshold, options.clip_high_threshold
    ratio = tokens.log_ratio.detach().exp()
    term = -(ratio.clamp(low, high) * tokens.lp * tokens.advantages)
    return term, (ratio < low) | (ratio > high)


def dro(tokens: Tokens, options: DroOptions) -> tuple[Tensor, None]:
    """Optimize the reward directly: arXiv:2405.19107, token-wise as in Tinker. ``beta`` weights
    the square that holds the policy near the sampler's."""
    square = 0.5 * options.beta * tokens.drift.square()
    return -(tokens.lp * tokens.advantages - square), None


def gspo(tokens: Tokens, options: GspoOptions) -> tuple[Tensor, Tensor]:
    """Clip the *sequence's* ratio s = exp(mean of its log-ratios): GSPO, arXiv:2507.18071.

    In the paper's GSPO-token form (equation 14), so that advantages may differ along a sequence;
    where they do not, value and gradient are GSPO's (equation 5) times the sequence's length.
    """
    low, high = options.clip_low_threshold, options.clip_high_threshold
    total, count = _per_sequence(tokens.log_ratio.detach(), tokens.sequences)
    # Each token has the sequence's ratio, and a gradient of its own.
    ratio = (total / count + tokens.log_ratio - tokens.log_ratio.detach()).exp()
    plain = ratio * tokens.advantages
    clipped = ratio.clamp(low, high) * tokens.advantages
    return -torch.minimum(plain, clipped), clipped < plain


def dppo(tokens: Tokens, options: DppoOptions) -> tuple[Tensor, Tensor]:
    """Bound the change of probability instead of the ratio: DPPO with the binary approximation,
    arXiv:2602.04879. Tokens outside of the trust region that would be pushed further out have no
    gradient.

    ``divergence`` tv: |p - q| of the sampled token; kl: KL of the two Bernoulli distributions
    "this token or another", q against p. ``divergence_low`` bounds it where p < q and A < 0,
    ``divergence_high`` where p > q and A > 0.
    """
    lp, advantages = tokens.lp.detach(), tokens.advantages
    old = lp - tokens.log_ratio.detach()
    divergence = _bernoulli_divergence(lp, old, options.divergence)
    too_high = (divergence > options.divergence_high) & (lp > old) & (advantages > 0)
    too_low = (divergence > options.divergence_low) & (lp < old) & (advantages < 0)
    outside = too_high | too_low
    objective = tokens.log_ratio.exp() * advantages
    return -objective.masked_fill(outside, 0.0), outside


def _bernoulli_divergence(lp: Tensor, old: Tensor, kind: str) -> Tensor:
    p, q = lp.exp(), old.exp()
    if kind == "tv":
        return (p - q).abs()
    # Where q is 1 the other outcome has no mass: x log x goes to 0.
    other_p, other_q = (1 - p).clamp(min=1e-12), (1 - q).clamp(min=0.0)
    rest = torch.where(other_q > 0, other_q * (other_q.clamp(min=1e-30) / other_p).log(), 0.0)
    return q * (old - lp) + rest


LOSSES: dict[str, Loss] = {
    formula.__name__: Loss(formula.__name__, formula)
    for formula in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo, dppo)
}


# ---- around the formulas


def correction_weights(
    gap: Tensor, sequences: Tensor | None, options: CorrectionOptions
) -> tuple[Tensor, Tensor]:
    """Compute importance weights for tokens that another policy sampled, bounded at the tail.

    ``gap``: the proximal policy's log-probs minus the sampler's. A token's
    weight is exp(gap); at level ``sequence`` the product of its sequence's, at ``geometric`` their
    geometric mean. ``truncate`` clamps it to the bounds (truncated importance sampling: Ionides
    2008, doi:10.1198/106186008X320456; of a policy's past: Espeholt et al., arXiv:1802.01561; for
    samplers that differ slightly from the trainer: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"). ``mask`` gives tokens, or whole sequences, beyond
    the bounds weight 0 (masked importance sampling, as in IcePop, arXiv:2510.18855, and TRL's
    ``*_mask`` modes).

    Returns the weights and where a bound took effect.
    """
    if options.level != "token":
        gap, count = _per_sequence(gap, sequences)
        gap = gap / count if options.level == "geometric" else gap
    weight = gap.exp()
    beyond = (weight < options.low) | (weight > options.high)
    if options.mode == "mask":
        return weight.masked_fill(beyond, 0.0), beyond
    return weight.clamp(options.low, options.high), beyond


def kl_penalty(lp: Tensor, reference: Tensor, drift: Tensor, options: KlOptions) -> Tensor:
    """Estimate KL(policy || reference) for each token, from a token that q sampled.

    With d = log reference - lp (http://joschu.net/blog/kl-approx.html):
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

    The gradient of the KL is E[(lp - log reference) * grad lp], which is k2's own gradient; k1's
    own is zero on average and k3's is that of the reverse KL (arXiv:2506.09477, arXiv:2510.01555).
    ``unbiased`` has the estimator's value and that gradient, weighted by exp(``drift``) (the policy
    over q, up to 5) since q sampled; ``direct`` differentiates the estimator, as GRPO did.
    """
    d = reference - lp
    if options.estimator == "k1":
        value = -d
    elif options.estimator == "k2":
        value = d.square() / 2
    else:
        value = d.expm1() - d
    if options.gradient == "direct":
        return value
    weight = drift.detach().exp().clamp(max=5.0)
    surrogate = weight * -d.detach() * lp
    return value.detach() + surrogate - surrogate.detach()


def _per_sequence(values: Tensor, sequences: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum over each token's sequence, and count its tokens."""
    if sequences is None:
        raise ValueError("options at the level of a sequence need ``sequences``")
    size = int(sequences.max()) + 1 if sequences.numel() else 0
    sums = values.new_zeros(size).index_add(0, sequences, values)
    counts = sequences.bincount(minlength=size)
    return sums[sequences], counts[sequences]


# ---- what is reported


def token_sums(lp: Tensor, log_ratio: Tensor) -> Sums:
    """Sum what every loss reports.

    ``kl_k3`` estimates KL(q || policy) from tokens sampled by q, and is never negative
    (http://joschu.net/blog/kl-approx.html).
    """
    lp, log_ratio = lp.detach(), log_ratio.detach()
    ratio, difference = log_ratio.exp(), log_ratio.abs()
    zero = lp.new_zeros(())
    return {
        "tokens": torch.tensor(len(lp)),
        "logprob": lp.sum(),
        "ratio": ratio.sum(),
        "ratio_max": ratio.max() if len(lp) else zero,
        "clipped": zero,
        # expm1 keeps the digits that exp(x) - 1 would lose where trainer and sampler agree.
        "kl_k3": (log_ratio.expm1() - log_ratio).sum(),
        "difference": difference.sum(),
        "difference_max": difference.max() if len(lp) else zero,
    }


def add_sums(total: Sums, part: Sums) -> Sums:
    """Merge the sums of two micro-batches."""
    merged = dict(total)
    for name, value in part.items():
        join = torch.maximum if name.endswith("_max") else torch.add
        merged[name] = join(merged[name], value) if name in merged else value
    return merged
