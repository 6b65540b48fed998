"""Losses against an obvious float64 loop, and gradients against finite differences."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_trainer.learner.loss_options import KlOptions, flat_name, parse_loss_options
from agentrl_trainer.learner.losses import LOSSES, Sums, add_sums, kl_penalty

N = 40
SEQUENCES = [i // 9 for i in range(N)]  # the last one is shorter
Config = dict[str, float | str]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def obvious_term(
    name: str, o: Any, lp: float, frozen: float, old: float, q: float, a: float, mean_gap: float
) -> float:
    """One token's term. ``frozen``: lp where a formula stops the gradient; ``q``: the sampler's."""
    r = math.exp(lp - old)
    if name == "cross_entropy":
        return -a * lp
    if name == "importance_sampling":
        return -r * a
    if name == "dro":
        return -(lp * a - o.beta / 2 * (lp - q) ** 2)
    if name == "dppo":
        p, q = math.exp(frozen), math.exp(old)
        divergence = abs(p - q)
        if o.divergence == "kl":
            divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        up = a > 0 and p > q and divergence > o.divergence_high
        down = a < 0 and p < q and divergence > o.divergence_low
        return 0.0 if up or down else -r * a
    low, high = o.clip_low_threshold, o.clip_high_threshold
    if name == "ppo":
        loss, c = -min(r * a, clip(r, low, high) * a), o.dual_clip_threshold
        return min(loss, -c * a) if c and a < 0 else loss
    if name == "cispo":
        return -clip(math.exp(frozen - old), low, high) * lp * a
    assert name == "gspo"
    s = math.exp(mean_gap) * math.exp(lp - frozen)
    return -min(s * a, clip(s, low, high) * a)


K = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}


def obvious(
    name: str,
    lps: list[float],
    qs: list[float],
    advantages: list[float],
    config: Config,
    *,
    frozen: list[float] | None = None,
    sequences: list[int] | None = None,
    weights: list[float] | None = None,
    proximal: list[float] | None = None,
    reference: list[float] | None = None,
) -> float:
    """The formulas of the papers, written down again, in a plain loop.

    A gradient is that of ``lps`` alone: what a formula takes as a constant comes from ``frozen``.
    """
    o: Any = parse_loss_options(name, config)
    frozen = lps if frozen is None else frozen
    sequences = [0] * len(lps) if sequences is None else sequences
    olds = proximal or (qs if o.correction.mode == "none" else frozen)
    members = [[j for j, s in enumerate(sequences) if s == one] for one in sequences]
    total = 0.0
    for i, (lp, a) in enumerate(zip(lps, advantages, strict=True)):
        mean_gap = sum(frozen[j] - olds[j] for j in members[i]) / len(members[i])
        term = obvious_term(name, o.own, lp, frozen[i], olds[i], qs[i], a, mean_gap)
        if o.correction.mode != "none":
            gaps = [olds[j] - qs[j] for j in members[i]]
            mean = sum(gaps) / len(gaps)
            exponents = {"token": olds[i] - qs[i], "sequence": sum(gaps), "geometric": mean}
            w = math.exp(exponents[o.correction.level])
            if o.correction.mode == "truncate":
                w = clip(w, o.correction.low, o.correction.high)
            term *= w if o.correction.low <= w <= o.correction.high else 0.0
        if o.kl.coef:
            assert reference is not None
            if o.kl.gradient == "direct":
                kl = K[o.kl.estimator](reference[i] - lp)
            else:
                d = reference[i] - frozen[i]
                # Plus a term whose value is 0 and whose slope is r * (lp - reference).
                slope = min(math.exp(frozen[i] - qs[i]), 5.0) * -d
                kl = K[o.kl.estimator](d) + slope * (lp - frozen[i])
            term += o.kl.coef * kl
        total += term * (1.0 if weights is None else weights[i])
    return total


def obvious_gradient(name: str, lps: list[float], *rest: Any, **more: Any) -> list[float]:
    """Central differences, with all that the formula takes as constant held where it was."""
    h = 1e-6

    def at(i: int, by: float) -> float:
        moved = [*lps[:i], lps[i] + by, *lps[i + 1 :]]
        return obvious(name, moved, *rest, frozen=lps, **more)

    return [(at(i, h) - at(i, -h)) / (2 * h) for i in range(len(lps))]


def sample(seed: int, spread: float = 0.4) -> tuple[list[float], list[float], list[float]]:
    rng = random.Random(seed)
    lps = [-rng.expovariate(1.0) for _ in range(N)]
    qs = [min(lp + rng.gauss(0, spread), -1e-3) for lp in lps]
    return lps, qs, [rng.gauss(0, 1) for _ in range(N)]


def near(values: list[float], spread: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [value + rng.gauss(0, spread) for value in values]


def tensors(*lists: list[float]) -> list[Tensor]:
    return [torch.tensor(values, dtype=torch.float64) for values in lists]


def gradient_of(loss: Tensor, lp: Tensor) -> list[float]:
    return torch.autograd.grad(loss, lp)[0].tolist()


def check(name: str, config: Config, seed: int, **columns: list[Any]) -> Sums:
    """Value and gradient of the loss are those of the slow loop; returns its sums."""
    lps, qs, advantages = sample(seed)
    lp, q, a = tensors(lps, qs, advantages)
    lp.requires_grad_(True)
    given = {k: torch.tensor(v) if k == "sequences" else tensors(v)[0] for k, v in columns.items()}
    loss, sums = LOSSES[name](lp, q, a, config, **given)
    arguments = (lps, qs, advantages, config)
    assert loss.item() == pytest.approx(obvious(name, *arguments, **columns), rel=1e-12)
    expected = obvious_gradient(name, *arguments, **columns)
    assert gradient_of(loss, lp) == pytest.approx(expected, rel=1e-5, abs=1e-8)
    return sums


CASES: list[tuple[str, Config]] = [
    *((name, {}) for name in sorted(LOSSES)),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28, "dual_clip_threshold": 1.4}),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}),
    ("dro", {"beta": 0.7}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dppo", {"divergence": "kl", "divergence_low": 0.01, "divergence_high": 0.02}),
    ("dppo", {"divergence_low": 0.05, "divergence_high": 0.1}),
]


@pytest.mark.parametrize(("name", "config"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_gradients(name: str, config: Config, seed: int) -> None:
    check(name, config, seed, sequences=SEQUENCES)


def test_defaults() -> None:
    shared = {
        "kl_coef": 0.0, "kl_estimator": "k3", "kl_gradient": "unbiased", "correction": "none",
        "correction_level": "token", "correction_low": 0.0, "correction_high": 2.0,
    }  # fmt: skip
    clips = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    for name, own in {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {**clips, "dual_clip_threshold": 0.0},
        "cispo": clips,
        "dro": {"beta": 0.05},
        "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        "dppo": {"divergence": "tv", "divergence_low": 0.2, "divergence_high": 0.2},
    }.items():
        parts = parse_loss_options(name, {})
        found = {
            flat_name(part, option): value
            for part in ("own", "kl", "correction")
            for option, value in getattr(parts, part)
        }
        assert found == {**shared, **own}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_weights_and_a_proximal_policy(name: str) -> None:
    _, qs, advantages = sample(2)
    weights = [abs(x) for x in advantages]
    check(name, {}, 2, sequences=SEQUENCES, weights=weights, proximal=near(qs, 0.2, 9))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_off_policy_correction(name: str, how: str, level: str, decoupled: bool) -> None:
    _, qs, _ = sample(3)
    columns: dict[str, list[Any]] = {"proximal": near(qs, 0.4, 3)} if decoupled else {}
    config: Config = {
        "correction": how,
        "correction_level": level,
        "correction_low": {"token": 0.7, "sequence": 0.4, "geometric": 0.9}[level],
        "correction_high": {"token": 1.3, "sequence": 2.0, "geometric": 1.1}[level],
    }
    sums = check(name, config, 3, sequences=SEQUENCES, **columns)
    assert 0 < int(sums["dropped"]) < N
    assert float(sums["correction"]) > 0


@pytest.mark.parametrize("estimator", K)
@pytest.mark.parametrize("gradient", ["unbiased", "direct"])
@pytest.mark.parametrize("name", ["ppo", "cross_entropy"])
def test_kl_to_the_reference(name: str, gradient: str, estimator: str) -> None:
    lps, _, _ = sample(5)
    reference = near(lps, 0.5, 5)
    config: Config = {"kl_coef": 0.3, "kl_estimator": estimator, "kl_gradient": gradient}
    sums = check(name, config, 5, reference=reference)
    expected = sum(K[estimator](r - lp) for r, lp in zip(reference, lps, strict=True))
    assert float(sums["kl_reference"]) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", K)
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_expected_gradient_of_the_penalty_is_that_of_the_kl(
    estimator: Any, shift: float
) -> None:
    """Over every token of a small vocabulary, with its probability under the sampler, rather than
    by drawing: the mean gradient is exactly that of KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits, other, move = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in "abc")
    logits.requires_grad_(True)
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    exact = gradient_of((policy.exp() * (policy - reference)).sum(), logits)
    sampler = (logits.detach() + shift * move).log_softmax(0)
    lp = logits.log_softmax(0)
    penalty = kl_penalty(lp, reference, lp.detach() - sampler, KlOptions(estimator=estimator))
    assert gradient_of((sampler.exp() * penalty).sum(), logits) == pytest.approx(exact)


