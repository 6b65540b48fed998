"""Sampling over the client API on agentrl-tiny."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from client_data import ROW, TINY, grad_norm, logprobs, supervised

from agentrl_trainer.client import ModelInput, SamplingParams, ServiceClient, TrainingClient


def test_a_sampling_client_keeps_its_weights(training: TrainingClient) -> None:
    before = training.save_weights_and_get_sampling_client()
    scores = [before.compute_logprobs(ROW).result()]
    for _ in range(3):
        training.forward_backward([supervised()])
        grad_norm(training)
    after = training.save_weights_and_get_sampling_client()
    scores += [after.compute_logprobs(ROW).result(), before.compute_logprobs(ROW).result()]
    assert scores[0] == scores[2]
    assert scores[0][0] is None
    assert scores[1][1:] == pytest.approx(logprobs(training), abs=1e-4)
    assert sum(s or 0 for s in scores[1]) > sum(s or 0 for s in scores[0]) + 1


def test_sampling(service: ServiceClient) -> None:
    client = service.create_sampling_client(base_model=TINY)
    tokenizer = client.get_tokenizer()
    prompt = tokenizer.encode("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
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


def test_weights_of_a_dropped_client_are_unloaded(shared: TrainingClient) -> None:
    base = shared._base
    client = shared.save_weights_and_get_sampling_client().result()
    loaded = set(base.sampler.adapters)
    pending = client.sample(ROW, 1, SamplingParams(max_tokens=40, stop=[]))
    del client
    assert len(pending.result().sequences[0].tokens) == 40  # what was asked for is still done
    shared.save_weights_and_get_sampling_client().compute_logprobs(ROW).result()
    assert len(set(base.sampler.adapters) & loaded) < len(loaded)


def test_a_client_is_dropped_whatever_its_thread_holds(tmp_path: Path) -> None:
    """The garbage collector may run anywhere, also where the base's lock is held."""
    with ServiceClient(folder=tmp_path) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        base = training._base
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
