"""What the tinker backend must do with the trainer's rows, against the server at a URL: run by
test_train_tinker, which counts what reaches the server."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from agentrl_trainer.client import AdamParams, ServiceClient, TrainingClient
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.prepare_batch import UpdateSettings

TOKENS = [5, 9, 300, 41, 77, 12]
ADAM = AdamParams(learning_rate=1e-2)


def row(sampled: float = -6.0) -> TrainingRow:
    mask = [False, False, True, True, True, True]
    return TrainingRow(TOKENS, mask, [sampled] * 6, [-1.0] * 6, adapter="policy")


def logprobs(client: TrainingClient) -> list[float]:
    done = client.forward([row()], "cross_entropy").result()
    return done.loss_fn_outputs[0]["logprobs"].tolist()


def non_finite(client: TrainingClient) -> None:
    """Its own loss, and one that is computed here: nothing of such a step is applied, and the next
    one is as if it had never been."""
    for loss, sampled in (("importance_sampling", -200.0), ("dro", -1e30)):
        before = logprobs(client)
        added = client.forward_backward([row(sampled)], loss, normalize_by=None, logprobs=False)
        stepped = client.optim_step(ADAM)  # asked for before the loss is known
        after = client.forward([row()], "cross_entropy")
        assert added.result().stats.skipped_non_finite
        assert stepped.result().metrics == {"skipped_non_finite": 1.0}
        assert after.result().loss_fn_outputs[0]["logprobs"].tolist() == before
    client.forward_backward([row()], "importance_sampling", normalize_by=None)
    assert client.optim_step(ADAM).result().metrics["skipped_non_finite"] == 0
    assert logprobs(client) != before


def forward(client: TrainingClient) -> None:
    """Loss, metrics and log-probs are the local client's, of each kind of loss."""
    nothing = TrainingRow(TOKENS, [False] * 6, [0.0] * 6, [0.0] * 6, adapter="policy")
    data = [row(), nothing, row(-5.0)]
    with ServiceClient() as service:
        here = service.create_lora_training_client("agentrl-tiny", rank=4, seed=1)
        for loss in ("cross_entropy", "ppo", "gspo"):
            expected = here.forward(data, loss).result()
            found = client.forward(data, loss).result()
            assert found.metrics == pytest.approx(expected.metrics, rel=1e-4), loss
            assert found.stats.tokens == expected.stats.tokens == 8
            for one, other in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
                assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)


def in_order(client: TrainingClient) -> None:
    """What is asked for right after ``prepare`` comes after the forward that it asks for later."""
    before = logprobs(client)
    settings = UpdateSettings("ppo", {"correction": "truncate"}, epochs=2)
    client.forward_backward([row()], "importance_sampling", normalize_by=None).result()
    # The worker is kept busy, so that it cannot be quick enough by chance.
    client._backend._worker.submit(lambda: time.sleep(0.5))
    prepared = client.prepare([row()], settings)
    stepped = client.optim_step(ADAM)
    after = client.forward([row()], "cross_entropy")
    sampler = client.save_weights_and_get_sampling_client()
    (one,) = prepared.result()
    assert one.extra["proximal"] == pytest.approx([0.0, *before])
    assert stepped.result().metrics["skipped_non_finite"] == 0
    found = after.result().loss_fn_outputs[0]["logprobs"].tolist()
    assert found != pytest.approx(before)
    scores = sampler.compute_logprobs(TOKENS).result()
    assert scores[2:] == pytest.approx(found[1:], abs=1e-4)


if __name__ == "__main__":
    check, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    with ServiceClient(base_url=url, folder=folder / "client") as service:
        globals()[check](service.create_lora_training_client("agentrl-tiny", rank=4, seed=1))
