"""Two ranks compute what one learner computes, and survive the death of one.

``benchmarks/distributed`` measures more ranks.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_rows import ADAM, MODEL, TINY, distance, groups, ranks_of
from small_models import qwen3, save_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl_trainer.client import AdamParams as ClientAdam
from agentrl_trainer.client import ServiceClient
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.distributed import heartbeats
from agentrl_trainer.distributed.plan import RankError, RankPlan
from agentrl_trainer.distributed.ranks import RankedLearner
from agentrl_trainer.distributed.sharded import ShardedLearner
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.logprobs import TokenLogprobs
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.losses import LOSSES
from agentrl_trainer.learner.optimizers import VALUE as PREFIX
from agentrl_trainer.learner.preference_losses import pair_loss
from agentrl_trainer.learner.prepare_batch import with_gae
from agentrl_trainer.learner.reward_head import pair_scores_loss, score_row
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import load_adapter_weights
from agentrl_trainer.models.sources import ModelError

VALUE = ValueParams(lr=1e-3, clip=0.2)
FIRST: dict[str, Any] = {"adapters": ("a",), "rank": 8, "seed": 1, "value": VALUE}


def two_adapters(of: Any) -> Any:
    of.add_adapter("b", rank=4, seed=2)
    return of


@pytest.mark.parametrize(("size", "shard"), [(2, False), (2, True), (3, False)])
def test_a_run_resumes_bit_for_bit(tmp_path: Any, size: int, shard: bool) -> None:
    trainers = {"size": size, "shard": shard}

    def steps(training: Any, seeds: range) -> None:
        for seed in seeds:
            training.forward_backward(groups(seed, adapters=("policy",)), "ppo", None)
            training.optim_step(ClientAdam(learning_rate=1e-3)).result()

    def state(training: Any) -> dict[str, Tensor]:
        return training.local(lambda learner: learner.state_dict()).result()

    def client(service: ServiceClient) -> Any:
        return service.create_lora_training_client(TINY, 4, seed=3, name="policy")

    with ServiceClient(folder=tmp_path / "whole", trainers=trainers, **MODEL) as service:
        training = client(service)
        steps(training, range(2))
        service.save_checkpoint(tmp_path / "saved", 2).result()
        steps(training, range(2, 4))
        whole = state(training)
    with ServiceClient(folder=tmp_path / "resumed", trainers=trainers, **MODEL) as service:
        training = client(service)
        assert service.restore_checkpoint(tmp_path / "saved").result().checkpoint
        steps(training, range(2, 4))
        resumed = state(training)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def experts(folder: Path) -> str:
    """Save a small mixture of experts."""
    config = Qwen3MoeConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=48, moe_intermediate_size=24, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    return save_model(Qwen3MoeForCausalLM(config), folder)


def test_experts_and_layers_that_are_computed_twice(tmp_path: Path) -> None:
    check_beside_one(
        experts(tmp_path),
        {"gradient_checkpointing": True},
        lambda of, rows: of.forward_backward(rows, "ppo"),
    )


def test_reward_heads() -> None:
    def learn(of: Any, rows: list[TrainingRow]) -> None:
        of.forward_backward_custom([score_row(row.tokens, "a") for row in rows], pair_scores_loss)

    check_beside_one(TINY, {"score": True}, learn)


def check_beside_one(
    model: str, options: dict[str, Any], learn: Callable[[Any, list[TrainingRow]], object]
) -> None:
    """Step with one learner and with two ranks that share its base model."""
    given = {"adapters": ("a",), "rank": 8, "seed": 1, **options}
    one = Learner(load_base(model, **MODEL), **given)
    ranked = ranks_of(RankPlan(model, MODEL, 2, shard=True), given)
    for seed in range(2):
        for of in (one, ranked):
            learn(of, groups(seed, 2, adapters=("a",)))
            assert of.optim_step(ADAM).grad_norm > 0
        assert distance(one, ranked) < 1e-6
    ranked.close()


@pytest.fixture(scope="module", params=["whole", "sharded"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Learner, RankedLearner]]:
    """A learner, and two ranks; tests do the same with both.

    Of the sharded base, some rows exceed the budget of tokens: their layers are computed twice.
    """
    torch.set_num_threads(1)
    shard = request.param == "sharded"
    options = {**FIRST, "token_budget": 45 if shard else None}
    one = Learner(load_base(TINY, **MODEL), **options)
    ranked = two_adapters(ranks_of(RankPlan(TINY, MODEL, 2, shard=shard), options))
    yield two_adapters(one), ranked
    ranked.close()


def test_each_rank_holds_its_part_of_a_sharded_base(both: tuple[Learner, Any]) -> None:
    whole, part = (
        sum(
            getattr(tensor, "_local_tensor", tensor).numel()
            for tensor in of.base.model.parameters()
        )
        - sum(tensor.numel() for own in of.parameters.values() for tensor in own.values())
        for of in both
    )
    assert part <= whole * (0.51 if isinstance(both[1].learner, ShardedLearner) else 1)


def test_steps_are_those_of_one_learner(both: tuple[Learner, Any]) -> None:
    for seed in range(5):
        rows, seen = groups(seed), list[Any]()
        for of in both:
            given = of.with_proximal(of.with_reference(of.with_temperature(rows)))
            logprobs = [[0.0] * len(row.tokens) for row in rows]
            stats = of.forward_backward(given, "ppo", {"kl_coef": 0.1}, None, logprobs)
            seen.append((given, logprobs, stats, of.values(rows), of.optim_step(ADAM)))
        (rows_1, logprobs_1, stats_1, values_1, step_1), (rows_n, *found) = seen
        logprobs_n, stats_n, values_n, step_n = found
        for row_1, row_n in zip(rows_1, rows_n, strict=True):
            assert row_n.tokens == row_1.tokens
            for name in ("reference", "proximal"):
                assert row_n.extra[name] == pytest.approx(row_1.extra[name], abs=3e-5)
        for many, single in ((logprobs_n, logprobs_1), (values_n, values_1)):
            for row_n, row_1 in zip(many, single, strict=True):
                assert row_n == pytest.approx(row_1, abs=3e-5)
        assert stats_n.loss == pytest.approx(stats_1.loss, rel=1e-6)
        for name in ("tokens", "tokens_total", "tokens_unique"):
            assert getattr(stats_n, name) == getattr(stats_1, name)
        for name in ("entropy", "ratio_mean", "ratio_max", "clip_fraction", "sampler_trainer_kl"):
            assert getattr(stats_n, name) == pytest.approx(getattr(stats_1, name), rel=1e-4)
        assert stats_n.metrics == pytest.approx(dict(stats_1.metrics), rel=1e-4)
        assert step_n.grad_norm == pytest.approx(step_1.grad_norm, rel=1e-5)
        assert distance(*both) < 1e-6


@pytest.mark.parametrize("loss", sorted({*LOSSES, "dpo", "kto", "gae"} - {"ppo"}))
def test_every_loss_is_that_of_one_learner(both: tuple[Learner, Any], loss: str) -> None:
    found = list[Any]()
    for of in both:
        rows = of.with_reference(groups(14, 2, adapters=("a",), prompt=8))
        if loss in ("dpo", "kto"):
            stats, _ = of.forward_backward_custom(rows, pair_loss(loss, 0.1))
        elif loss == "gae":
            earned = [[0.1 * (token % 7) for token in row.tokens] for row in rows]
            rows = with_extra(rows, rewards=earned)
            stats = of.forward_backward(with_gae(rows, of.values(rows)), "ppo")
        else:
            stats = of.forward_backward(rows, loss)
        found.append((stats.loss, of.optim_step(ADAM).grad_norm))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert distance(*both) < 1e-6


def test_gradients_of_the_adapters_that_step_are_sent_once(both: tuple[Learner, Any]) -> None:
    before = both[1].sent
    for of in both:
        for seed in (15, 16):
            of.forward_backward(groups(seed, 2, adapters=("a",), prompt=8))
        of.optim_step(ADAM)
    trained = [*both[0].parameters["a"].values(), *both[0].parameters[f"{PREFIX}a"].values()]
    assert both[1].sent - before == sum(one.nbytes for one in trained)


def test_fewer_rows_than_ranks_and_an_idle_adapter(both: tuple[Learner, Any]) -> None:
    [row, *_] = groups(7)
    for of in both:
        before = of.state_dict(["b"])
        of.forward_backward([row])
        of.optim_step(ADAM)
        assert all(torch.equal(before[key], now) for key, now in of.state_dict(["b"]).items())
    assert distance(*both) < 1e-6


def test_a_saved_adapter_is_a_reference(both: tuple[Learner, Any], tmp_path: Path) -> None:
    found = list[list[float]]()
    for of, name in zip(both, ("one", "ranked"), strict=True):
        of.save("a", tmp_path / name)
        of.add_reference("start", tmp_path / name)
        rows = of.with_reference(groups(6, 1), "start")
        found += [rows[0].extra["reference"]]
        assert rows[0].extra["reference"] == pytest.approx(of.forward(rows)[0], abs=3e-5)
    assert found[1] == pytest.approx(found[0], abs=3e-5)


def test_a_custom_loss_is_called_once_with_all_log_probs(both: tuple[Learner, Any]) -> None:
    def loss(rows: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        sums = torch.stack([row.sum() for row in logprobs])
        return (sums - sums.mean()).square().mean(), {"rows": float(len(rows))}

    found = [of.forward_backward_custom(groups(8), loss) for of in both]
    norms = [of.optim_step(ADAM).grad_norm for of in both]
    assert [metrics for _, metrics in found] == [{"rows": 24.0}] * 2
    assert found[1][0].loss == pytest.approx(found[0][0].loss, rel=1e-5)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_what_is_not_finite_changes_nothing_on_any_rank(both: tuple[Learner, Any]) -> None:
    rows = groups(9)
    broken = [*rows[:-1], with_extra(rows[-1:], temperature=[[0.0] * len(rows[-1].tokens)])[0]]
    for of in both:
        assert [math.isfinite(sum(row)) for row in of.forward(broken)] == [*[True] * 23, False]
        before = of.state_dict()
        assert of.forward_backward(broken).skipped_non_finite
        assert of.optim_step(ADAM).skipped_non_finite
        assert all(torch.equal(before[key], now) for key, now in of.state_dict().items())
        assert of.finite_rows(broken, "ppo") == list(range(len(rows) - 1))


@pytest.mark.parametrize(
    ("struck", "said"),
    [
        (signal.SIGSTOP, "it gave no sign of life for 3 s"),
        (signal.SIGKILL, "it was killed by signal 9"),
    ],
)
def test_a_rank_that_dies_fails_the_call_and_the_next_goes_on(
    both: tuple[Learner, Any], struck: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ranked = both
    if struck == signal.SIGSTOP and isinstance(ranked.learner, ShardedLearner):
        pytest.skip("its followers would have ended for good")
    for of in both:
        of.load_state_dict(one.state_dict())
    ranked.forward(groups(10, 2))  # starts followers
    ranked._followers.running[0].process.send_signal(struck)
    monkeypatch.setattr(heartbeats, "LOOK_S", 0.2)
    with pytest.raises(RankError, match=f"rank 1 of 2 ended: {said}"):
        ranked.forward_backward(groups(10))
    monkeypatch.undo()  # of the next followers
    if isinstance(ranked.learner, ShardedLearner):
        with pytest.raises(
            RankError, match="the other trainers have ended, and their parts of the base model"
        ):
            ranked.forward(groups(10))
        return
    for of in both:
        of.forward_backward(groups(10))
        of.optim_step(ADAM)
    assert distance(*both) < 1e-6
    with pytest.raises(ValueError, match="unknown"):
        ranked.forward_backward(groups(10), "unknown")


def test_a_call_that_fails_costs_no_gradients_unnoticed(both: tuple[Learner, Any]) -> None:
    one, ranked = both
    if isinstance(ranked.learner, ShardedLearner):
        pytest.skip("its followers have ended for good")
    before = one.state_dict()
    for of in both:
        of.load_state_dict(before)
    ranked.forward_backward(groups(11, adapters=("a",)))
    with pytest.raises(ValueError, match="unknown"):
        ranked.forward_backward(groups(11, adapters=("b",)), "unknown")
    ranked.forward_backward(groups(12, adapters=("a",)))
    with pytest.raises(RuntimeError, match="nothing was updated: gradients were lost"):
        ranked.optim_step(ADAM, ["a"])
    assert distance(*both) == 0
    for of in both:
        of.forward_backward(groups(12, adapters=("a",)))
        assert of.optim_step(ADAM, ["a"]).grad_norm > 0
    assert distance(*both) < 1e-6
    ranked.forward_backward(groups(13, adapters=("a",)))
    with pytest.raises(AttributeError):
        ranked.optim_step("no AdamParams", ["a"])
    for of in both:  # the caller was told by that error
        of.discard_gradients()
        of.forward_backward(groups(13, adapters=("a",)))
        assert of.optim_step(ADAM, ["a"]).grad_norm > 0


def test_ranks_of_a_sharded_base_keep_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of any number and length, some at another temperature, some logits at a time, over a
    head of its own; from an adapter that only this process has loaded."""
    monkeypatch.setitem(TokenLogprobs.__init__.__kwdefaults__, "max_logits", 2000)
    model = qwen3()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    folder, options = save_model(model, tmp_path), {"adapters": ("a",), "rank": 4, "value": VALUE}
    one = Learner(load_base(folder, **MODEL), **options, token_budget=100)
    one.model.load_state_dict(
        {k: v + 0.1 for k, v in one.model.state_dict().items() if "lora_B" in k}, strict=False
    )
    one.save("a", tmp_path / "start")
    plan = RankPlan(folder, MODEL, 2, [("follower_setup:with_few_logits", ())], shard=True)
    ranked: Any = ranks_of(plan, {**options, "token_budget": 100})
    load_adapter_weights(ranked.learner.model, "a", tmp_path / "start")
    rows = groups(3, adapters=("a",), prompt=80)
    warm = [[0.7] * len(row.tokens) for row in rows[13:]]
    rows = [*rows[:13], *with_extra(rows[13:], temperature=warm)]
    assert type(ranked.learner.base.model.lm_head).__name__ == "FSDPLinear"
    for some in (rows[:1], rows, rows[:3]):
        found = [
            [*of.values(some), *of.forward(some), *(r.logprobs for r in of.with_temperature(some))]
            for of in (one, ranked)
        ]
        for ours, theirs in zip(*found, strict=True):
            assert theirs == pytest.approx(ours, abs=3e-5)
        for of in (one, ranked):
            of.forward_backward(some, "ppo")
            of.optim_step(ADAM)
        assert distance(one, ranked) < 1e-6
    ranked.close()


def test_a_base_without_layers_to_spread_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=250, n_positions=64)
    folder = save_model(GPT2LMHeadModel(config), tmp_path)
    with pytest.raises(ModelError, match="shard_base: transformers has no plan to spread gpt2"):
        ranks_of(RankPlan(folder, MODEL, 2, shard=True), {"adapters": ("a",), "rank": 4})
