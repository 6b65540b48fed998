"""The client API on agentrl-tiny: what it trains and samples is what learner and sampler do."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_trainer.checkpoint import capture_rng, restore_rng
from agentrl_trainer.client import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from agentrl_trainer.client.rows import to_row
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.models.loading import load_base

TINY = "agentrl-tiny"
ROW = [5, 9, 300, 41, 77, 12, 600, 3]
SAMPLED = [0.0, 0.0, 0.0, -2.5, -7.0, -4.0, -9.0]
ADVANTAGES = [0.0, 0.0, 0.0, 1.0, 1.0, -0.5, 2.0]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with ServiceClient(folder=tmp_path_factory.mktemp("client")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(service: ServiceClient) -> TrainingClient:
    """For tests that leave the weights as they are."""
    return service.create_lora_training_client(TINY, rank=4, seed=3)


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(TINY, rank=4, seed=3)


def supervised(row: list[int] = ROW, weights: list[float] | None = None) -> Datum:
    inputs: dict[str, Any] = {"target_tokens": row[1:]}
    if weights is not None:
        inputs["weights"] = weights
    return Datum(ModelInput.from_ints(row[:-1]), inputs)


def reinforced() -> Datum:
    return Datum(
        ModelInput.from_ints(ROW[:-1]),
        {"target_tokens": ROW[1:], "logprobs": SAMPLED, "advantages": ADVANTAGES},
    )


def learner(seed: int = 3) -> Learner:
    return Learner(load_base(TINY), adapters=("a",), rank=4, seed=seed)


RL_ROW = TrainingRow(
    tokens=ROW,
    mask=[False] * 4 + [True] * 4,
    logprobs=[0.0, *SAMPLED],
    advantages=[0.0, *ADVANTAGES],
    adapter="a",
)


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
    ours = training.forward_backward([reinforced()], loss, config)
    # What ``forward`` computes is the same, and leaves no gradient.
    assert seen.metrics == ours.result().metrics
    assert (
        seen.loss_fn_outputs[0]["logprobs"] == ours.result().loss_fn_outputs[0]["logprobs"]
    ).all()
    norm = training.optim_step(AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"]
    plain = learner()
    stats = plain.forward_backward([RL_ROW], loss, config, normalize_by=1.0)
    step = plain.optim_step(AdamParams(learning_rate=1e-2))
    assert ours.result().metrics["loss:sum"] == stats.loss
    assert norm == step.grad_norm > 0
    logprobs = ours.result().loss_fn_outputs[0]["logprobs"]
    assert logprobs.shape == (7,)
    # Both have learned the same: the next log-probs are those of the learner, to the last bit.
    after = training.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    whole = TrainingRow(ROW, [False] + [True] * 7, [0.0] * 8, [0.0] * 8, "a")
    assert after.tolist() == np.float32(plain.forward([whole])[0][1:]).tolist()
    assert abs(after[3:] - logprobs[3:]).max() > 1e-4


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


def test_a_restored_checkpoint_goes_on_with_its_random_numbers(tmp_path: Path) -> None:
    before = capture_rng()
    try:
        with ServiceClient(folder=tmp_path) as service:
            service.create_lora_training_client(TINY, rank=4, seed=3)
            service.save_checkpoint(tmp_path / "kept", 1).result()
            expected = (random.random(), float(np.random.rand()), float(torch.rand(())))
            service.restore_checkpoint(tmp_path / "kept").result()
            assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
    finally:
        restore_rng(before)


def test_cross_entropy_is_the_weighted_sum(shared: TrainingClient) -> None:
    weights = [0.0, 0.5, 1.0, 1.0, 2.0, 0.0, 1.0]
    done = shared.forward_backward([supervised(weights=weights)]).result()
    logprobs = done.loss_fn_outputs[0]["logprobs"]
    assert (logprobs < 0).all()
    assert done.metrics["loss:sum"] == pytest.approx(-float(np.dot(weights, logprobs)), rel=1e-5)
    shared.optim_step(AdamParams(learning_rate=0)).result()


def test_a_forward_weighs_as_forward_backward_does(shared: TrainingClient) -> None:
    datum = supervised()
    plain = shared.forward([datum]).result().metrics["loss:sum"]
    datum.loss_fn_inputs["length_weights"] = [0.5] * 7
    seen = shared.forward([datum]).result().metrics["loss:sum"]
    assert seen == pytest.approx(plain / 2, rel=1e-5)
    assert seen == shared.forward_backward([datum]).result().metrics["loss:sum"]
    shared.optim_step(AdamParams(learning_rate=0)).result()


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(service: ServiceClient) -> None:
    built_in = service.create_lora_training_client(TINY, rank=4, seed=7)
    custom = service.create_lora_training_client(TINY, rank=4, seed=7)
    weights = [0.0, 0.5, 1.0, 1.0, 2.0, 0.0, 1.0]
    data = [supervised(weights=weights), supervised(ROW[::-1], weights)]

    def loss(given: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        assert given is data
        parts = [
            -(torch.tensor(datum.loss_fn_inputs["weights"]) * row).sum()
            for datum, row in zip(given, logprobs, strict=True)
        ]
        return torch.stack(parts).sum(), {"parts": float(len(parts))}

    first = built_in.forward_backward(data).result()
    second = custom.forward_backward_custom(data, loss).result()
    assert second.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"], rel=1e-5)
    assert second.metrics["parts"] == 2
    norms = [c.optim_step().result().metrics["grad_norm"] for c in (built_in, custom)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_normalize_by(shared: TrainingClient) -> None:
    def norm(by: float | None) -> float:
        shared.forward_backward([supervised()], normalize_by=by)
        return shared.optim_step(AdamParams(learning_rate=0)).result().metrics["grad_norm"]

    whole = norm(1.0)
    assert norm(None) == pytest.approx(whole / 7, rel=1e-5)
    assert norm(3.5) == pytest.approx(whole / 3.5, rel=1e-5)


def test_plain_arrays_of_every_kind_give_the_same(shared: TrainingClient) -> None:
    kinds = [list, np.asarray, torch.tensor]
    losses = set()
    for kind in kinds:
        datum = Datum(
            ModelInput(chunks=[EncodedTextChunk(ROW[:3]), EncodedTextChunk(ROW[3:-1])]),
            {"target_tokens": kind(ROW[1:]), "weights": kind([1.0, 0.5] * 3 + [1.0])},
        )
        losses.add(shared.forward_backward([datum]).result().metrics["loss:sum"])
    assert len(losses) == 1
    half = Datum(
        ModelInput.from_ints(np.array(ROW[:-1])),
        {
            "target_tokens": torch.tensor(ROW[1:]),
            "weights": torch.ones(7, dtype=torch.bfloat16, requires_grad=True),
        },
    )
    shared.forward_backward([half]).result()
    shared.optim_step(AdamParams(learning_rate=0)).result()


def test_a_datum_is_a_row_of_the_learner() -> None:
    assert to_row(reinforced(), "a", "ppo") == RL_ROW


def replaced(**inputs: Any) -> Datum:
    return Datum(reinforced().model_input, {**reinforced().loss_fn_inputs, **inputs})


@pytest.mark.parametrize(
    ("datum", "loss", "message"),
    [
        (supervised(), "reinforce", r"loss_fn: unknown loss 'reinforce'"),
        (supervised(), "ppo", r"data\[0\]: loss_fn_inputs lacks .*advantages.*ppo"),
        (replaced(weights=[1] * 7), "ppo", r"weights are cross_entropy's"),
        (replaced(advantages=[1.0] * 6), "ppo", r"advantages has 6 values, target_tokens 7"),
        (replaced(target_tokens=ROW[2:]), "ppo", r"model_input has 7 tokens and target_tokens 6"),
        (replaced(target_tokens=ROW[:-1]), "ppo", r"target_tokens\[3\] is 41.*shifted by one"),
        (replaced(target_tokens=[0.5] * 7), "ppo", r"whole numbers"),
        (replaced(target_tokens=[-100] * 7), "ppo", r"not negative; got -100"),
        (replaced(target_tokens=[[1] * 7]), "ppo", r"one dimension, not shape \(1, 7\)"),
        (replaced(advantages=[np.nan] * 7), "ppo", r"advantages\[0\] is nan.*finite"),
        (replaced(logprobs=[0.5] * 7), "ppo", r"never positive"),
        (replaced(advantage=[0.5] * 7), "ppo", r"\['advantage'\], but known are"),
        (Datum(ModelInput.from_ints([1])), "cross_entropy", r"lacks target_tokens"),
        (supervised([*ROW[:-1], 10**6]), "cross_entropy", r"token id 1000000 is beyond"),
        (supervised([1] * 5000), "cross_entropy", r"the row has 5000 tokens.*context"),
    ],
)
def test_mistakes_are_named_at_once(
    shared: TrainingClient, datum: Datum, loss: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shared.forward_backward([datum], loss)


def test_more_mistakes(service: ServiceClient, shared: TrainingClient) -> None:
    with pytest.raises(ValueError, match="data is empty"):
        shared.forward_backward([])
    with pytest.raises(ValueError, match=r"unknown options of ppo.*clip"):
        shared.forward_backward([reinforced()], "ppo", {"clip": 0.2})
    with pytest.raises(ValueError, match="a finite learning_rate"):
        shared.optim_step(AdamParams(learning_rate=float("nan")))
    with pytest.raises(ValueError, match="output embedding"):
        service.create_lora_training_client(TINY, train_unembed=True)
    with pytest.raises(ValueError, match="nothing would be trained"):
        service.create_lora_training_client(TINY, train_mlp=False, train_attn=False)
    with pytest.raises(ValueError, match="no-such-model"):
        service.create_lora_training_client("./no-such-model")
    with pytest.raises(ValueError, match="either model_path or base_model"):
        service.create_sampling_client()
    with pytest.raises(ValueError, match="holds no whole state"):
        shared.load_state("nowhere").result()
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        service.create_sampling_client(base_model=TINY).sample([])
    with pytest.raises(ValueError, match="must be a number"):
        shared.log(reward="high")  # type: ignore[arg-type]


def test_a_failed_forward_backward_is_no_silent_half_step(shared: TrainingClient) -> None:
    before = shared.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    shared.forward_backward([supervised()])

    def broken(data: Any, logprobs: Any) -> Any:
        raise KeyError("mine")

    failed = shared.forward_backward_custom([supervised()], broken)
    with pytest.raises(KeyError, match="mine"):
        failed.result()
    with pytest.raises(RuntimeError, match="nothing was updated"):
        shared.optim_step().result()
    after = shared.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    assert after.tolist() == before.tolist()
    assert shared.optim_step().result().metrics["grad_norm"] == 0  # and it goes on


def test_a_loss_that_waits_for_its_own_thread_is_told(shared: TrainingClient) -> None:
    def waits(data: Any, logprobs: Any) -> Any:
        return shared.forward(data).result()

    with pytest.raises(RuntimeError, match="wait for itself"):
        shared.forward_backward_custom([supervised()], waits).result()
    with pytest.raises(RuntimeError, match="nothing was updated"):
        shared.optim_step().result()


def test_a_loss_may_wait_for_no_other_operation_of_its_base(
    service: ServiceClient, shared: TrainingClient
) -> None:
    params = SamplingParams(max_tokens=2)
    waits = [
        lambda: shared.save_weights_and_get_sampling_client().result(),
        lambda: shared.save_weights_and_get_sampling_client().sample(ROW, 1, params).result(),
        lambda: shared.save_weights_and_get_sampling_client().compute_logprobs(ROW).result(),
        lambda: service.create_lora_training_client(TINY, rank=4, name="in-a-loss"),
        lambda: asyncio.run(shared.forward([supervised()]).result_async()),
    ]
    for wait in waits:

        def loss(data: Any, logprobs: Any, wait: Any = wait) -> Any:
            return wait()

        with pytest.raises(RuntimeError, match="wait for itself"):
            shared.forward_backward_custom([supervised()], loss).result(30)
        with pytest.raises(RuntimeError, match="nothing was updated"):
            shared.optim_step().result()
    # What was refused was not done either, and its name is free.
    assert service.create_lora_training_client(TINY, rank=4, name="in-a-loss").model_id


def test_a_loss_may_wait_for_a_sampler_and_for_another_base(
    service: ServiceClient, shared: TrainingClient, tmp_path: Path
) -> None:
    sampler = shared.save_weights_and_get_sampling_client().result()
    with ServiceClient(folder=tmp_path) as other:
        elsewhere = other.create_lora_training_client(TINY, rank=4)

        def loss(data: Any, logprobs: Any) -> Any:
            sampled = sampler.sample(ROW, 1, SamplingParams(max_tokens=2, stop=[])).result()
            scores = sampler.compute_logprobs(ROW).result()
            there = elsewhere.forward([supervised()]).result().loss_fn_outputs
            known = {"tokens": len(sampled.sequences[0].tokens), "rows": len(there)}
            return logprobs[0].sum() * scores[1], known

        found = shared.forward_backward_custom([supervised()], loss).result(60).metrics
    assert (found["tokens"], found["rows"]) == (2, 1)
    shared.optim_step(AdamParams(learning_rate=0)).result()


def test_a_creation_that_failed_does_not_block_its_name(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        for _ in range(2):  # the first client of a base, and one beside another
            with pytest.raises(ValueError, match="nowhere"):
                service.create_lora_training_client(TINY, rank=4, name="a", targets=["nowhere"])
            service.create_lora_training_client(TINY, rank=4)
        made = service.create_lora_training_client(TINY, rank=4, name="a")
        assert made.forward([supervised()]).result().loss_fn_outputs


def test_a_state_with_a_value_function_goes_into_another_client(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path, value=ValueParams()) as service:
        first = service.create_lora_training_client(TINY, rank=4, seed=1)
        returns = with_extra([replace(RL_ROW, adapter="model-1")], returns=[[1.0] * 8])
        first.forward_backward(returns, "importance_sampling")
        first.optim_step(AdamParams(learning_rate=1e-2)).result()
        path = first.save_state("one").result().path
        second = service.create_training_client_from_state_with_optimizer(path)
        third = service.create_lora_training_client(TINY, rank=4, seed=9)
        third.load_state(path).result()

        def values(client: TrainingClient) -> list[list[float]]:
            row = replace(RL_ROW, adapter=client.model_id)
            return client.local(lambda learner: learner.values([row])).result()

        assert values(first) == values(second) == values(third)
        assert max(map(abs, values(first)[0])) > 0

        def state(client: TrainingClient) -> dict[str, torch.Tensor]:
            found = client.local(lambda learner: learner.state_dict([client.model_id])).result()
            return {key.replace(client.model_id, "x"): found[key] for key in found}

        ours, theirs = state(first), state(second)
        assert ours.keys() == theirs.keys()
        assert any(key.startswith("exp_avg/value.x/") for key in ours)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_client_is_dropped_whatever_its_thread_holds(tmp_path: Path) -> None:
    """The garbage collector may run anywhere, also where the base's lock is held."""
    with ServiceClient(folder=tmp_path) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        base: Any = training._backend.base  # type: ignore[attr-defined]
        held = [training.save_weights_and_get_sampling_client().result()]

        def drop() -> None:
            with base._lock:
                held.clear()

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        service.create_sampling_client(base_model=TINY).compute_logprobs(ROW).result()
        assert not base.sampler.adapters


