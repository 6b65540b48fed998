"""Services: names, states, checkpoints, and what closed clients leave."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from client_data import RL_ROW, TINY, grad_norm, logprobs, reinforced, supervised

from agentrl_trainer.checkpoint import save_checkpoint
from agentrl_trainer.client import AdamParams, ServiceClient, TrainingClient
from agentrl_trainer.client.local_base import read_state
from agentrl_trainer.data.training_row import with_extra
from agentrl_trainer.learner.loss_options import ValueParams


def test_what_a_service_refuses(service: ServiceClient, shared: TrainingClient) -> None:
    make, base = service.create_lora_training_client, {"base_model": TINY}
    adam, high = AdamParams(learning_rate=float("nan")), {"reward": "high"}
    refused = {
        "unknown loss 'reinforce'": lambda: shared.forward_backward([supervised()], "reinforce"),
        "data is empty": lambda: shared.forward_backward([]),
        "unknown options of ppo.*clip": lambda: shared.forward([reinforced()], "ppo", {"clip": 1}),
        "a finite learning_rate": lambda: shared.optim_step(adam),
        "output embedding": lambda: make(TINY, train_unembed=True),
        "nothing would be trained": lambda: make(TINY, train_mlp=False, train_attn=False),
        "no-such-model": lambda: make("./no-such-model"),
        "either model_path or base_model": lambda: service.create_sampling_client(),
        "holds no whole state": lambda: shared.load_state("nowhere").result(),
        "the prompt has no tokens": lambda: service.create_sampling_client(**base).sample([]),
        "must be a number": lambda: shared.log(high),  # type: ignore[arg-type]
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()


async def test_the_models_of_a_service(service: ServiceClient, shared: TrainingClient) -> None:
    found = await service.get_server_capabilities_async()
    assert found == service.get_server_capabilities()
    [model] = found.supported_models
    assert (model.model_name, model.trainable) == (TINY, True)
    assert (model.max_context_length or 0) >= 512
    assert service.supported_models() == [TINY]
    assert (await shared.get_info_async()).model_name == TINY


def test_a_creation_that_failed_does_not_block_its_name(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        for _ in range(2):  # the first client of a base, and one beside another
            with pytest.raises(ValueError, match="nowhere"):
                service.create_lora_training_client(TINY, rank=4, name="a", targets=["nowhere"])
            service.create_lora_training_client(TINY, rank=4)
        assert logprobs(service.create_lora_training_client(TINY, rank=4, name="a"))


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_a_service_on_verl_says_what_it_needs(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path, backend="verl") as service:
        for _ in range(2):
            with pytest.raises(ImportError, match=r"needs verl and ray, see docs/scale\.md"):
                service.create_lora_training_client(TINY, rank=4)


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


def test_a_state_with_a_value_function_goes_into_another_client(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path, value=ValueParams(lr=1e-3, clip=0.2)) as service:
        first = service.create_lora_training_client(TINY, rank=4, seed=1)
        returns = with_extra([replace(RL_ROW, adapter="model-1")], returns=[[1.0] * 8])
        first.forward_backward(returns, "importance_sampling")
        grad_norm(first)
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


def test_a_closed_client_leaves_nothing(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        first = service.create_lora_training_client(TINY, rank=4, seed=3, name="one")
        state = first.save_state("s").result().path
        expected = logprobs(first)
        learner = first.local(lambda own: own).result()
        second = service.create_lora_training_client(TINY, rank=4, seed=5, name="two")
        second.forward_backward([supervised()])  # gathered before the other goes, applied after
        first.close()
        assert grad_norm(second) > 0
        first.close().result()  # again is nothing
        assert learner.adapters == ("two",)
        with pytest.raises(ValueError, match="no adapters"):
            first.optim_step().result()
        second.close().result()
        assert learner.adapters == ()
        assert not [name for name, _ in learner.model.named_parameters() if "lora" in name]
        # The name is free, and the first adapter after the last one is as ever.
        again = service.create_training_client_from_state(state, name="one")
        assert logprobs(again) == expected
        again.forward_backward([supervised()])
        assert grad_norm(again) > 0


def test_a_state_that_does_not_fit_keeps_no_name(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client(TINY, rank=4, name="one")
        state = client.save_state("s").result().path
        found = read_state(state)
        meta = {**found.meta, "lora": {**found.meta["lora"], "rank": 8}}  # the weights have 4
        save_checkpoint(Path(state), 1, tensors=found.tensors, meta=meta, keep=1)
        for _ in range(2):  # the second try fails for the same reason, not for its name
            with pytest.raises(ValueError, match="has shape"):
                service.create_training_client_from_state(state, name="two")
        learner = client.local(lambda own: own).result()
        assert learner.adapters == ("one",)
        service.create_lora_training_client(TINY, rank=4, name="two")


def test_agentrl_exports_them() -> None:
    import agentrl

    assert agentrl.ServiceClient is ServiceClient
    assert all(getattr(agentrl, name) is not None for name in agentrl.__all__)
