"""The learner on random miniature models, against the plain way of computing the same things."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_learner import (
    VOCAB,
    assert_same,
    base_model,
    cohere,
    data,
    gemma2,
    gpt2,
    gradients,
    learner,
    llama,
    nearly_on_policy,
    on_policy,
    one_step,
    plain_logprobs,
    qwen3,
    qwen3_moe,
    trained,
    warm,
)
from small_models import training_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl_trainer.data.packing import pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.losses import LOSSES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PEFT config's:UserWarning"),
    # GPT-2's layers are transposed; PEFT says so and sets it right.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning"),
]


# ---- log-probs


@pytest.mark.parametrize("rows", [data(), warm(data())], ids=["cold", "warm"])
@pytest.mark.parametrize("build", [qwen3, llama, gpt2, gemma2, cohere])
def test_forward_is_the_plain_way(build: Any, rows: list[TrainingRow]) -> None:
    trainer = learner(build=build, token_budget=50, off_start=True)
    for row, found in zip(rows, trainer.forward(rows), strict=True):
        expected = plain_logprobs(trainer, row).tolist()
        assert trained(row, found).tolist() == pytest.approx(expected, abs=2e-5)
        assert not any(lp for lp, on in zip(found, row.mask, strict=True) if not on)


def test_only_trained_positions_reach_the_output_embedding() -> None:
    trainer = learner()
    seen: list[int] = []
    head = trainer.base.model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _m, args: seen.append(len(args[0])))
    assert trainer.forward_backward(data()).tokens == sum(datum.trained for datum in data())
    assert sum(seen) == sum(datum.trained for datum in data())


def test_half_precision_models_give_float32_logprobs() -> None:
    base = base_model()
    base = replace(base, model=base.model.to(torch.bfloat16), dtype=torch.bfloat16)
    trainer = Learner(base, rank=2)
    assert {p.dtype for p in trainer.parameters["default"].values()} == {torch.float32}
    stats = one_step(trainer, data())
    assert not stats.skipped_non_finite
    assert math.isfinite(stats.loss)
    (batch,) = pack(data(), token_budget=10**6)
    assert trainer._logprobs(batch).dtype == torch.float32


# ---- gradients


def plain_loss(trainer: Learner, datums: list[TrainingRow], loss: str) -> Tensor:
    """The mean loss per token, row by row in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for datum in datums:
        lp = plain_logprobs(trainer, datum)
        q, a = trained(datum, datum.logprobs), trained(datum, datum.advantages)
        one = torch.zeros(len(lp), dtype=torch.int64)
        total = total + LOSSES[loss](lp, q, a, {}, sequences=one)[0]
    return total / sum(datum.trained for datum in datums)


HEAD = ["lm_head", "q_proj"]  # the output embedding trains: its chunks are computed again


@pytest.mark.parametrize(
    ("build", "targets", "loss", "rows", "budget"),
    [
        *((qwen3, "all-linear", loss, data(), 40) for loss in sorted(LOSSES)),
        *((qwen3, "all-linear", "importance_sampling", data(), size) for size in (1, 10**6)),
        *((build, "all-linear", "ppo", data(), 40) for build in (qwen3_moe, gemma2, cohere)),
        (qwen3, HEAD, "importance_sampling", data(), 40),
        *((build, "all-linear", "cross_entropy", warm(data()), 40) for build in (qwen3, gemma2)),
        (qwen3, HEAD, "cross_entropy", warm(data()), 40),
    ],
)
def test_gradients_are_those_of_the_plain_way(
    build: Any, targets: Any, loss: str, rows: list[TrainingRow], budget: int
) -> None:
    trainer = learner(build=build, targets=targets, token_budget=budget, off_start=True)
    trainer._logprobs.max_logits = 3 * VOCAB
    rows = nearly_on_policy(trainer, rows)
    stats = trainer.forward_backward(rows, loss)
    found = gradients(trainer)
    assert any("lm_head" in key for key in found) == (targets is HEAD)
    expected = plain_loss(trainer, rows, loss)
    expected.backward()
    assert stats.loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same(found, gradients(trainer), rtol=1e-3, atol=1e-5)


