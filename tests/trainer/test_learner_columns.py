"""What losses need of the learner: references, custom functions, the value function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_learner import (
    assert_same,
    data,
    gradients,
    learner,
    move_off_start,
    nearly_on_policy,
    plain_logprobs,
)

from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare, with_gae
from agentrl_trainer.learner.value_head import ValueHead, value_loss

pytestmark = [pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning")]


@pytest.fixture
def moved() -> Learner:
    trainer = learner(token_budget=40)
    move_off_start(trainer)
    return trainer


def test_the_reference_is_the_base_model(moved: Learner) -> None:
    datums = data()
    start = learner(token_budget=40)  # adapters start as the base model
    policy = moved.forward(datums)
    for found, expected in zip(moved.reference(datums), start.forward(datums), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert moved.reference(datums) != policy
    assert moved.forward(datums) == policy
    moved.forward_backward(datums)  # and it still learns
    assert any(bool(gradient.any()) for gradient in gradients(moved).values())


def test_another_adapter_can_be_the_reference(moved: Learner, tmp_path: Path) -> None:
    datums = data()
    frozen = moved.forward(datums)
    moved.save_adapter("default", tmp_path / "frozen")
    moved.add_reference("frozen", tmp_path / "frozen")
    state = moved.state_dict()
    moved.step(datums)
    assert moved.forward(datums) != frozen
    for found, expected in zip(moved.reference(datums, "frozen"), frozen, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    assert state.keys() < moved.state_dict().keys()  # AdamW's moments are new, no frozen weights
    assert not any("frozen" in key for key in moved.state_dict())
    with pytest.raises(ValueError, match="no adapter 'nobody'"):
        moved.reference(datums, "nobody")


def test_a_penalty_pulls_the_policy_back(moved: Learner) -> None:
    datums = [replace(d, advantages=[0.0] * len(d.tokens)) for d in data(rows=20)]
    on_policy = nearly_on_policy(moved, datums)
    distances = []
    for _ in range(8):
        stats = moved.step(moved.with_reference(on_policy), loss_config={"kl_coef": 1.0})
        distances.append(stats.metrics["kl_reference"])
    assert distances[-1] < 0.7 * distances[0]


def test_a_penalty_needs_the_reference(moved: Learner) -> None:
    with pytest.raises(ValueError, match="with_reference"):
        moved.forward_backward(data(), loss_config={"kl_coef": 0.1})


def test_weights_and_proximal_policies_reach_the_loss(moved: Learner) -> None:
    """Small micro-batches against the plain way; one datum's columns do not leak into another's."""
    datums = nearly_on_policy(moved, data())
    weights = [[0.1 * (i + t) for t in range(len(d.tokens))] for i, d in enumerate(datums)]
    proximal = [[q + 0.1 * (t % 3 - 1) for t, q in enumerate(d.logprobs)] for d in datums]
    given = with_extra(datums, weights=weights, proximal=proximal)
    config = {"correction": "truncate", "correction_high": 1.05, "clip_low_threshold": 0.9}
    stats = moved.forward_backward(given, "ppo", config, normalize_by=1.0)
    found = gradients(moved)
    moved.discard_gradients()
    total = torch.zeros((), dtype=torch.float64)
    for i, datum in enumerate(datums):
        lp, on = plain_logprobs(moved, datum), torch.tensor(datum.mask[1:])
        q, old, a, w = (
            torch.tensor(values[1:], dtype=torch.float64)
            for values in (datum.logprobs, proximal[i], datum.advantages, weights[i])
        )
        r = (lp - old).exp()
        objective = torch.minimum(r * a, r.clamp(0.9, 1.2) * a) * (old - q).exp().clamp(max=1.05)
        total = total - (objective * w)[on].sum()
    total.backward()
    assert stats.loss == pytest.approx(total.item(), rel=1e-5)
    assert 0 < stats.metrics["dropped"] < 1
    assert_same(found, gradients(moved), rtol=1e-3, atol=1e-5)


def test_a_column_must_be_whole(moved: Learner) -> None:
    datums = data(rows=2)
    with pytest.raises(ValueError, match="one length"):
        replace(datums[0], extra={"weights": [1.0]})
    with pytest.raises(ValueError, match="'nonsense'"):
        replace(datums[0], extra={"nonsense": [1.0] * len(datums[0].tokens)})
    half = [datums[0], *with_extra(datums[1:], weights=[[1.0] * len(datums[1].tokens)])]
    with pytest.raises(ValueError, match="all or none"):
        learner(token_budget=1000).forward_backward(half)


# ---- custom losses


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(moved: Learner) -> None:
    datums = nearly_on_policy(moved, data())
    tokens = sum(datum.trained for datum in datums)
    expected = moved.forward_backward(datums, "importance_sampling")
    built_in = gradients(moved)
    moved.discard_gradients()

    def function(
        given: list[TrainingRow], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict]:
        total = torch.zeros(())
        for datum, lp in zip(given, logprobs, strict=True):
            on = torch.tensor(datum.mask)
            ratio = (lp - torch.tensor(datum.logprobs))[on].exp()
            total = total - (ratio * torch.tensor(datum.advantages)[on]).sum()
        return total / tokens, {"mine": 7.0}

    stats, metrics = moved.forward_backward_custom(datums, function)
    assert metrics == {"mine": 7.0}
    assert stats.loss == pytest.approx(expected.loss, rel=1e-5)
    assert stats.tokens == tokens
    assert_same(gradients(moved), built_in, rtol=1e-3, atol=1e-6)


def test_a_custom_loss_over_several_datums(moved: Learner) -> None:
    """DPO-like: a function of pairs, which no sum over tokens is."""
    datums = data(rows=4)

    def function(
        given: list[TrainingRow], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict]:
        sums = torch.stack([lp.sum() for lp in logprobs])
        return -torch.nn.functional.logsigmoid(sums[0::2] - sums[1::2]).sum(), {}

    stats, _ = moved.forward_backward_custom(datums, function)
    found = gradients(moved)
    moved.discard_gradients()
    rows = [plain_logprobs(moved, d)[torch.tensor(d.mask[1:])].sum() for d in datums]
    sums = torch.stack(rows)
    loss = -torch.nn.functional.logsigmoid(sums[0::2] - sums[1::2]).sum()
    loss.backward()
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(found, gradients(moved), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("token_budget", "value"), [(10**6, None), (10**6, ValueParams()), (40, None)]
)
def test_a_custom_loss_goes_through_one_micro_batch_once(
    token_budget: int, value: ValueParams | None
) -> None:
    """Of more, holding all activations would take their memory: there it is two passes."""
    trainer = learner(token_budget=token_budget, value=value)
    move_off_start(trainer)
    datums = nearly_on_policy(trainer, data())
    trainer.forward_backward(datums, "cross_entropy", normalize_by=1.0)
    built_in = gradients(trainer)
    trainer.discard_gradients()

    passes: list[int] = []
    embedding = trainer.base.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda *_: passes.append(1))
    trainer.forward(datums)
    micro_batches, passes[:] = len(passes), []

    def function(
        given: list[TrainingRow], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict]:
        credit = [torch.tensor(datum.advantages) for datum in given]
        return -sum((a * lp).sum() for a, lp in zip(credit, logprobs, strict=True)), {}

    trainer.forward_backward_custom(datums, function)
    hook.remove()
    assert len(passes) == (1 if token_budget == 10**6 else 2 * micro_batches) > 0
    found = gradients(trainer)
    policy = {name: found[name] for name in built_in}
    assert_same(policy, built_in, rtol=1e-5, atol=1e-7)


def test_a_custom_loss_must_depend_on_the_logprobs(moved: Learner) -> None:
    with pytest.raises(ValueError, match="scalar"):
        moved.forward_backward_custom(data(rows=1), lambda _d, _lp: (torch.zeros(()), {}))


# ---- the value function


def test_a_value_function_learns_and_leaves_the_policy_alone() -> None:
    trainer = learner(value=ValueParams(lr=3e-2, clip=0.0), token_budget=60)
    plain = learner(token_budget=60)
    datums = data(rows=8)
    assert {v for row in trainer.values(datums) for v in row} == {0.0}
    returns = [[1.0 if token % 2 else -1.0 for token in [0, *d.tokens[:-1]]] for d in datums]
    given = with_extra(datums, returns=returns)
    policy_only = plain.forward_backward(datums)
    stats = trainer.forward_backward(given)
    assert_same(
        {k: g for k, g in gradients(trainer).items() if not k.startswith("value.")},
        gradients(plain),
        rtol=1e-4,
        atol=1e-6,
    )
    assert stats.metrics["value_error"] == pytest.approx(1.0)
    assert stats.metrics["value_loss"] == pytest.approx(0.5)
    assert stats.loss == pytest.approx(policy_only.loss + 0.5, rel=1e-5)
    for _ in range(40):
        trainer.step(given, "importance_sampling")
    assert trainer.forward_backward(given).metrics["value_error"] < 0.4


def test_no_gradient_of_the_value_function_reaches_the_policy() -> None:
    """Its last layer begins at zero, which would hide it: here it does not."""
    trainer = learner(value=ValueParams(clip=0.0))
    plain = learner()
    for one in (trainer, plain):
        move_off_start(one)
    for head in trainer.value_heads.values():
        torch.nn.init.normal_(head.out.weight)
    datums = data(rows=4)
    given = with_extra(datums, returns=[[3.0] * len(d.tokens) for d in datums])
    trainer.forward_backward(given)
    plain.forward_backward(datums)
    found = {k: g for k, g in gradients(trainer).items() if not k.startswith("value.")}
    assert_same(found, gradients(plain), rtol=1e-4, atol=1e-6)


def test_a_value_function_is_part_of_the_state() -> None:
    first = learner(value=ValueParams(), seed=3)
    datums = data(rows=4)
    given = with_extra(datums, returns=[[1.0] * len(d.tokens) for d in datums])
    first.step(given)
    second = learner(value=ValueParams(), seed=4)
    second.load_state_dict(first.state_dict())
    assert second.values(datums) == first.values(datums)
    first.step(given)
    second.step(given)
    assert second.values(datums) == first.values(datums)
    with pytest.raises(ValueError, match="another set"):
        learner().load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="no value function"):
        learner().values(datums)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_is_the_slow_loop(clip: float) -> None:
    generator = torch.Generator().manual_seed(1)
    predicted, returns, old, weights = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    predicted = (old + 0.3 * predicted).requires_grad_(True)
    loss, sums = value_loss(
        predicted,
        returns=returns,
        values=old,
        weights=weights.abs(),
        params=ValueParams(clip=clip),
    )
    expected = 0.0
    for v, target, before, weight in zip(
        predicted.tolist(), returns.tolist(), old.tolist(), weights.abs().tolist(), strict=True
    ):
        error = (v - target) ** 2
        if clip:
            near = before + max(-clip, min(clip, v - before))
            error = max(error, (near - target) ** 2)
        expected += weight * error / 2
    assert loss.item() == pytest.approx(expected)
    assert float(sums["value_loss"]) == pytest.approx(expected)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, returns=returns, params=ValueParams(clip=0.0))[0], predicted
    )


def test_heads_are_drawn_from_their_seed_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, two = ValueHead(8, seed=1), ValueHead(8, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.up.weight, two.up.weight)
    assert ValueHead(8, seed=2).up.weight.tolist() != one.up.weight.tolist()


def test_ppo_with_a_value_function_end_to_end() -> None:
    """Token 5 is worth 1, at the end of the row: the value function finds out, PPO prefers it."""
    trainer = learner(value=ValueParams(lr=1e-2), token_budget=400)
    prompt = [7, 8]

    def rows() -> list[TrainingRow]:
        made = []
        for i in range(16):
            token = 5 if i % 2 else 9
            made.append(
                TrainingRow(
                    tokens=[*prompt, token],
                    mask=[False, False, True],
                    logprobs=[0.0] * 3,
                    advantages=[0.0] * 3,
                    extra={"rewards": [0.0, 0.0, float(token == 5)]},
                )
            )
        return made

    first = None
    for _ in range(12):
        datums = rows()
        behaviour = trainer.forward(datums)
        datums = [replace(d, logprobs=lp) for d, lp in zip(datums, behaviour, strict=True)]
        datums = with_gae(datums, trainer.values(datums))
        first = first or behaviour[1][2]
        trainer.step(datums, "ppo")
    assert trainer.forward(rows())[1][2] > first + 0.5
    assert trainer.values(rows())[0][2] == pytest.approx(0.5, abs=0.2)


# ---- a whole step


def test_an_update_prepares_what_the_settings_need(moved: Learner) -> None:
    datums = nearly_on_policy(moved, data())
    plain = prepare(moved, datums, UpdateSettings())
    assert [d.extra for d in plain] == [{}] * len(datums)
    settings = UpdateSettings(
        loss="ppo",
        loss_config={"kl_coef": 0.1, "correction": "truncate"},
        epochs=2,
    )
    done = prepare(moved, datums, settings)
    assert {*done[0].extra} == {"reference", "proximal"}
    assert done[0].extra["proximal"] == moved.forward(datums)[0]
    passes = [moved.step(done, settings.loss, settings.loss_config) for _ in range(2)]
    assert {"kl_reference", "correction", "dropped"} <= passes[0].metrics.keys()
    # In the first pass the policy is the proximal one: all ratios are 1, and nothing is clipped.
    assert passes[0].clip_fraction == 0.0


def test_a_single_pass_needs_no_proximal_logprobs(moved: Learner) -> None:
    datums = nearly_on_policy(moved, data())
    config = {"correction": "truncate"}
    moved.forward_backward(moved.with_proximal(datums), "ppo", config)
    with_proximal = gradients(moved)
    moved.discard_gradients()
    (first,) = [prepare(moved, datums, UpdateSettings("ppo", config))]
    assert {*first[0].extra} == set()
    moved.forward_backward(first, "ppo", config)
    assert_same(gradients(moved), with_proximal, rtol=1e-4, atol=1e-7)
