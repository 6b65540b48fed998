"""Parameters that scripts for Tinker's SDK pass: accepted or refused by one table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_data import ROW, TINY, supervised

from agentrl_trainer.client import AdamParams, SamplingParams, ServiceClient, TrainingClient
from agentrl_trainer.client.local_base import read_state
from agentrl_trainer.client.parameters import REFUSED, TINKER_ONLY, check_tinker_only

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for method in TINKER_ONLY for name in TINKER_ONLY[method] if name in REFUSED],
)
def test_a_refused_parameter_is_named(method: str, name: str) -> None:
    special = SimpleNamespace(type="dimuon") if name == "optimizer" else 2
    with pytest.raises(ValueError, match=f"{name}: "):
        check_tinker_only(method, {name: special})
    _, accepted = REFUSED[name]
    for usual in (None, 0, False, accepted, SimpleNamespace(type=accepted)):
        check_tinker_only(method, {name: usual})


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"sample\(\) got an unexpected keyword argument 'temp'"):
        check_tinker_only("sample", {"temp": 1})


async def test_every_method_takes_the_parameters_of_its_table(tmp_path: Path) -> None:
    """With values that ask for nothing special; a method without its table would fail."""

    def usual(method: str) -> dict[str, Any]:
        return {name: REFUSED.get(name, ("", None))[1] for name in TINKER_ONLY[method]}

    with ServiceClient(folder=tmp_path, **usual("ServiceClient")) as service:

        def called(of: Any, method: str, *given: Any) -> Any:
            return getattr(of, method)(*given, **usual(method))

        client = called(service, "create_lora_training_client", TINY, 4)
        called(client, "forward_backward_custom", [supervised()], lambda _, lp: (lp[0].sum(), {}))
        state = (await called(client, "save_state", "s")).path
        for method in ("load_state", "load_state_with_optimizer"):
            called(client, method, state)
        for method in ("", "_with_optimizer"):
            again = called(service, f"create_training_client_from_state{method}", state, TINY)
            assert again.get_info().lora_rank == 4
        path = (await called(client, "save_weights_for_sampler", "w")).path
        live = called(client, "save_weights_and_get_sampling_client")
        assert called(live, "compute_logprobs", ROW).result()[0] is None
        sampling = usual("create_sampling_client")
        made = [
            live,
            await client.save_weights_and_get_sampling_client_async(name="ignored"),
            client.create_sampling_client(path, **sampling),
            await client.create_sampling_client_async(path),
            await service.create_sampling_client_async(path, **sampling),
        ]
        answers = [one.sample(ROW, 1, GREEDY, **usual("sample")).result() for one in made]
        assert len({tuple(answer.sequences[0].tokens) for answer in answers}) == 1
        with pytest.raises(ValueError, match="kind: local sampling clients keep their weights"):
            client.save_weights_and_get_sampling_client(kind="inflight")
        service.close("success", detail="done").result()


def test_a_state_keeps_its_metadata(shared: TrainingClient) -> None:
    saved = shared.save_state("s", overwrite=True, user_metadata={"note": "first"}).result()
    assert read_state(saved.path).meta["user_metadata"] == {"note": "first"}


def test_optimizer_parameters_by_either_name(shared: TrainingClient) -> None:
    still = AdamParams(learning_rate=0)
    norms = []
    for step in ({"optim_params": still}, {"adam_params": still}):
        shared.forward_backward([supervised()], "cross_entropy")
        norms.append(shared.optim_step(**step).result().metrics["grad_norm"])
    assert norms[0] == norms[1] > 0
    with pytest.raises(ValueError, match="not both"):
        shared.optim_step(still, adam_params=still)
    # The SDK's own object has the same fields; another optimizer's has others.
    fields = {name: getattr(still, name) for name in AdamParams.__slots__}
    theirs: Any = SimpleNamespace(**fields)
    assert shared.optim_step(theirs).result().metrics["skipped_non_finite"] == 0
    dimuon: Any = SimpleNamespace(type="dimuon", learning_rate=0.1, beta1=0.9)
    with pytest.raises(ValueError, match="optim_params: AdamW needs a finite beta2"):
        shared.optim_step(dimuon)