def test_parts_of_a_step_accumulate() -> None:
    datums = data()
    tokens = sum(datum.trained for datum in datums)
    whole, parts = learner(), learner()
    whole.forward_backward(datums)
    for part in (datums[:2], datums[2:]):
        parts.forward_backward(part, normalize_by=tokens)
    assert_same(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-6)


def test_several_threads_sum_gradients_in_one_order() -> None:
    """All rows follow from one token, whose gradients add up."""
    rows = [training_row([5, 3 + at % 50], credit=at - 255.5) for at in range(512)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trainer = learner(build=lambda: qwen3(hidden_size=256), off_start=True)
        found: list[dict[str, Tensor]] = []
        for _ in range(4):
            trainer.forward_backward(rows)
            found.append(gradients(trainer))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)


@pytest.mark.parametrize("build", [qwen3, gpt2, qwen3_moe])
def test_gradient_checkpointing_changes_nothing(build: Any) -> None:
    """GPT-2 has dropout in its layers, which must stay off."""
    plain = learner(build=build, off_start=True)
    saving = learner(build=build, off_start=True, gradient_checkpointing=True)
    runs: list[int] = []
    layer = "transformer.h.0.mlp" if build is gpt2 else "model.layers.0.mlp"
    saving.base.model.get_submodule(layer).register_forward_pre_hook(lambda *_: runs.append(1))
    for trainer in (plain, saving):
        trainer.forward_backward(data())
    assert len(runs) == 2, "the layers did not run again in the backward"
    assert_same(gradients(saving), gradients(plain), rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        self.elements = max(self.elements, *(part.numel() for part in parts), 0)
        return result


def test_no_tensor_is_as_large_as_all_logits() -> None:
    """A vocabulary much wider than the model: the largest tensors are the chunks' logits."""
    trainer = learner(build=lambda: qwen3(vocab_size=5003))
    trainer._logprobs.max_logits = 4 * 5003
    with Largest() as largest:
        stats = trainer.forward_backward(data(rows=20))
    assert stats.tokens > 80
    # The embedding itself has 16 * 5003.
    assert largest.elements <= 16 * 5003 < stats.tokens * 5003


# ---- steps


def test_good_tokens_become_likelier_and_the_base_stays() -> None:
    trainer = learner(adam=AdamParams(learning_rate=2e-2))
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    good, bad = training_row([5, 6, 7], start=2), training_row([5, 6, 8], start=2, credit=-1.0)
    before = trainer.forward([good, bad])
    for _ in range(5):
        one_step(trainer, on_policy(trainer, [good, bad]))
    after = trainer.forward([good, bad])
    assert after[0][2] > before[0][2] + 0.1
    assert after[1][2] < before[1][2] - 0.1
    for name, parameter in frozen.items():
        assert torch.equal(parameter, trainer.model.get_parameter(name)), name


def test_on_policy_stats() -> None:
    trainer = learner()
    datums = on_policy(trainer, data())
    stats = one_step(trainer, datums)
    lps = torch.cat([trained(datum, datum.logprobs) for datum in datums])
    assert stats.entropy == pytest.approx(-lps.mean().item(), rel=1e-5)
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert stats.max_logprob_difference < 1e-5
    assert 0 <= stats.sampler_trainer_kl < 1e-9
    assert (stats.grad_norm or 0) > 0
    assert not stats.skipped_non_finite
    # The same tokens again: now the policy has moved, and the stats say so.
    assert one_step(trainer, datums).max_logprob_difference > 1e-3


def test_adam_is_adam() -> None:
    """Three steps, with its formulas by hand; clipping and decay on."""
    trainer = learner(adam=AdamParams(learning_rate=3e-3, weight_decay=0.1, grad_clip_norm=0.01))
    key, weight = next((k, w) for k, w in trainer.parameters["default"].items() if "lora_B" in k)
    w, m, v = weight.detach().double(), torch.zeros(()).double(), torch.zeros(()).double()
    for t in range(1, 4):
        trainer.forward_backward(data(seed=t))
        grads = [p.grad for p in trainer.parameters["default"].values() if p.grad is not None]
        norm = math.sqrt(sum(float((x.double() ** 2).sum()) for x in grads))
        assert norm > 0.01, "clipping is not put to the test"
        assert weight.grad is not None
        g = weight.grad.double() * (0.01 / norm)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-12)
        w = w - 3e-3 * 0.1 * w - 3e-3 * step
        assert trainer.optim_step().grad_norm == pytest.approx(norm, rel=1e-4)
        moment = trainer.state_dict()[f"exp_avg/default/{key}"].double()
        torch.testing.assert_close(weight.detach().double(), w, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(moment, m, rtol=1e-3, atol=1e-9)


def test_adam_params_of_the_call_count() -> None:
    trainer = learner(adam=AdamParams(learning_rate=1.0))
    before = trainer.state_dict()
    one_step(trainer, data(), adam=AdamParams(learning_rate=0.0))
    weights = {k: v for k, v in trainer.state_dict().items() if k.startswith("weights/")}
    assert_same(weights, before)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e38])
