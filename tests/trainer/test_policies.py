"""Answers sampled at another temperature than 1 train the policy at that temperature."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_learner import (
    VOCAB,
    assert_same,
    cohere,
    data,
    gemma2,
    gpt2,
    gradients,
    learner,
    move_off_start,
    on_policy,
    qwen3,
)
from torch import Tensor

from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]


def warm(datums: list[TrainingRow]) -> list[TrainingRow]:
    """Each token at a temperature of its own."""
    return with_extra(
        datums, temperature=[[0.5 + (t % 7) / 4 for t in datum.tokens] for datum in datums]
    )


def plain(trainer: Learner, datum: TrainingRow) -> Tensor:
    """One row, all logits, divided by each token's temperature; float64 softmax."""
    trainer.model.set_adapter(datum.adapter)
    logits = trainer.model(input_ids=torch.tensor([datum.tokens])).logits[0, :-1].double()
    logits = logits / torch.tensor(datum.extra["temperature"][1:])[:, None]
    return logits.log_softmax(-1).gather(-1, torch.tensor(datum.tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("build", [qwen3, gpt2, gemma2, cohere])
def test_logits_are_divided_by_the_temperature_of_the_token(build: object) -> None:
    trainer = learner(build=build, token_budget=50)
    move_off_start(trainer)
    datums = warm(data())
    with torch.no_grad():
        for datum, found in zip(datums, trainer.forward(datums), strict=True):
            row = [0.0, *plain(trainer, datum).tolist()]
            expected = [lp if on else 0.0 for lp, on in zip(row, datum.mask, strict=True)]
            assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("targets", ["all-linear", ["lm_head", "q_proj"]])
def test_gradients_are_those_of_the_plain_way(targets: str | list[str]) -> None:
    trainer, slow = (learner(targets=targets, token_budget=50) for _ in range(2))
    move_off_start(trainer)
    move_off_start(slow)
    datums = warm(data())
    trainer.forward_backward(datums, "cross_entropy")
    loss = torch.zeros((), dtype=torch.float64)
    for datum in datums:
        weights = torch.tensor(datum.advantages[1:]) * torch.tensor(datum.mask[1:])
        loss = loss - (plain(slow, datum) * weights).sum()
    (loss / sum(d.trained for d in datums)).backward()
    assert_same(gradients(trainer), gradients(slow), rtol=1e-3, atol=1e-5)


def test_the_gradient_is_that_of_the_expected_reward_of_what_sampled() -> None:
    """Exact, by enumeration: of all first tokens, each with its probability at temperature 0.6."""
    trainer, slow = learner(), learner()
    move_off_start(trainer)
    move_off_start(slow)
    context, temperature = [5, 9, 13], 0.6
    rewards = torch.arange(VOCAB, dtype=torch.float64).cos()

    logits = slow.model(input_ids=torch.tensor([context])).logits[0, -1].double()
    chances = (logits / temperature).softmax(-1)
    (-(chances * rewards).sum()).backward()

    chances = chances.detach()
    recorded = logits.detach().log_softmax(-1).tolist()  # at temperature 1, as the gateway records
    datums = [
        TrainingRow(
            tokens=[*context, token],
            mask=[False, False, False, True],
            logprobs=[0.0, 0.0, 0.0, recorded[token]],
            advantages=[0.0, 0.0, 0.0, float(rewards[token])],
            extra={
                "temperature": [1.0, 1.0, 1.0, temperature],
                # How often it would have been drawn; 61 rows, and the learner takes their mean.
                "weights": [0.0, 0.0, 0.0, float(chances[token]) * VOCAB],
            },
        )
        for token in range(VOCAB)
    ]
    ready = prepare(trainer, datums, UpdateSettings())
    stats = trainer.forward_backward(ready, "importance_sampling")
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert_same(gradients(trainer), gradients(slow), rtol=1e-3, atol=1e-6)


def test_passes_are_measured_against_the_policy_that_sampled() -> None:
    trainer = learner()
    move_off_start(trainer)
    cold = on_policy(trainer, data())
    ready = prepare(trainer, warm(cold), UpdateSettings(epochs=2))
    passes = [trainer.step(ready, "importance_sampling") for _ in range(2)]
    assert passes[0].max_logprob_difference < 1e-5
    assert passes[1].max_logprob_difference > 1e-3


def test_an_older_policy_is_as_far_away_as_it_was_at_temperature_1() -> None:
    trainer = learner()
    move_off_start(trainer)
    older = [
        replace(
            d, logprobs=[lp + 0.25 if on else lp for lp, on in zip(d.logprobs, d.mask, strict=True)]
        )
        for d in on_policy(trainer, data())
    ]
    stats = trainer.forward_backward(trainer.with_temperature(warm(older)))
    assert stats.mean_logprob_difference == pytest.approx(0.25, abs=1e-5)


def test_without_a_temperature_nothing_is_touched() -> None:
    trainer = learner()
    datums = data()
    assert trainer.with_temperature(datums) == datums
    ones = with_extra(datums, temperature=[[1.0] * len(d.tokens) for d in datums])
    for found, expected in zip(trainer.forward(ones), trainer.forward(datums), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_custom_loss_is_of_the_policy_that_sampled() -> None:
    trainer, slow = learner(), learner()
    move_off_start(trainer)
    move_off_start(slow)
    datums = warm(data())
    trainer.forward_backward_custom(
        datums, lambda _, rows: (torch.stack([row.sum() for row in rows]).square().sum(), {})
    )
    sums = [(plain(slow, d) * torch.tensor(d.mask[1:])).sum() for d in datums]
    torch.stack(sums).square().sum().backward()
    assert_same(gradients(trainer), gradients(slow), rtol=1e-3, atol=1e-4)