def test_a_sample_cannot_be_cancelled(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model=TINY)
    params = SamplingParams(max_tokens=8, stop=[])
    for asked in (
        client.sample(ROW, 1, params),
        client.sample(ROW, 1, params, include_prompt_logprobs=True),
        client.compute_logprobs(ROW),
    ):
        assert not asked.future().cancel()
        assert asked.result()


def test_a_step_that_is_not_finite_is_refused(shared: TrainingClient) -> None:
    before = shared.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    far = Datum(reinforced().model_input, {**reinforced().loss_fn_inputs, "logprobs": [-200.0] * 7})
    shared.forward_backward([far], "importance_sampling")
    assert shared.optim_step().result().metrics["skipped_non_finite"] == 1
    after = shared.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    assert after.tolist() == before.tolist()


def test_adapters_over_one_base_learn_apart(service: ServiceClient) -> None:
    first = service.create_lora_training_client(TINY, rank=4, seed=1)
    second = service.create_lora_training_client(TINY, rank=8, seed=2, train_mlp=False)
    assert second.get_info().lora_rank == 8
    base = second.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    first.forward_backward([supervised()])
    second.forward_backward([supervised()])
    first.optim_step(AdamParams(learning_rate=1e-2)).result()
    untouched = second.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    assert untouched.tolist() == base.tolist()
    # The other's step has not eaten its gradient.
    assert second.optim_step(AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] > 0
    learned = second.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    assert learned.sum() > base.sum() + 0.1