def test_a_step_that_is_not_finite_changes_nothing(poison: float) -> None:
    trainer = learner(token_budget=30)
    one_step(trainer, data())
    before = trainer.state_dict()
    datums = data(seed=1)
    datums[3] = replace(datums[3], advantages=[poison] * len(datums[3].tokens))
    # Good gradients of the same step, from before the bad ones, go as well.
    trainer.forward_backward(data(seed=2))
    assert one_step(trainer, datums).skipped_non_finite
    assert_same(trainer.state_dict(), before)
    # And the next step is as if nothing had happened.
    assert not one_step(trainer, data(seed=3)).skipped_non_finite
    untroubled = learner(token_budget=30)
    untroubled.load_state_dict(before)
    one_step(untroubled, data(seed=3))
    assert_same(untroubled.state_dict(), trainer.state_dict())


def test_a_gradient_that_is_not_finite_is_refused_though_the_loss_is_fine() -> None:
    trainer = learner()
    before = trainer.state_dict()
    assert not trainer.forward_backward(data()).skipped_non_finite
    parameter = next(iter(trainer.parameters["default"].values()))
    assert parameter.grad is not None
    parameter.grad[0, 0] = math.nan
    assert trainer.optim_step().skipped_non_finite
    assert_same(trainer.state_dict(), before)


def overflows(row: TrainingRow) -> TrainingRow:
    """Its loss is finite and its gradient is not: PPO's clip hides a ratio that overflows."""
    return replace(row, logprobs=[-500.0] * len(row.tokens), advantages=[1.0] * len(row.tokens))


@pytest.mark.parametrize(
    "bad",
    [
        lambda row: replace(row, advantages=[math.nan] * len(row.tokens)),
        lambda row: replace(row, advantages=[1e308] * len(row.tokens)),
        lambda row: replace(row, logprobs=[-math.inf] * len(row.tokens)),
        lambda row: replace(row, extra={"temperature": [1e-40] * len(row.tokens)}),
        overflows,
    ],
    ids=["advantage", "overflow", "logprob", "temperature", "gradient"],
)
@pytest.mark.parametrize("at", [(0,), (2, 5)])
def test_rows_that_are_not_finite_are_found(
    bad: Callable[[TrainingRow], TrainingRow], at: tuple[int, ...]
) -> None:
    trainer = learner(token_budget=60)
    rows = data()
    for place in at:
        rows[place] = bad(rows[place])
    assert one_step(trainer, rows, "ppo").skipped_non_finite
    kept = trainer.finite_rows(rows, "ppo")
    assert kept == [place for place in range(len(rows)) if place not in at]
    assert gradients(trainer) == {}
    assert not one_step(trainer, [rows[place] for place in kept], "ppo").skipped_non_finite


