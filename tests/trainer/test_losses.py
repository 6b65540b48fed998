"""Against an obvious float64 loop, and gradients against finite differences."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_trainer.learner.loss_options import KlOptions
from agentrl_trainer.learner.losses import LOSSES, Sums, add_sums, kl_penalty

N = 40


DEFAULTS: dict[str, dict[str, float | str]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "dual_clip_threshold": 0.0},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    "dppo": {"divergence": "tv", "divergence_low": 0.2, "divergence_high": 0.2},
}
SHARED_DEFAULTS: dict[str, float | str] = {
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_gradient": "unbiased",
    "correction": "none",
    "correction_level": "token",
    "correction_low": 0.0,
    "correction_high": 2.0,
}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def obvious_term(
    name: str, o: dict[str, Any], lp: float, frozen: float, old: float, a: float, mean_gap: float
) -> float:
    """One token's term. ``frozen`` is lp where a formula stops the gradient."""
    r = math.exp(lp - old)
    low, high = o.get("clip_low_threshold", 0.0), o.get("clip_high_threshold", 0.0)
    if name == "cross_entropy":
        return -a * lp
    if name == "importance_sampling":
        return -r * a
    if name == "ppo":
        loss = -min(r * a, clip(r, low, high) * a)
        c = o["dual_clip_threshold"]
        return min(loss, -c * a) if c and a < 0 else loss
    if name == "cispo":
        return -clip(math.exp(frozen - old), low, high) * lp * a
    if name == "dro":
        return -(lp * a - o["beta"] / 2 * (lp - old) ** 2)
    if name == "gspo":
        s = math.exp(mean_gap) * math.exp(lp - frozen)
        return -min(s * a, clip(s, low, high) * a)
    if name == "dppo":
        p, q = math.exp(frozen), math.exp(old)
        if o["divergence"] == "tv":
            divergence = abs(p - q)
        else:
            divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        if a > 0 and p > q and divergence > o["divergence_high"]:
            return 0.0
        if a < 0 and p < q and divergence > o["divergence_low"]:
            return 0.0
        return -r * a
    raise AssertionError(name)


def obvious(
    name: str,
    lps: list[float],
    qs: list[float],
    advantages: list[float],
    config: dict[str, Any],
    *,
    frozen: list[float] | None = None,
    sequences: list[int] | None = None,
    weights: list[float] | None = None,
    proximal: list[float] | None = None,
    reference: list[float] | None = None,
) -> float:
    """The formulas of DESIGN.md section 5 and of the papers, written down again, in a plain loop.

    A gradient is that of ``lps`` alone: what a formula takes as a constant comes from ``frozen``.
    """
    o = {**DEFAULTS[name], **SHARED_DEFAULTS, **config}
    frozen = lps if frozen is None else frozen
    sequences = [0] * len(lps) if sequences is None else sequences
    if proximal is not None:
        olds = proximal
    elif o["correction"] != "none":
        olds = frozen
    else:
        olds = qs
    members = [[j for j, s in enumerate(sequences) if s == one] for one in sequences]
    total = 0.0
    for i, (lp, a) in enumerate(zip(lps, advantages, strict=True)):
        mean_gap = sum(frozen[j] - olds[j] for j in members[i]) / len(members[i])
        term = obvious_term(name, o, lp, frozen[i], olds[i], a, mean_gap)
        if o["correction"] != "none":
            gaps = [olds[j] - qs[j] for j in members[i]]
            exponent = {
                "token": olds[i] - qs[i],
                "sequence": sum(gaps),
                "geometric": sum(gaps) / len(gaps),
            }[o["correction_level"]]
            w = math.exp(exponent)
            if o["correction"] == "truncate":
                w = clip(w, o["correction_low"], o["correction_high"])
            elif not o["correction_low"] <= w <= o["correction_high"]:
                w = 0.0
            term *= w
        if o["kl_coef"]:
            assert reference is not None
            d, d_frozen = reference[i] - lp, reference[i] - frozen[i]
            if o["kl_gradient"] == "direct":
                kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[o["kl_estimator"]]
            else:
                kl = {
                    "k1": -d_frozen,
                    "k2": d_frozen**2 / 2,
                    "k3": math.exp(d_frozen) - 1 - d_frozen,
                }[o["kl_estimator"]]
                # A term whose value is 0 and whose slope is r * (lp - reference).
                kl += min(math.exp(frozen[i] - qs[i]), 5.0) * -d_frozen * (lp - frozen[i])
            term += o["kl_coef"] * kl
        total += term * (1.0 if weights is None else weights[i])
    return total