@pytest.mark.parametrize(("ratio", "weight"), [(0.2, 0.2), (4.9, 4.9), (5.1, 5.0), (100.0, 5.0)])
def test_the_penaltys_importance_weight_is_at_most_5(ratio: float, weight: float) -> None:
    """Its gradient is that weight times (lp - log reference)."""
    (lp,) = tensors([-1.0])
    lp.requires_grad_(True)
    drift = torch.tensor([ratio], dtype=torch.float64).log()
    penalty = kl_penalty(lp, lp.detach() - 0.5, drift, KlOptions())
    assert gradient_of(penalty.sum(), lp) == pytest.approx([0.5 * weight])


@pytest.mark.parametrize(
    ("dual", "lps", "advantages", "moves"),
    [
        (0.0, [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0], [False, True, True, False]),
        (3.0, [3.0, 0.5, 3.0], [-1.0, -1.0, 1.0], [False, True, False]),
    ],
)
def test_ppo_stops_the_gradient_only_where_the_clip_is_the_pessimistic_choice(
    dual: float, lps: list[float], advantages: list[float], moves: list[bool]
) -> None:
    lp, q, a = tensors(lps, [0.0] * len(lps), advantages)
    lp.requires_grad_(True)
    loss, sums = LOSSES["ppo"](lp, q, a, {"dual_clip_threshold": dual})
    assert [g != 0 for g in gradient_of(loss, lp)] == moves
    assert int(sums["clipped"]) == 2
    if dual:
        assert loss.item() == pytest.approx(3.0 + math.exp(0.5) - 1.2)