def test_a_sampling_client_keeps_its_weights(training: TrainingClient) -> None:
    before = training.save_weights_and_get_sampling_client()
    scores = [before.compute_logprobs(ROW).result()]
    for _ in range(3):
        training.forward_backward([supervised()])
        training.optim_step(AdamParams(learning_rate=1e-2))
    after = training.save_weights_and_get_sampling_client()
    scores += [after.compute_logprobs(ROW).result(), before.compute_logprobs(ROW).result()]
    assert scores[0] == scores[2]
    assert scores[0][0] is None
    trained = training.forward([supervised()]).result().loss_fn_outputs[0]["logprobs"]
    assert scores[1][1:] == pytest.approx(trained.tolist(), abs=1e-4)
    assert sum(s or 0 for s in scores[1]) > sum(s or 0 for s in scores[0]) + 1


def test_sampling(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model=TINY)
    tokenizer = client.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    params = SamplingParams(max_tokens=24, seed=5)
    response = client.sample(
        ModelInput.from_ints(prompt), 2, params, include_prompt_logprobs=True
    ).result()
    assert len(response.sequences) == 2
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == len(sequence.tokens_np)
        scores = client.compute_logprobs([*prompt, *sequence.tokens]).result()
        assert scores[len(prompt) :] == pytest.approx(sequence.logprobs, abs=1e-4)
        assert response.prompt_logprobs == pytest.approx(scores[: len(prompt)], abs=1e-4)
        stopped = sequence.stop_reason == "stop"
        assert stopped == (sequence.tokens[-1] == tokenizer.eos_token_id)
    again, other = client.sample_batch([prompt, prompt[:-1]], 2, params).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in response.sequences]
    assert len(other.sequences) == 2
    rows = [[*prompt, *s.tokens] for s in again.sequences]
    alone = [client.compute_logprobs(row).result()[1:] for row in rows]
    for found, expected in zip(client.compute_logprobs_batch(rows).result(), alone, strict=True):
        assert found[1:] == pytest.approx(expected, abs=1e-4)


