"""Training over the client API on agentrl-tiny: every step is the learner's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from client_data import RL_ROW, ROW, TINY, grad_norm, logprobs, reinforced, supervised

from agentrl_trainer.client import (
    AdamParams,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import load_base


def learner(seed: int = 3) -> Learner:
    return Learner(load_base(TINY), adapters=("a",), rank=4, seed=seed)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", {}),
        ("ppo", {"clip_high_threshold": 1.28}),
        ("cispo", {}),
        ("dro", {"beta": 0.1}),
        ("gspo", {}),
        ("dppo", {}),
    ],
)
def test_a_step_is_the_learners(
    training: TrainingClient, loss: str, config: dict[str, float]
) -> None:
    seen = training.forward([reinforced()], loss, config).result()
    ours = training.forward_backward([reinforced()], loss, config).result()
    # What ``forward`` computes is the same, and leaves no gradient.
    assert seen.metrics == ours.metrics
    before = ours.loss_fn_outputs[0]["logprobs"]
    assert (seen.loss_fn_outputs[0]["logprobs"] == before).all()
    norm = grad_norm(training)
    plain = learner()
    stats = plain.forward_backward([RL_ROW], loss, config, normalize_by=1.0)
    step = plain.optim_step(AdamParams(learning_rate=1e-2))
    assert ours.metrics["loss:sum"] == stats.loss
    assert norm == step.grad_norm > 0
    assert before.shape == (7,)
    # Both have learned the same: the next log-probs are those of the learner, to the last bit.
    after = logprobs(training)
    whole = TrainingRow(ROW, [False] + [True] * 7, [0.0] * 8, [0.0] * 8, "a")
    assert after == np.float32(plain.forward([whole])[0][1:]).tolist()
    assert abs(np.subtract(after, before)[3:]).max() > 1e-4


def test_every_parameter_of_adam_is_the_learners(training: TrainingClient) -> None:
    plain = learner()
    given = {"beta1": 0.7, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.5, "grad_clip_norm": 0.01}
    for _ in range(2):
        training.forward_backward([reinforced()], "importance_sampling")
        training.optim_step(AdamParams(learning_rate=1e-2, **given))
        plain.forward_backward([RL_ROW], "importance_sampling", normalize_by=1.0)
        plain.optim_step(AdamParams(learning_rate=1e-2, **given))
    name = training.get_info().model_id
    state = training.local(lambda trained: trained.state_dict([name])).result()
    own = {key.replace(f"/{name}/", "/a/"): value for key, value in state.items()}
    for key, value in plain.state_dict().items():
        assert torch.equal(own[key], value), key


def test_cross_entropy_is_the_weighted_sum(shared: TrainingClient) -> None:
    weights = [0.0, 0.5, 1.0, 1.0, 2.0, 0.0, 1.0]
    done = shared.forward_backward([supervised(weights=weights)]).result()
    found = done.loss_fn_outputs[0]["logprobs"]
    assert (found < 0).all()
    assert done.metrics["loss:sum"] == pytest.approx(-float(np.dot(weights, found)), rel=1e-5)
    grad_norm(shared, 0)


def test_a_forward_weighs_as_forward_backward_does(shared: TrainingClient) -> None:
    datum = supervised()
    plain = shared.forward([datum]).result().metrics["loss:sum"]
    datum.loss_fn_inputs["length_weights"] = [0.5] * 7
    seen = shared.forward([datum]).result().metrics["loss:sum"]
    assert seen == pytest.approx(plain / 2, rel=1e-5)
    assert seen == shared.forward_backward([datum]).result().metrics["loss:sum"]
    grad_norm(shared, 0)


def test_normalize_by(shared: TrainingClient) -> None:
    def norm(by: float | None) -> float:
        shared.forward_backward([supervised()], normalize_by=by)
        return grad_norm(shared, 0)

    whole = norm(1.0)
    assert norm(None) == pytest.approx(whole / 7, rel=1e-5)
    assert norm(3.5) == pytest.approx(whole / 3.5, rel=1e-5)


def test_a_failed_forward_backward_is_no_silent_half_step(shared: TrainingClient) -> None:
    before = logprobs(shared)
    shared.forward_backward([supervised()])

    def broken(data: Any, logprobs: Any) -> Any:
        raise KeyError("mine")

    failed = shared.forward_backward_custom([supervised()], broken)
    with pytest.raises(KeyError, match="mine"):
        failed.result()
    with pytest.raises(RuntimeError, match="nothing was updated"):
        shared.optim_step().result()
    assert logprobs(shared) == before
    assert grad_norm(shared) == 0  # and it goes on


def test_a_step_that_is_not_finite_is_refused(shared: TrainingClient) -> None:
    before = logprobs(shared)
    shared.forward_backward([reinforced(logprobs=[-200.0] * 7)], "importance_sampling")
    assert shared.optim_step().result().metrics["skipped_non_finite"] == 1
    assert logprobs(shared) == before


def test_adapters_over_one_base_learn_apart(service: ServiceClient) -> None:
    first = service.create_lora_training_client(TINY, rank=4, seed=1)
    second = service.create_lora_training_client(TINY, rank=8, seed=2, train_mlp=False)
    assert second.get_info().lora_rank == 8
    base = logprobs(second)
    first.forward_backward([supervised()])
    second.forward_backward([supervised()])
    grad_norm(first)
    assert logprobs(second) == base
    # The other's step has not eaten its gradient.
    assert grad_norm(second) > 0
    assert sum(logprobs(second)) > sum(base) + 0.1


def test_the_caller_does_not_wait(shared: TrainingClient) -> None:
    futures = [shared.forward_backward([supervised()]) for _ in range(6)]
    assert not futures[-1].done()
    assert futures[-1].result().metrics["tokens:sum"] == 7
    assert futures[0].done()  # in order
    grad_norm(shared, 0)


async def test_everything_can_be_awaited(service: ServiceClient) -> None:
    client = await service.create_lora_training_client_async(TINY, rank=4)
    pending = await client.forward_backward_async([supervised()], "cross_entropy")
    stepped = await client.optim_step_async(AdamParams(learning_rate=1e-2))
    assert (await pending).metrics["tokens:sum"] == 7
    assert (await stepped).metrics["grad_norm"] > 0
    sampler = await client.save_weights_and_get_sampling_client_async()
    assert isinstance(sampler, SamplingClient)
    several = await asyncio.gather(
        *(sampler.sample_async(ROW, 1, SamplingParams(max_tokens=3)) for _ in range(3))
    )
    assert [len(one.sequences) for one in several] == [1, 1, 1]
    state = await (await client.save_state_async("s"))
    again = await service.create_training_client_from_state_async(state.path)
    assert await again is again
    with pytest.raises(FileExistsError, match="overwrite=True"):
        await client.save_state("s")


def test_logged_metrics_are_kept(training: TrainingClient) -> None:
    training.log({"reward": np.float32(0.5)}, step=3, loss=torch.tensor(2.0), odd=float("nan"))
    assert training.history[0] | {"odd": 0} == {"step": 3, "reward": 0.5, "loss": 2.0, "odd": 0}
    (line,) = (training.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "reward": 0.5, "loss": 2.0, "odd": None}