def test_metrics_of_the_whole_and_of_its_parts() -> None:
    lps, qs, advantages = sample(5)
    _, sums = LOSSES["cispo"](*tensors(lps, qs, advantages), {})
    gaps = [lp - q for lp, q in zip(lps, qs, strict=True)]
    ratios = [math.exp(gap) for gap in gaps]
    expected = {
        "tokens": N, "logprob": sum(lps), "ratio": sum(ratios), "ratio_max": max(ratios),
        "clipped": sum(not 0.8 <= r <= 1.2 for r in ratios),
        "kl_k3": sum(r - 1 - g for r, g in zip(ratios, gaps, strict=True)),
        "difference": sum(map(abs, gaps)), "difference_max": max(map(abs, gaps)),
    }  # fmt: skip
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected)
    assert sums["clipped"] > 0
    merged: Sums = {}
    for part in (slice(0, 7), slice(7, 30), slice(30, N)):
        columns = (x[part] for x in tensors(lps, qs, advantages))
        merged = add_sums(merged, LOSSES["cispo"](*columns, {})[1])
    assert {name: float(value) for name, value in merged.items()} == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_nothing_at_all(name: str) -> None:
    empty = torch.zeros(0)
    loss, sums = LOSSES[name](empty, empty, empty, {}, sequences=empty.long())
    assert (loss.item(), int(sums["tokens"])) == (0.0, 0)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppo", {"clip_high": 1.3}, "clip_high"),
        ("importance_sampling", {"clip_low_threshold": 0.8}, "clip_low_threshold"),
        ("ppo", {"clip_high_threshold": 0.28}, "clip_high_threshold: .* or equal to 1"),
        ("ppo", {"dual_clip_threshold": 1.1}, "dual_clip_threshold"),
        ("ppo", {"kl_estimator": "k4"}, "kl_estimator: .*'k1', 'k2' or 'k3'"),
        ("ppo", {"kl_coef": 0.1}, "kl_coef needs the reference"),
        ("ppo", {"kl_coef": -0.1}, "kl_coef: .* or equal to 0"),
        ("dro", {"beta": math.nan}, "beta: .*finite number"),
        ("dro", {"beta": "0.1"}, "beta: .*valid number"),
        ("ppo", {"correction": "mask", "correction_high": 0.5}, "correction_high: "),
        ("dppo", {"divergence_low": 0.0}, "divergence_low: .*greater than 0"),
        ("gspo", {}, "sequences"),
    ],
)
def test_an_option_that_cannot_be_is_refused(name: str, config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES[name](*tensors(*sample(0)), config)
