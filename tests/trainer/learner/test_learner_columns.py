"""What rows hold beside tokens and advantages: references, temperatures; and custom losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_learner import (
    VOCAB,
    assert_same,
    data,
    gradients,
    learner,
    nearly_on_policy,
    on_policy,
    one_step,
    plain_logprobs,
    trained,
    warm,
)
from small_models import training_row
from torch import Tensor

from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare
from agentrl_trainer.models.lora import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


@pytest.fixture
def moved() -> Learner:
    return learner(token_budget=40, off_start=True)


# ---- references, weights and proximal policies


def references(trainer: Learner, *adapter: str) -> list[list[float]]:
    return [row.extra["reference"] for row in trainer.with_reference(data(), *adapter)]


def test_the_reference_is_the_base_model(moved: Learner) -> None:
    start = learner(token_budget=40)  # adapters start as the base model
    policy = moved.forward(data())
    for found, expected in zip(references(moved), start.forward(data()), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert references(moved) != policy
    assert moved.forward(data()) == policy
    moved.forward_backward(data())  # and it still learns
    assert any(bool(gradient.any()) for gradient in gradients(moved).values())


def test_another_adapter_can_be_the_reference(moved: Learner, tmp_path: Path) -> None:
    frozen = moved.forward(data())
    save_adapter(moved.model, "default", tmp_path / "frozen")
    moved.add_reference("frozen", tmp_path / "frozen")
    one_step(moved, data())
    assert moved.forward(data()) != frozen
    for found, expected in zip(references(moved, "frozen"), frozen, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert not any("frozen" in key for key in moved.state_dict())
    with pytest.raises(ValueError, match="no adapter 'missing'"):
        references(moved, "missing")


def test_weights_and_proximal_policies_reach_the_loss(moved: Learner) -> None:
    """Small micro-batches against the plain way; one datum's columns do not leak into another's."""
    datums = nearly_on_policy(moved, data())
    weights = [[0.1 * (i + t) for t in range(len(d.tokens))] for i, d in enumerate(datums)]
    proximal = [[q + 0.1 * (t % 3 - 1) for t, q in enumerate(d.logprobs)] for d in datums]
    given = with_extra(datums, weights=weights, proximal=proximal)
    config = {"correction": "truncate", "correction_high": 1.05, "clip_low_threshold": 0.9}
    stats = moved.forward_backward(given, "ppo", config, normalize_by=1.0)
    found = gradients(moved)
    total = torch.zeros((), dtype=torch.float64)
    for i, datum in enumerate(datums):
        lp = plain_logprobs(moved, datum)
        columns = (datum.logprobs, proximal[i], datum.advantages, weights[i])
        q, old, a, w = (trained(datum, column) for column in columns)
        r = (lp - old).exp()
        objective = torch.minimum(r * a, r.clamp(0.9, 1.2) * a) * (old - q).exp().clamp(max=1.05)
        total = total - (objective * w).sum()
    total.backward()
    assert stats.loss == pytest.approx(total.item(), rel=1e-5)
    assert 0 < stats.metrics["dropped"] < 1
    assert_same(found, gradients(moved), rtol=1e-3, atol=1e-5)


def test_a_column_must_be_whole() -> None:
    datums = data(rows=2)
    with pytest.raises(ValueError, match="one length"):
        replace(datums[0], extra={"weights": [1.0]})
    with pytest.raises(ValueError, match="'nonsense'"):
        replace(datums[0], extra={"nonsense": [1.0] * len(datums[0].tokens)})
    half = [datums[0], *with_extra(datums[1:], weights=[[1.0] * len(datums[1].tokens)])]
    with pytest.raises(ValueError, match="all or none"):
        learner(token_budget=1000).forward_backward(half)


# ---- custom losses

Metrics = dict[str, float]


def test_a_row_beyond_the_budget_is_recomputed_with_a_custom_loss(moved: Learner) -> None:
    [row] = data(rows=1)
    found: list[tuple[Tensor, ...]] = []
    for budget in (4, 1000):
        moved.token_budget = budget
        passes: list[int] = []
        hook = moved.base.model.model.layers[0].mlp.gate_proj.register_forward_hook(
            lambda *_, passes=passes: passes.append(1)
        )
        moved.forward_backward_custom([row], lambda _, lps: (lps[0].square().sum(), {}))
        hook.remove()
        assert len(passes) == (3 if budget == 4 else 1)  # forward, forward again, recomputed
        found.append(gradients(moved))
    assert_same(found[0], found[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("datums", [data(rows=4), warm(data(rows=4))], ids=["cold", "warm"])
def test_a_custom_loss_over_several_datums(moved: Learner, datums: list[TrainingRow]) -> None:
    """DPO-like: a function of pairs, which no sum over tokens is."""

    def dpo(rows: list[Tensor]) -> Tensor:
        sums = torch.stack([row.sum() for row in rows])
        return -torch.nn.functional.logsigmoid(sums[0::2] - sums[1::2]).sum()

    stats, metrics = moved.forward_backward_custom(datums, lambda _, lps: (dpo(lps), {"mine": 7.0}))
    found = gradients(moved)
    loss = dpo([plain_logprobs(moved, d) for d in datums])
    loss.backward()
    with pytest.raises(ValueError, match="scalar that depends on the log-probs"):
        moved.forward_backward_custom(datums, lambda *_: (torch.zeros(()), {}))
    assert metrics == {"mine": 7.0}
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert stats.tokens == sum(datum.trained for datum in datums)
    assert_same(found, gradients(moved), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("token_budget", "value"), [(10**6, None), (10**6, ValueParams(lr=1e-3, clip=0.2)), (40, None)]
)
def test_a_custom_loss_goes_through_one_micro_batch_once(
    token_budget: int, value: ValueParams | None
) -> None:
    """With more, holding all activations would take their memory: there it is two passes."""
    trainer = learner(token_budget=token_budget, value=value, off_start=True)
    datums = nearly_on_policy(trainer, data())
    trainer.forward_backward(datums, "cross_entropy", normalize_by=1.0)
    built_in = gradients(trainer)
    passes: list[int] = []
    trainer.base.model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    trainer.forward(datums)
    micro_batches, passes[:] = len(passes), []

    def function(given: Sequence[TrainingRow], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        credit = [torch.tensor(datum.advantages) for datum in given]
        return -sum((a * lp).sum() for a, lp in zip(credit, logprobs, strict=True)), {}

    trainer.forward_backward_custom(datums, function)
    assert len(passes) == (1 if token_budget == 10**6 else 2 * micro_batches) > 0
    assert_same(gradients(trainer), built_in, rtol=1e-5, atol=1e-7)


# ---- temperatures: the policy that trains is the one that sampled


def test_the_gradient_is_that_of_the_expected_reward_of_what_sampled() -> None:
    """Exact, by enumeration: of all first tokens, each with its probability at temperature 0.6."""
    trainer = learner(off_start=True)
    context, temperature = [5, 9, 13], 0.6
    rewards = torch.arange(VOCAB, dtype=torch.float64).cos()
    logits = trainer.model(input_ids=torch.tensor([context])).logits[0, -1].double()
    chances = (logits / temperature).softmax(-1)
    (-(chances * rewards).sum()).backward()
    expected = gradients(trainer)
    chances = chances.detach()
    recorded = logits.detach().log_softmax(-1).tolist()  # at temperature 1, as the gateway records
    rows = [training_row([*context, token], 3, float(rewards[token])) for token in range(VOCAB)]
    rows = [replace(row, logprobs=[recorded[row.tokens[3]]] * 4) for row in rows]
    # How often it would have been drawn; 61 rows, and the learner takes their mean.
    weights = [[chance * VOCAB] * 4 for chance in chances.tolist()]
    datums = with_extra(rows, temperature=[[temperature] * 4] * VOCAB, weights=weights)
    ready = prepare(trainer, datums, UpdateSettings())
    stats = trainer.forward_backward(ready, "importance_sampling")
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert_same(gradients(trainer), expected, rtol=1e-3, atol=1e-6)


def test_passes_are_measured_against_the_policy_that_sampled() -> None:
    trainer = learner(off_start=True)
    ready = prepare(trainer, warm(on_policy(trainer, data())), UpdateSettings(epochs=2))
    passes = [one_step(trainer, ready, "importance_sampling") for _ in range(2)]
    assert passes[0].max_logprob_difference < 1e-5
    assert passes[1].max_logprob_difference > 1e-3


def test_an_older_policy_is_as_far_away_as_it_was_at_temperature_1() -> None:
    trainer = learner(off_start=True)
    sampled = on_policy(trainer, data())
    older = [replace(d, logprobs=[lp + 0.25 for lp in d.logprobs]) for d in sampled]
    stats = trainer.forward_backward(trainer.with_temperature(warm(older)))
    assert stats.mean_logprob_difference == pytest.approx(0.25, abs=1e-5)


def test_without_a_temperature_nothing_is_touched() -> None:
    trainer = learner()
    assert trainer.with_temperature(data()) == data()
    ones = with_extra(data(), temperature=[[1.0] * len(d.tokens) for d in data()])
    for found, expected in zip(trainer.forward(ones), trainer.forward(data()), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
