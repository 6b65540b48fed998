"""How sure an evaluation is: success rates with an interval, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z95 = 1.959963984540054  # the normal distribution's 97.5 % point


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a success rate (Wilson 1927, "Probable inference").

    Unlike mean ± 1.96 standard errors it stays within 0..1, and is right for few trials and for
    rates near 0 and 1.

    Raises:
        ValueError: there are no trials.
    """
    if trials < 1:
        raise ValueError("trials must be at least 1: nothing can be said without any")
    rate = successes / trials
    weight = _Z95**2 / trials
    centre = (rate + weight / 2) / (1 + weight)
    half = _Z95 * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Chance that one of ``k`` samples of a task succeeds, without bias from ``samples`` ≥ k.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", equation 1.

    Raises:
        ValueError: k is not in 1..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be in 1..{samples} (the samples of the task), not {k}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean over independent values, mean ± 1.96 standard errors.

    For tasks as the units: samples of one task are no independent trials. With one value, that
    value twice.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values are empty: nothing can be said")
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, mean
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean - _Z95 * error, mean + _Z95 * error
