"""Success rates and pass@k with confidence intervals: what loop, commands and pages share.

Tasks are the independent units: they are what was drawn, and samples of one task resemble one
another. Intervals that count samples as independent are too narrow (Miller 2024, "Adding Error Bars
to Evals", arXiv:2411.00640, clustered standard errors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance

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
