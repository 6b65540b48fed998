"""Success rates and pass@k with confidence intervals: what loop, commands and pages share.

Tasks are the independent units: they are what was drawn, and samples of one task resemble one
another. Intervals that count samples as independent are too narrow (Miller 2024, "Adding Error Bars
to Evals", arXiv:2411.00640, clustered standard errors).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance
from typing import NamedTuple

_Z95 = NormalDist().inv_cdf(0.975)


def wilson(rate: float, trials: float) -> tuple[float, float]:
    """Return the 95 % score interval of a success rate (Wilson 1927, "Probable inference").

    Unlike mean ± 1.96 standard errors it stays within 0..1, and is right for few trials and for
    rates near 0 and 1. ``trials`` may be an effective number, hence a fraction.
    """
    weight = _Z95**2 / trials
    center = (rate + weight / 2) / (1 + weight)
    half = _Z95 * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials)) / (1 + weight)
    # At a rate of 0 or 1, rounding may leave the rate a hair outside of its own interval.
    return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def task_interval(values: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of tasks' values in 0..1, each of ``samples`` samples.

    Wilson's interval, where each task counts as m (1 - m) / s² trials and m is the
    mean of the values and s² their variance (Kish 1965, "Survey Sampling": effective sample size;
    for the score interval: Korn & Graubard 1998). That is 1 where each task has one outcome;
    samples that disagree within tasks raise it, up to ``samples``.

    m and s² include two more tasks, one all right and one all wrong, so that a few tasks that
    agree are not taken for certain: of 24 tasks with all samples right the interval is that of 24
    of 24, 86 % to 100 %, where the standard error would be 0. In simulations (some
    are tests) it covers the true value in 95 % or more of evaluations, down to 10 tasks, where mean
    ± 1.96 standard errors falls below 80 % near 0 and 1. With one outcome per task it dips as
    Wilson's does, to about 90 % where fewer than one failure (or success) is to be expected.
    """
    smoothed = [*values, 0.0, 1.0]
    mean = fmean(smoothed)
    worth = min(mean * (1 - mean) / pvariance(smoothed, mean), samples)
    return wilson(fmean(values), len(values) * worth)


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Estimate, without bias, the chance that one of ``k`` ≤ ``samples`` samples succeeds.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", equation 1.
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


class Estimate(NamedTuple):
    """A rate and its 95 % interval, all in 0..1."""

    rate: float
    low: float
    high: float


def pass_estimates(tasks: Sequence[tuple[int, int]]) -> dict[int, Estimate]:
    """Estimate pass@k over tasks, for k = 1, 2, 4, ... and the samples that every task has.

    Args:
        tasks: successes and samples of each task; at least one task, and one sample of each.
    """
    samples = min(count for _, count in tasks)
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    chances = {k: [pass_at_k(successes, count, k) for successes, count in tasks] for k in ks}
    return {k: Estimate(fmean(each), *task_interval(each, samples)) for k, each in chances.items()}


def paired_p_value(differences: Sequence[int]) -> float:
    """Test whether the mean of paired differences is zero; return the two-sided p-value.

    The exact sign-flip permutation test (Fisher 1935, "The Design of Experiments", section 21):
    without an effect each difference is as likely negative as positive. The distribution of their
    sum over all sign flips comes from its characteristic function, the product of cos(d t), as in
    Pagano & Tritchler 1983, "On obtaining permutation distributions in polynomial time". Where
    every difference is -1, 0 or 1 it is McNemar's exact test (McNemar 1947), the two-sided binomial
    test of the tasks that changed.

    Args:
        differences: of each task, in units of one sample.
    """
    import numpy as np

    sizes = Counter(abs(one) for one in differences if one)
    most = sum(size * count for size, count in sizes.items())
    if not most:
        return 1.0
    angles = 2 * np.pi * np.arange(2 * most + 1) / (2 * most + 1)
    transform = np.ones_like(angles)
    for size, count in sizes.items():
        transform *= np.cos(size * angles) ** count
    chances = np.fft.ifft(transform).real  # of the sums 0..most, then -most..-1
    observed = abs(sum(differences))
    extreme = chances[observed : most + 1].sum()
    return float(np.clip(2 * extreme if observed else 1.0, 0.0, 1.0))