def test_where_sampling_stops(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model=TINY)
    greedy = {"temperature": 0.0, "max_tokens": 12}
    prompt = client.get_tokenizer().encode("hello")

    def sampled(**params: Any) -> Any:
        return client.sample(prompt, 1, SamplingParams(**greedy, **params)).result().sequences[0]

    endless = sampled(stop=[])
    assert len(endless.tokens) == 12
    assert endless.stop_reason == "length"
    third = endless.tokens[2]
    assert sampled(stop=[third]).tokens == endless.tokens[: endless.tokens.index(third) + 1]
    with pytest.raises(ValueError, match="strings or token ids"):
        sampled(stop=["a", 3])
    top = client.sample(prompt, 1, SamplingParams(**greedy), topk_sample_logprobs=3).result()
    best = top.sequences[0].topk_logprobs
    assert best is not None
    assert [row[0][0] for row in best] == top.sequences[0].tokens


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


def test_the_caller_does_not_wait(shared: TrainingClient) -> None:
    futures = [shared.forward_backward([supervised()]) for _ in range(20)]
    assert not futures[-1].done()
    assert futures[-1].result().metrics["tokens:sum"] == 7
    assert futures[0].done()  # in order
    shared.optim_step(AdamParams(learning_rate=0)).result()


def test_going_on_from_a_state_is_going_on(service: ServiceClient) -> None:
    def steps(client: TrainingClient, count: int) -> list[float]:
        found = []
        for _ in range(count):
            found.append(client.forward_backward([supervised()]))
            client.optim_step(AdamParams(learning_rate=3e-3))
        return [one.result().metrics["loss:sum"] for one in found]

    first = service.create_lora_training_client(TINY, rank=4, seed=11, alpha=8.0)
    steps(first, 3)
    path = first.save_state("three").result().path
    expected = steps(first, 3)
    second = service.create_training_client_from_state_with_optimizer(path)
    assert steps(second, 3) == expected
    fresh = service.create_training_client_from_state(path)
    found = steps(fresh, 3)
    assert found[0] == expected[0]
    assert found[2] != expected[2]  # its momenta began anew
    first.load_state_with_optimizer(path).result()
    assert steps(first, 3) == expected