def obvious_gradient(name: str, lps: list[float], *rest: Any, **more: Any) -> list[float]:
    """Central differences, with all that the formula takes as constant held where it was."""
    gradient = []
    h = 1e-6
    for i in range(len(lps)):
        up, down = list(lps), list(lps)
        up[i] += h
        down[i] -= h
        difference = obvious(name, up, *rest, frozen=lps, **more) - obvious(
            name, down, *rest, frozen=lps, **more
        )
        gradient.append(difference / (2 * h))
    return gradient


def sample(seed: int, spread: float = 0.4) -> tuple[list[float], list[float], list[float]]:
    rng = random.Random(seed)
    lps = [-rng.expovariate(1.0) for _ in range(N)]
    qs = [min(lp + rng.gauss(0, spread), -1e-3) for lp in lps]
    return lps, qs, [rng.gauss(0, 1) for _ in range(N)]


def tensors(*lists: list[float]) -> list[Tensor]:
    return [torch.tensor(values, dtype=torch.float64) for values in lists]


ALL = torch.ones(N, dtype=torch.bool)


SEQUENCES = [i // 9 for i in range(N)]  # the last one is shorter

CASES: list[tuple[str, dict[str, float | str]]] = [
    *((name, {}) for name in sorted(LOSSES)),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28, "dual_clip_threshold": 1.4}),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}),
    ("dro", {"beta": 0.7}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dppo", {"divergence": "kl", "divergence_low": 0.01, "divergence_high": 0.02}),
    ("dppo", {"divergence_low": 0.05, "divergence_high": 0.1}),
]


def check(name: str, config: dict[str, float | str], seed: int, **columns: list[Any]) -> Sums:
    """Value and gradient of the loss are those of the slow loop; returns its sums."""
    lps, qs, advantages = sample(seed)
    lp, q, a = tensors(lps, qs, advantages)
    lp.requires_grad_(True)
    given = {k: torch.tensor(v) if k == "sequences" else tensors(v)[0] for k, v in columns.items()}
    loss, sums = LOSSES[name](lp, q, a, ALL, config, **given)
    loss.backward()
    arguments = (lps, qs, advantages, config)
    assert loss.item() == pytest.approx(obvious(name, *arguments, **columns), rel=1e-12)
    assert lp.grad is not None
    expected = obvious_gradient(name, *arguments, **columns)
    assert lp.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)
    return sums


