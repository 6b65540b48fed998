"""The parameters that scripts for Tinker's SDK pass: taken, and what they do on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl_trainer.checkpoint import save_checkpoint
from agentrl_trainer.client import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from agentrl_trainer.client.local.states import read_state

TINY = "agentrl-tiny"
ROW = [5, 9, 300, 41, 77, 12, 600, 3]
DATUM = Datum(ModelInput.from_ints(ROW[:-1]), {"target_tokens": ROW[1:]})
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with ServiceClient(folder=tmp_path_factory.mktemp("client")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(TINY, rank=4, seed=3, user_metadata={"a": "b"})


def test_optimizer_parameters_by_either_name(shared: TrainingClient) -> None:
    still = AdamParams(learning_rate=0)
    norms = []
    for step in ({"optim_params": still}, {"adam_params": still}, {}):
        shared.forward_backward([DATUM], "cross_entropy")
        done = shared.optim_step(**step) if step else shared.optim_step(still)
        norms.append(done.result().metrics["grad_norm"])
    assert norms[0] == norms[1] == norms[2] > 0
    with pytest.raises(ValueError, match="not both"):
        shared.optim_step(still, adam_params=still)
    # The SDK's own object has the same fields; another optimizer's has others.
    theirs: Any = SimpleNamespace(
        learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )
    assert shared.optim_step(theirs).result().metrics["skipped_non_finite"] == 0
    dimuon: Any = SimpleNamespace(type="dimuon", learning_rate=0.1, beta1=0.9)
    with pytest.raises(ValueError, match="optim_params: AdamW wants a beta2"):
        shared.optim_step(dimuon)


def test_a_custom_loss_says_what_it_takes(shared: TrainingClient) -> None:
    def loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -logprobs[0].sum(), {"mine": 1.0}

    done = shared.forward_backward_custom([DATUM], loss, loss_type_input="logprobs").result()
    assert done.metrics["mine"] == 1.0
    shared.optim_step(AdamParams(learning_rate=0)).result()
    wrong: Any = "logits"
    with pytest.raises(ValueError, match="loss_type_input must be 'logprobs'"):
        shared.forward_backward_custom([DATUM], loss, loss_type_input=wrong)


def test_a_state_keeps_its_metadata(service: ServiceClient, shared: TrainingClient) -> None:
    saved = shared.save_state("s", 3600, True, {"note": "first"}).result()
    metas = [json.loads(file.read_text()) for file in Path(saved.path).glob("*/meta.json")]
    assert [meta for meta in metas if meta.get("meta", meta)["user_metadata"] == {"note": "first"}]
    shared.load_state(saved.path, weights_access_token="none needed").result()
    for make in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        again = make(saved.path, TINY, {"a": "b"}, "token")
        assert again.get_info().lora_rank == 4
        again.close().result()


async def test_samplers_of_a_training_client(shared: TrainingClient) -> None:
    path = shared.save_weights_for_sampler("w", ttl_seconds=None, user_metadata={"a": "b"})
    made = [
        shared.save_weights_and_get_sampling_client(name="ignored"),
        shared.save_weights_and_get_sampling_client(None, None, False, "snapshot"),
        await shared.save_weights_and_get_sampling_client_async(name="ignored"),
        shared.create_sampling_client(path.result().path, retry_config=None),
        await shared.create_sampling_client_async(path.result().path),
    ]
    answers = [client.sample(ROW, 1, GREEDY).result().sequences[0].tokens for client in made]
    assert answers == [answers[0]] * len(made)
    assert await made[0].get_base_model_async() == TINY
    assert (await shared.get_info_async()).model_name == TINY
    with pytest.raises(ValueError, match="kind: local sampling clients keep their weights"):
        shared.save_weights_and_get_sampling_client(kind="inflight")


def test_the_last_log_probs_of_a_prompt(service: ServiceClient) -> None:
    client = service.create_sampling_client(None, TINY, None, False)
    whole = client.compute_logprobs(ROW).result()
    last = client.compute_logprobs(ROW, prompt_logprobs_last_n=2).result()
    assert last == [None] * 6 + whole[6:]
    asked = {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}
    assert client.sample(ROW, 1, GREEDY, **asked).result().prompt_logprobs == (
        [None] * 5 + whole[5:]
    )
    [both] = client.sample_batch([ROW], 1, GREEDY, True, 2).result()
    assert both.prompt_logprobs == pytest.approx(whole)
    assert both.sequences[0].topk_logprobs is not None
    for count in (0, 8):
        with pytest.raises(ValueError, match=r"prompt_logprobs_last_n must be in 1..7"):
            client.compute_logprobs(ROW, count)
    with pytest.raises(ValueError, match="needs include_prompt_logprobs"):
        client.sample(ROW, 1, GREEDY, prompt_logprobs_last_n=3)


@pytest.mark.parametrize(
    "name", ["topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"]
)
def test_what_is_tinkers_alone_is_refused(service: ServiceClient, name: str) -> None:
    client = service.create_sampling_client(base_model=TINY)
    with pytest.raises(ValueError, match=f"{name} is not known to the local backend"):
        client.sample(ROW, 1, GREEDY, **{name: 2})


def test_what_is_there(service: ServiceClient, shared: TrainingClient) -> None:
    [model] = service.get_server_capabilities().supported_models
    assert (model.model_name, model.trainable) == (TINY, True)
    assert model.max_context_length is not None
    assert model.max_context_length >= 512
    assert service.supported_models() == [TINY]


async def test_what_is_there_awaited(service: ServiceClient) -> None:
    assert await service.get_server_capabilities_async() == service.get_server_capabilities()


def test_how_a_service_is_made_and_ended(tmp_path: Path) -> None:
    service = ServiceClient({"run": "a"}, "project", display_name="b", folder=tmp_path)
    service.create_lora_training_client(TINY, rank=4)
    service.close("success", detail="done").result()
    wrong: Any = "http://127.0.0.1:1"
    with pytest.raises(ValueError, match="name base_url"):
        ServiceClient(wrong)


def test_only_adamw(service: ServiceClient) -> None:
    service.create_lora_training_client(
        TINY, rank=4, optimizer=SimpleNamespace(type="adamw"), train_unembed=False
    ).close().result()
    with pytest.raises(ValueError, match="optimizer: the local backend has AdamW, not 'dimuon'"):
        service.create_lora_training_client(TINY, optimizer=SimpleNamespace(type="dimuon"))


def test_a_closed_client_leaves_nothing(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        first = service.create_lora_training_client(TINY, rank=4, seed=3, name="one")
        state = first.save_state("s").result().path
        expected = first.forward([DATUM]).result().loss_fn_outputs[0]["logprobs"]
        learner = first.local(lambda own: own).result()
        second = service.create_lora_training_client(TINY, rank=4, seed=5, name="two")
        second.forward_backward([DATUM])  # gathered before the other goes, applied after
        first.close()
        assert second.optim_step(AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] > 0
        first.close().result()  # again is nothing
        assert learner.adapters == ("two",)
        with pytest.raises(ValueError, match="no adapters"):
            first.optim_step().result()
        second.close().result()
        assert learner.adapters == ()
        assert not [name for name, _ in learner.model.named_parameters() if "lora" in name]
        # The name is free, and the first adapter after the last one is as ever.
        again = service.create_training_client_from_state(state, name="one")
        found = again.forward([DATUM]).result().loss_fn_outputs[0]["logprobs"]
        assert found.tolist() == expected.tolist()
        again.forward_backward([DATUM])
        assert again.optim_step(AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] > 0


def test_a_state_that_does_not_fit_keeps_no_name(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client(TINY, rank=4, name="one")
        state = client.save_state("s").result().path
        found = read_state(state)
        lora = {**found.meta["lora"], "rank": 8}  # the weights are of rank 4
        meta = {**found.meta, "lora": lora}
        save_checkpoint(Path(state), 1, tensors=found.tensors, meta=meta, keep=1)
        for _ in range(2):  # the second try fails for the same reason, not for its name
            with pytest.raises(ValueError, match="has shape"):
                service.create_training_client_from_state(state, name="two")
        learner = client.local(lambda own: own).result()
        assert learner.adapters == ("one",)
        service.create_lora_training_client(TINY, rank=4, name="two")
