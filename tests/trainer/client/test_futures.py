"""Futures of the client: what may wait for what, and what can be canceled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from client_data import ROW, TINY, supervised

from agentrl_trainer.client import AdamParams, SamplingParams, ServiceClient, TrainingClient


def test_a_loss_may_wait_for_no_other_operation_of_its_base(
    service: ServiceClient, shared: TrainingClient
) -> None:
    params = SamplingParams(max_tokens=2)
    waits = [
        lambda: shared.forward([supervised()]).result(),
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
        another = other.create_lora_training_client(TINY, rank=4)

        def loss(data: Any, logprobs: Any) -> Any:
            sampled = sampler.sample(ROW, 1, SamplingParams(max_tokens=2, stop=[])).result()
            scores = sampler.compute_logprobs(ROW).result()
            there = another.forward([supervised()]).result().loss_fn_outputs
            known = {"tokens": len(sampled.sequences[0].tokens), "rows": len(there)}
            return logprobs[0].sum() * scores[1], known

        found = shared.forward_backward_custom([supervised()], loss).result(60).metrics
    assert (found["tokens"], found["rows"]) == (2, 1)
    shared.optim_step(AdamParams(learning_rate=0)).result()


def test_a_sample_cannot_be_canceled(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model=TINY)
    params = SamplingParams(max_tokens=8, stop=[])
    for asked in (
        client.sample(ROW, 1, params),
        client.sample(ROW, 1, params, include_prompt_logprobs=True),
        client.compute_logprobs(ROW),
    ):
        assert not asked.future().cancel()
        assert asked.result()