@pytest.mark.parametrize(("name", "config"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_gradients(name: str, config: dict[str, float | str], seed: int) -> None:
    check(name, config, seed, sequences=SEQUENCES)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_weights_and_a_proximal_policy(name: str) -> None:
    rng = random.Random(9)
    _, qs, _ = sample(2)
    check(
        name,
        {},
        2,
        sequences=SEQUENCES,
        weights=[rng.random() for _ in range(N)],
        proximal=[q + rng.gauss(0, 0.2) for q in qs],
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_off_policy_correction(name: str, how: str, level: str, decoupled: bool) -> None:
    rng = random.Random(3)
    _, qs, _ = sample(3)
    columns: dict[str, list[Any]] = {"sequences": SEQUENCES}
    if decoupled:
        columns["proximal"] = [q + rng.gauss(0, 0.4) for q in qs]
    config: dict[str, float | str] = {
        "correction": how,
        "correction_level": level,
        "correction_low": {"token": 0.7, "sequence": 0.4, "geometric": 0.9}[level],
        "correction_high": {"token": 1.3, "sequence": 2.0, "geometric": 1.1}[level],
    }
    sums = check(name, config, 3, **columns)
    assert 0 < int(sums["dropped"]) < N
    assert float(sums["correction"]) > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["unbiased", "direct"])
@pytest.mark.parametrize("name", ["ppo", "cross_entropy"])
def test_kl_to_the_reference(name: str, gradient: str, estimator: str) -> None:
    rng = random.Random(5)
    lps, _, _ = sample(5)
    reference = [lp + rng.gauss(0, 0.5) for lp in lps]
    config: dict[str, float | str] = {
        "kl_coef": 0.3,
        "kl_estimator": estimator,
        "kl_gradient": gradient,
    }
    sums = check(name, config, 5, reference=reference)
    d = [r - lp for r, lp in zip(reference, lps, strict=True)]
    value = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    assert float(sums["kl_reference"]) == pytest.approx(sum(map(value[estimator], d)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_expected_gradient_of_the_penalty_is_that_of_the_kl(
    estimator: str, shift: float
) -> None:
    """Over every token of a small vocabulary, with its probability under the sampler, rather than
    by drawing: the mean gradient is exactly that of KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits, other, move = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in "abc")
    logits.requires_grad_(True)
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)

    sampler = (logits.detach() + shift * move).log_softmax(0)
    penalty = kl_penalty(
        logits.log_softmax(0),
        reference,
        policy.detach() - sampler,
        KlOptions(kl_estimator=estimator),  # type: ignore[arg-type]
    )
    (found,) = torch.autograd.grad((sampler.exp() * penalty).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("ratio", "weight"), [(0.2, 0.2), (4.9, 4.9), (5.1, 5.0), (100.0, 5.0)])
def test_the_penaltys_importance_weight_is_at_most_5(ratio: float, weight: float) -> None:
    """Its gradient is that weight times (lp - log reference)."""
    lp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    drift = torch.tensor([ratio], dtype=torch.float64).log()
    penalty = kl_penalty(lp, lp.detach() - 0.5, drift, KlOptions())
    penalty.sum().backward()
    assert lp.grad is not None
    assert lp.grad.item() == pytest.approx(0.5 * weight)


def test_gspo_with_one_advantage_is_the_formula_of_the_paper() -> None:
    """Equation 5, differentiated through the sequence's ratio, times the sequence's length."""
    lps, qs, _ = sample(7, spread=0.02)
    lp, q = tensors(lps, qs)
    for a in (1.5, -0.5):
        config = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
        one = lp.clone().requires_grad_(True)
        loss, _ = LOSSES["gspo"](
            one, q, torch.full_like(q, a), ALL, config, sequences=torch.zeros(N, dtype=torch.int64)
        )
        loss.backward()
        two = lp.clone().requires_grad_(True)
        s = (two - q).mean().exp()
        paper = -N * torch.minimum(s * a, s.clamp(0.99, 1.01) * a)
        paper.backward()
        assert loss.item() == pytest.approx(paper.item(), rel=1e-12)
        torch.testing.assert_close(one.grad, two.grad)


def test_a_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    q = torch.zeros(3, dtype=torch.float64)
    lp = torch.tensor([3.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    mask = torch.ones(3, dtype=torch.bool)
    loss, sums = LOSSES["ppo"](lp, q, a, mask, {"dual_clip_threshold": 3.0})
    loss.backward()
    assert loss.item() == pytest.approx(3.0 + math.exp(0.5) - 1.2)
    assert lp.grad is not None
    assert [g != 0 for g in lp.grad.tolist()] == [False, True, False]
    assert int(sums["clipped"]) == 2


def test_rows_are_the_sequences_of_padded_tensors() -> None:
    lps, qs, advantages = sample(8)
    flat = tensors(lps, qs, advantages)
    config = {"correction": "mask", "correction_level": "sequence", "correction_high": 1.5}
    rows = torch.tensor([0] * 15 + [1] * 25)
    loss, _ = LOSSES["gspo"](*flat, ALL, config, sequences=rows)
    mask = torch.zeros(2, 25, dtype=torch.bool)
    mask[0, :15] = mask[1] = True
    wide = []
    for values in flat:
        padded = torch.full((2, 25), math.nan, dtype=torch.float64)
        padded[mask] = values
        wide.append(padded)
    padded_loss, _ = LOSSES["gspo"](*wide, mask, config)
    assert padded_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    with pytest.raises(ValueError, match="sequences"):
        LOSSES["gspo"](*flat, ALL, {})


def test_ppo_stops_the_gradient_only_where_the_clip_is_the_pessimistic_choice() -> None:
    q = torch.zeros(4, dtype=torch.float64)
    lp = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    loss, sums = LOSSES["ppo"](lp, q, a, torch.ones(4, dtype=torch.bool), {})
    loss.backward()
    assert lp.grad is not None
    assert [g != 0 for g in lp.grad.tolist()] == [False, True, True, False]
    assert int(sums["clipped"]) == 2


def test_on_policy_importance_sampling_has_the_policy_gradient() -> None:
    lps, _, advantages = sample(3)
    lp, a = tensors(lps, advantages)
    lp.requires_grad_(True)
    loss, sums = LOSSES["importance_sampling"](lp, lp.detach(), a, ALL, {})
    loss.backward()
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-x for x in advantages])
    assert float(sums["kl_k3"]) == 0.0
    assert float(sums["ratio_max"]) == 1.0


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan, 1e30, -1e30])
def test_what_is_masked_has_no_effect(name: str, junk: float) -> None:
    """In padded form, with masked positions whose ratio would overflow."""
    lps, qs, advantages = sample(4)
    lp, q, a = tensors(lps, qs, advantages)
    lp.requires_grad_(True)
    one = torch.zeros(N, dtype=torch.int64)
    config: dict[str, float | str] = {"kl_coef": 0.1, "correction": "truncate"}
    if name == "cross_entropy":
        config = {}
    loss, sums = LOSSES[name](
        lp, q, a, ALL, config, sequences=one, weights=a.abs(), proximal=q + 0.1, reference=q - 0.2
    )
    loss.backward()

    mask = torch.zeros(2, N, dtype=torch.bool)
    mask[0] = True
    wide_lp = torch.stack([lp.detach(), torch.full_like(q, -1.0)]).requires_grad_(True)
    wide_q = torch.stack([q, torch.full_like(q, junk)])
    wide_a = torch.stack([a, torch.full_like(a, junk)])
    more = {
        key: torch.stack([values, torch.full_like(q, junk)])
        for key, values in {"weights": a.abs(), "proximal": q + 0.1, "reference": q - 0.2}.items()
    }
    wide_loss, wide_sums = LOSSES[name](wide_lp, wide_q, wide_a, mask, config, **more)
    wide_loss.backward()
    assert wide_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert wide_lp.grad is not None
    assert lp.grad is not None
    torch.testing.assert_close(wide_lp.grad[0], lp.grad)
    assert wide_lp.grad[1].tolist() == [0.0] * N
    for key, value in sums.items():
        assert float(wide_sums[key]) == pytest.approx(float(value), rel=1e-12), key


def test_metrics() -> None:
    lps, qs, advantages = sample(5)
    _, sums = LOSSES["cispo"](*tensors(lps, qs, advantages), ALL, {})
    ratios = [math.exp(lp - q) for lp, q in zip(lps, qs, strict=True)]
    gaps = [lp - q for lp, q in zip(lps, qs, strict=True)]
    assert int(sums["tokens"]) == N
    assert float(sums["logprob"]) == pytest.approx(sum(lps))
    assert float(sums["ratio"]) == pytest.approx(sum(ratios))
    assert float(sums["ratio_max"]) == pytest.approx(max(ratios))
    assert int(sums["clipped"]) == sum(not 0.8 <= r <= 1.2 for r in ratios) > 0
    assert float(sums["kl_k1"]) == pytest.approx(-sum(gaps))
    k3 = sum(r - 1 - g for r, g in zip(ratios, gaps, strict=True))
    assert float(sums["kl_k3"]) == pytest.approx(k3)
    assert float(sums["difference"]) == pytest.approx(sum(map(abs, gaps)))
    assert float(sums["difference_max"]) == pytest.approx(max(map(abs, gaps)))


def test_sums_of_parts_are_the_sums_of_the_whole() -> None:
    lp, q, a = tensors(*sample(6))
    _, whole = LOSSES["ppo"](lp, q, a, ALL, {})
    merged: Sums = {}
    for part in (slice(0, 7), slice(7, 30), slice(30, N)):
        _, sums = LOSSES["ppo"](lp[part], q[part], a[part], ALL[part], {})
        merged = add_sums(merged, sums)
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        assert float(merged[key]) == pytest.approx(float(value)), key


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_nothing_at_all(name: str) -> None:
    empty = torch.zeros(0)
    nobody = torch.zeros(0, dtype=torch.int64)
    loss, sums = LOSSES[name](
        empty, empty, empty, torch.zeros(0, dtype=torch.bool), {}, sequences=nobody
    )
    assert loss.item() == 0.0
    assert int(sums["tokens"]) == 0


def test_a_typo_in_the_options_is_refused() -> None:
    arguments = (*tensors(*sample(0)), ALL)
    with pytest.raises(ValueError, match="clip_high"):
        LOSSES["ppo"](*arguments, {"clip_high": 1.3})
    with pytest.raises(ValueError, match="clip_low_threshold"):
        LOSSES["importance_sampling"](*arguments, {"clip_low_threshold": 0.8})
    with pytest.raises(ValueError, match="low <= 1 <= high"):
        LOSSES["ppo"](*arguments, {"clip_low_threshold": 0.2, "clip_high_threshold": 0.28})
    with pytest.raises(ValueError, match="dual_clip_threshold"):
        LOSSES["ppo"](*arguments, {"dual_clip_threshold": 1.1})
    with pytest.raises(ValueError, match=r"kl_estimator must be one of .*'k4'"):
        LOSSES["ppo"](*arguments, {"kl_estimator": "k4"})
    with pytest.raises(ValueError, match="kl_coef needs the reference"):
        LOSSES["ppo"](*arguments, {"kl_coef": 0.1})
    with pytest.raises(ValueError, match="kl_coef must not be negative"):
        LOSSES["ppo"](*arguments, {"kl_coef": -0.1})
    with pytest.raises(ValueError, match="finite number"):
        LOSSES["dro"](*arguments, {"beta": math.nan})
    with pytest.raises(ValueError, match="correction bounds"):
        LOSSES["ppo"](*arguments, {"correction": "mask", "correction_high": 0.5})
    with pytest.raises(ValueError, match="divergence_low"):
        LOSSES["dppo"](*arguments, {"divergence_low": 0.0})