@pytest.mark.parametrize("build", [qwen3, llama])
def test_a_row_whose_logprobs_are_not_finite_spoils_no_other(build: Any) -> None:
    """In the attention of a trie they share a softmax."""
    trainer = learner(build=build, off_start=True)
    rows = [replace(row, tokens=[3, 4, *row.tokens[2:]]) for row in data()]
    expected = trainer.forward(rows)
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[60] = math.inf
    bad = replace(rows[2], tokens=[*rows[2].tokens[:2], 60, *rows[2].tokens[3:]])
    clean = [place for place, row in enumerate(rows) if place != 2 and 60 not in row.tokens]
    assert len(clean) > 3
    found = trainer.forward([*rows[:2], bad, *rows[3:]])
    assert not all(map(math.isfinite, found[2]))
    for place in clean:
        assert found[place] == pytest.approx(expected[place], abs=1e-5)


def test_nothing_to_learn() -> None:
    trainer = learner()
    before = trainer.state_dict()
    stats = one_step(trainer, [])
    assert (stats.tokens, stats.loss, stats.grad_norm) == (0, 0.0, 0.0)
    assert_same(trainer.state_dict(), before)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: learner().forward_backward(data(), "grpo"), r"unknown loss 'grpo'.*cispo"),
        (lambda: learner().forward_backward(data(adapters=("stranger",))), "stranger"),
        (lambda: learner(adapters=["a", "a"]), "already attached"),
        (lambda: learner(adapters=["b"]).load_state_dict(learner().state_dict()), "another set"),
        (lambda: learner(rank=2).load_state_dict(learner().state_dict()), "shape"),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mistake()


# ---- several adapters


def test_adapters_learn_apart() -> None:
    """Two adapters in one learner are two learners, though their rows come mixed."""
    datums = data(rows=8, adapters=("asker", "guesser"))
    both = learner(adapters=["asker", "guesser"], seed=7)
    tokens = sum(datum.trained for datum in datums)
    for _ in range(3):
        one_step(both, datums)
    state = both.state_dict()
    for at, name in enumerate(both.adapters):
        alone = learner(adapters=[name], seed=7 + at)
        for _ in range(3):
            alone.forward_backward([d for d in datums if d.adapter == name], normalize_by=tokens)
            alone.optim_step()
        own = {key: value for key, value in state.items() if f"/{name}/" in key}
        assert_same(own, alone.state_dict(), rtol=1e-3, atol=1e-5)


def test_an_adapter_without_data_stays_as_it_is() -> None:
    both = learner(adapters=["asker", "guesser"])
    one_step(both, data(adapters=("asker", "guesser")))
    before = both.state_dict()
    assert both.forward_backward(data(seed=1, adapters=("guesser",))).tokens
    both.optim_step(AdamParams(learning_rate=1e-2, weight_decay=0.5))
    after = both.state_dict()
    changed = {key.split("/")[1] for key in after if not torch.equal(after[key], before[key])}
    assert changed == {"guesser"}


# ---- saving


@pytest.mark.parametrize("build", [qwen3, qwen3_moe])
def test_a_resumed_learner_goes_on_to_the_last_bit(build: Any) -> None:
    straight = learner(build=build, adapters=["a", "b"])
    for seed in range(2):
        one_step(straight, data(seed, adapters=("a", "b")))
    state = straight.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    resumed = learner(build=build, adapters=["a", "b"], seed=99)
    resumed.load_state_dict(state)
    assert_same(resumed.state_dict(), state)
    for trainer in (straight, resumed):
        one_step(trainer, data(5, adapters=("a", "b")))
    assert_same(resumed.state_dict(), straight.state_dict(), rtol=0.0, atol=0.0)
    assert_same(state, kept)  # it was a copy


def test_loading_forgets_what_was_before() -> None:
    """Back to a state from before the first step, when there were no moments, nor gradients."""
    trainer = learner()
    start = trainer.state_dict()
    one_step(trainer, data())
    first = trainer.state_dict()
    trainer.forward_backward(data(seed=1))
    trainer.load_state_dict(start)
    assert_same(trainer.state_dict(), start)
    one_step(trainer, data())
    assert_same(trainer.state_dict(), first)
