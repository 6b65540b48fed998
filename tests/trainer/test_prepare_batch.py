"""Whitened advantages of GAE against an obvious float64 implementation of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from small_learner import data, learner

from agentrl_trainer.data.advantages import Scaling
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.prepare_batch import Gae, UpdateSettings, prepare, with_gae

Column = NDArray[np.float64]


def rows(seed: int, lengths: tuple[int, ...]) -> tuple[list[TrainingRow], list[list[float]]]:
    """Datums with holes in their masks, which earn something at every position, and values."""
    rng = np.random.default_rng(seed)
    datums: list[TrainingRow] = []
    values: list[list[float]] = []
    for length in lengths:
        mask = [False, *(bool(on) for on in rng.random(length - 1) < 0.6)]
        mask[-1] = True
        datums.append(
            TrainingRow(
                tokens=[1] * length,
                mask=mask,
                logprobs=[0.0] * length,
                advantages=[0.0] * length,
                extra={"rewards": rng.normal(size=length).tolist()},
            )
        )
        values.append(rng.normal(size=length).tolist())
    return datums, values


def plain_gae(rewards: Column, values: Column, discount: float, trace: float) -> Column:
    """arXiv:1506.02438, equation 16, each advantage as the sum that defines it."""
    count = len(rewards)
    following = [*values[1:], 0.0]
    surprise = [rewards[t] + discount * following[t] - values[t] for t in range(count)]
    return np.array(
        [
            sum((discount * trace) ** (k - t) * surprise[k] for k in range(t, count))
            for t in range(count)
        ]
    )


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(ddof=0, epsilon=0.0), Scaling(1, 0.25)])
@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.7), (0.5, 0.0)])
def test_whitened_advantages_are_their_definition(
    scaling: Scaling, discount: float, trace: float
) -> None:
    datums, values = rows(3, (9, 4, 1 + 6))
    done = with_gae(datums, values, Gae(discount, trace, True, scaling))

    plain: list[Column] = []
    for datum, row in zip(datums, values, strict=True):
        on = np.array(datum.mask)
        plain.append(
            plain_gae(
                np.array(datum.extra["rewards"])[on], np.array(row, np.float64)[on], discount, trace
            )
        )
    everything = np.concatenate(plain)
    how = scaling or Scaling(ddof=1, epsilon=1e-6)
    divisor = everything.std(ddof=how.ddof) + how.epsilon
    for datum, one, row, own in zip(done, datums, values, plain, strict=True):
        on = np.array(one.mask)
        found = np.array(datum.advantages)
        np.testing.assert_allclose(found[on], (own - everything.mean()) / divisor, rtol=1e-12)
        assert not found[~on].any()
        # The value function learns what was earned, not what was whitened.
        returns = np.array(datum.extra["returns"])
        np.testing.assert_allclose(returns[on], own + np.array(row)[on], rtol=1e-12, atol=1e-12)
        assert datum.extra["values"] == row
    trained = np.concatenate([np.array(d.advantages)[d.mask] for d in done])
    assert trained.mean() == pytest.approx(0.0, abs=1e-12)
    expected = everything.std(ddof=how.ddof) / divisor
    assert trained.std(ddof=how.ddof) == pytest.approx(expected, rel=1e-12)


def test_without_whitening_advantages_stay_as_they_are() -> None:
    datums, values = rows(4, (6,))
    (datum,) = with_gae(datums, values, Gae(0.9, 0.8, scaling=Scaling(0, 0.5)))
    on = np.array(datum.mask)
    rewards = np.array(datums[0].extra["rewards"])[on]
    expected = plain_gae(rewards, np.array(values[0])[on], 0.9, 0.8)
    np.testing.assert_allclose(np.array(datum.advantages)[on], expected, rtol=1e-12)


def test_one_token_has_no_deviation() -> None:
    datums, values = rows(5, (2,))
    (datum,) = with_gae(datums, values, Gae(whiten=True))  # ddof 1 has nothing to divide by
    assert datum.advantages == [0.0, 0.0]


def test_the_scaling_of_the_settings_is_the_one_that_is_used() -> None:
    trainer = learner(value=ValueParams())
    datums = [
        replace(d, extra={"rewards": [float(i % 3) for i in range(len(d.tokens))]}) for d in data()
    ]

    def spread(scaling: Scaling) -> float:
        settings = UpdateSettings("ppo", gae=Gae(whiten=True, scaling=scaling))
        done = prepare(trainer, datums, settings)
        return float(
            np.std([a for d in done for a, on in zip(d.advantages, d.mask, strict=True) if on])
        )

    count = sum(sum(d.mask) for d in datums)
    assert spread(Scaling(ddof=0, epsilon=0.0)) == pytest.approx(1.0, rel=1e-9)
    assert spread(Scaling(ddof=1, epsilon=0.0)) == pytest.approx(math.sqrt((count - 1) / count))
    assert spread(Scaling(ddof=0, epsilon=3.0)) < 0.5
