"""Against an obvious float64 loop, and gradients against finite differences."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from agentrl_trainer.losses import LOSSES, Sums, add_sums

N = 40


def obvious(
    name: str, lps: list[float], qs: list[float], advantages: list[float], low: float, high: float
) -> float:
    """The formulas of DESIGN.md section 5, written down again."""
    total = 0.0
    for lp, q, a in zip(lps, qs, advantages, strict=True):
        r = math.exp(lp - q)
        clipped = min(max(r, low), high)
        if name == "cross_entropy":
            total -= a * lp
        elif name == "importance_sampling":
            total -= r * a
        elif name == "ppo":
            total -= min(r * a, clipped * a)
        elif name == "cispo":
            total -= clipped * lp * a
        else:
            raise AssertionError(name)
    return total


def obvious_gradient(
    name: str, lps: list[float], qs: list[float], advantages: list[float], low: float, high: float
) -> list[float]:
    """Central differences; cispo's clipped ratio is a constant, so it is held where it was."""
    gradient = []
    for lp, q, a in zip(lps, qs, advantages, strict=True):
        if name == "cispo":
            gradient.append(-min(max(math.exp(lp - q), low), high) * a)
            continue
        h = 1e-6
        up = obvious(name, [lp + h], [q], [a], low, high)
        down = obvious(name, [lp - h], [q], [a], low, high)
        gradient.append((up - down) / (2 * h))
    return gradient


def sample(seed: int, spread: float = 0.4) -> tuple[list[float], list[float], list[float]]:
    rng = random.Random(seed)
    lps = [-rng.expovariate(1.0) for _ in range(N)]
    qs = [lp + rng.gauss(0, spread) for lp in lps]
    return lps, qs, [rng.gauss(0, 1) for _ in range(N)]


def tensors(*lists: list[float]) -> list[Tensor]:
    return [torch.tensor(values, dtype=torch.float64) for values in lists]


ALL = torch.ones(N, dtype=torch.bool)


@pytest.mark.parametrize("thresholds", [None, (0.5, 1.1), (0.0, 5.0)])
@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_gradients(name: str, thresholds: tuple[float, float] | None, seed: int) -> None:
    config = {}
    if thresholds and name in ("ppo", "cispo"):
        config = dict(zip(("clip_low_threshold", "clip_high_threshold"), thresholds, strict=True))
    low, high = thresholds or (0.8, 1.2)
    lps, qs, advantages = sample(seed)
    lp, q, a = tensors(lps, qs, advantages)
    lp.requires_grad_(True)
    loss, _ = LOSSES[name](lp, q, a, ALL, config)
    loss.backward()
    assert loss.item() == pytest.approx(obvious(name, lps, qs, advantages, low, high), rel=1e-12)
    assert lp.grad is not None
    expected = obvious_gradient(name, lps, qs, advantages, low, high)
    assert lp.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8)


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
    loss, sums = LOSSES[name](lp, q, a, ALL, {})
    loss.backward()

    mask = torch.zeros(2, N, dtype=torch.bool)
    mask[0] = True
    wide_lp = torch.stack([lp.detach(), torch.full_like(q, -1.0)]).requires_grad_(True)
    wide_q = torch.stack([q, torch.full_like(q, junk)])
    wide_a = torch.stack([a, torch.full_like(a, junk)])
    wide_loss, wide_sums = LOSSES[name](wide_lp, wide_q, wide_a, mask, {})
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
    loss, sums = LOSSES[name](empty, empty, empty, torch.zeros(0, dtype=torch.bool), {})
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
