"""Columns of a step: what settings need, and GAE against an obvious float64 implementation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from small_learner import assert_same, data, gradients, learner, nearly_on_policy, one_step

from agentrl_trainer.data.advantages import Scaling
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.prepare_batch import Gae, UpdateSettings, prepare, with_gae

Column = NDArray[np.float64]
pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def rows(seed: int, *lengths: int) -> tuple[list[TrainingRow], list[list[float]]]:
    """Rows with holes in their masks, which earn something at every position, and values."""
    rng = np.random.default_rng(seed)
    datums: list[TrainingRow] = []
    values: list[list[float]] = []
    for length in lengths:
        mask = [False, *(bool(on) for on in rng.random(length - 2) < 0.6), True]
        zeros, extra = [0.0] * length, {"rewards": rng.normal(size=length).tolist()}
        datums.append(TrainingRow([1] * length, mask, zeros, zeros, extra=extra))
        values.append(rng.normal(size=length).tolist())
    return datums, values


def plain_gae(datum: TrainingRow, values: list[float], discount: float, trace: float) -> Column:
    """arXiv:1506.02438, equation 16, each advantage as the sum that defines it."""
    on = np.array(datum.mask)
    rewards, expected = np.array(datum.extra["rewards"])[on], np.array(values)[on]
    surprise = rewards + discount * np.array([*expected[1:], 0.0]) - expected
    powers = (discount * trace) ** np.arange(len(rewards))
    return np.array([powers[: len(rewards) - t] @ surprise[t:] for t in range(len(rewards))])


def spread(values: Column, mask: list[bool]) -> Column:
    found = np.zeros(len(mask))
    found[mask] = values
    return found


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(ddof=0, epsilon=0.0), Scaling(1, 0.25)])
@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.7), (0.5, 0.0)])
def test_advantages_are_their_definition(
    scaling: Scaling, whiten: bool, discount: float, trace: float
) -> None:
    datums, values = rows(3, 9, 4, 7)
    done = with_gae(datums, values, Gae(discount, trace, whiten, scaling))
    plain = [plain_gae(d, v, discount, trace) for d, v in zip(datums, values, strict=True)]
    every = np.concatenate(plain)
    mean, divisor = 0.0, 1.0
    if whiten:
        mean, divisor = every.mean(), every.std(ddof=scaling.ddof) + scaling.epsilon
    for datum, row, own in zip(done, values, plain, strict=True):
        credit = spread((own - mean) / divisor, datum.mask)
        np.testing.assert_allclose(datum.advantages, credit, rtol=1e-12, atol=1e-14)
        # The value function learns what was earned, not what was whitened.
        returns = spread(own + np.array(row)[datum.mask], datum.mask)
        np.testing.assert_allclose(datum.extra["returns"], returns, rtol=1e-12, atol=1e-12)
        assert datum.extra["values"] == row


def test_one_token_has_no_deviation() -> None:
    datums, values = rows(5, 2)
    (datum,) = with_gae(datums, values, Gae(whiten=True))  # ddof 1 has nothing to divide by
    assert datum.advantages == [0.0, 0.0]


def test_an_update_prepares_what_the_settings_need() -> None:
    trainer = learner(token_budget=40, off_start=True)
    datums = nearly_on_policy(trainer, data())
    assert all(d.extra == {} for d in prepare(trainer, datums, UpdateSettings()))
    config = {"kl_coef": 0.1, "correction": "truncate"}
    done = prepare(trainer, datums, UpdateSettings("ppo", config, epochs=2))
    assert {*done[0].extra} == {"reference", "proximal"}
    assert done[0].extra["proximal"] == trainer.forward(datums)[0]
    first = one_step(trainer, done, "ppo", config)
    assert {"kl_reference", "correction", "dropped"} <= first.metrics.keys()
    # In the first pass the policy is the proximal one: all ratios are 1, and nothing is clipped.
    assert first.clip_fraction == 0.0


def test_a_single_pass_needs_no_proximal_logprobs() -> None:
    trainer = learner(token_budget=40, off_start=True)
    datums = nearly_on_policy(trainer, data())
    config = {"correction": "truncate"}
    trainer.forward_backward(trainer.with_proximal(datums), "ppo", config)
    with_proximal = gradients(trainer)
    ready = prepare(trainer, datums, UpdateSettings("ppo", config))
    assert all(d.extra == {} for d in ready)
    trainer.forward_backward(ready, "ppo", config)
    assert_same(gradients(trainer), with_proximal, rtol=1e-4, atol=1e-7)