def test_saved_sampler_weights_are_served(service: ServiceClient, training: TrainingClient) -> None:
    training.forward_backward([supervised()])
    training.optim_step(AdamParams(learning_rate=1e-2))
    path = training.save_weights_for_sampler("one").result().path
    assert (Path(path) / "adapter_config.json").is_file()
    params = SamplingParams(max_tokens=5, temperature=0.0)
    saved = service.create_sampling_client(model_path=path).sample(ROW, 1, params).result()
    live = training.save_weights_and_get_sampling_client().sample(ROW, 1, params).result()
    assert saved.sequences[0].tokens == live.sequences[0].tokens


def test_weights_of_a_dropped_client_are_unloaded(shared: TrainingClient) -> None:
    base: Any = shared._backend.base  # type: ignore[attr-defined]
    client = shared.save_weights_and_get_sampling_client().result()
    loaded = set(base.sampler.adapters)
    pending = client.sample(ROW, 1, SamplingParams(max_tokens=40, stop=[]))
    del client
    assert len(pending.result().sequences[0].tokens) == 40  # what was asked for is still done
    shared.save_weights_and_get_sampling_client().compute_logprobs(ROW).result()
    assert len(set(base.sampler.adapters) & loaded) < len(loaded)


def test_logged_metrics_are_kept(training: TrainingClient) -> None:
    training.log({"reward": np.float32(0.5)}, step=3, loss=torch.tensor(2.0), odd=float("nan"))
    assert training.history[0] | {"odd": 0} == {"step": 3, "reward": 0.5, "loss": 2.0, "odd": 0}
    (line,) = (training.folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "reward": 0.5, "loss": 2.0, "odd": None}


def test_agentrl_exports_them() -> None:
    import agentrl

    assert agentrl.ServiceClient is ServiceClient
    assert all(getattr(agentrl, name) is not None for name in agentrl.__all__)
