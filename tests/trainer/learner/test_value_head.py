"""The value function: its loss, its seed, and that it leaves the policy alone."""

from __future__ import annotations

import pytest
import torch
from small_learner import assert_same, data, gradients, learner, one_step

from agentrl_trainer.data.training_row import with_extra
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.value_head import ValueHead, value_loss

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")


def test_a_value_function_learns() -> None:
    trainer = learner(value=ValueParams(lr=3e-2, clip=0.0), token_budget=60)
    datums = data(rows=8)
    assert {v for row in trainer.values(datums) for v in row} == {0.0}
    returns = [[1.0 if token % 2 else -1.0 for token in [0, *d.tokens[:-1]]] for d in datums]
    given = with_extra(datums, returns=returns)
    stats = trainer.forward_backward(given)
    assert stats.metrics["value_error"] == pytest.approx(1.0)
    assert stats.metrics["value_loss"] == pytest.approx(0.5)
    alone = learner(token_budget=60).forward_backward(datums)
    assert stats.loss == pytest.approx(alone.loss + 0.5, rel=1e-5)
    for _ in range(40):
        one_step(trainer, given, "importance_sampling")
    assert trainer.forward_backward(given).metrics["value_error"] < 0.4


def test_no_gradient_of_the_value_function_reaches_the_policy() -> None:
    """Its last layer begins at zero, which would hide it: here it does not."""
    trainer, plain = (
        learner(value=ValueParams(lr=1e-3, clip=0.0), off_start=True),
        learner(off_start=True),
    )
    for head in trainer.value_heads.values():
        torch.nn.init.normal_(head.out.weight)
    datums = data(rows=4)
    trainer.forward_backward(with_extra(datums, returns=[[3.0] * len(d.tokens) for d in datums]))
    plain.forward_backward(datums)
    assert_same(gradients(trainer), gradients(plain), rtol=1e-4, atol=1e-6)


def test_a_value_function_is_part_of_the_state() -> None:
    first, second = (learner(value=ValueParams(lr=1e-3, clip=0.2), seed=seed) for seed in (3, 4))
    datums = data(rows=4)
    given = with_extra(datums, returns=[[1.0] * len(d.tokens) for d in datums])
    one_step(first, given)
    second.load_state_dict(first.state_dict())
    assert second.values(datums) == first.values(datums)
    for trainer in (first, second):
        one_step(trainer, given)
    assert second.values(datums) == first.values(datums)
    with pytest.raises(ValueError, match="another set"):
        learner().load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="no value function"):
        learner().values(datums)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_is_the_slow_loop(clip: float) -> None:
    generator = torch.Generator().manual_seed(1)
    predicted, returns, old, weights = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    predicted, weights = old + 0.3 * predicted, weights.abs()
    how = {"returns": returns, "params": ValueParams(lr=1e-3, clip=clip)}
    loss, sums = value_loss(predicted, values=old, weights=weights, **how)
    expected = 0.0
    columns = (column.tolist() for column in (predicted, returns, old, weights))
    for v, target, before, weight in zip(*columns, strict=True):
        error = (v - target) ** 2
        if clip:
            moved = before + max(-clip, min(clip, v - before))
            error = max(error, (moved - target) ** 2)
        expected += weight * error / 2
    assert loss.item() == pytest.approx(expected)
    assert float(sums["value_loss"]) == pytest.approx(expected)
    predicted.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, **how)[0], predicted)


def test_heads_are_drawn_from_their_seed_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, two, other = (ValueHead(8, seed=seed).up.weight for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert other.tolist() != one.tolist()
