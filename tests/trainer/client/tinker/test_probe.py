"""Services that compute another objective than Tinker's are found out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

pytest.importorskip("tinker")

from agentrl_trainer.client import ServiceClient
from agentrl_trainer.client.tinker.probe import Probe, wrong_objective
from agentrl_trainer.data.training_row import TrainingRow, with_extra

TINY = "agentrl-tiny"
NUMBERS = count()


class Client:
    """The local client, which computes what Tinker does, with changes."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def forward(self, rows: Any, *args: Any) -> Any:
        return self._client.forward(rows, *args)

    def forward_backward(self, rows: Any, *args: Any, **options: Any) -> Any:
        return self._client.forward_backward(rows, *args, **options)

    def optim_step(self, adam: Any) -> Any:
        return self._client.optim_step(adam)


class Averages(Client):
    """Divides the loss of each row by its tokens, as SkyRL's jax backend does."""

    def forward_backward(self, rows: Any, loss: str, **options: Any) -> Any:
        if loss != "cross_entropy":  # whose rows have one weight each
            rows = [replace(row, advantages=self.averaged(row)) for row in rows]
        return super().forward_backward(rows, loss, **options)

    def averaged(self, row: TrainingRow) -> list[float]:
        return [one / row.trained for one in row.advantages]


class AveragesTargets(Averages):
    """Divides by all of a row's targets, the prompt's included."""

    def averaged(self, row: TrainingRow) -> list[float]:
        return [one / (len(row.tokens) - 1) for one in row.advantages]


class AveragesRows(Client):
    """Divides by the rows of a request."""

    def forward_backward(self, rows: Any, *args: Any, **options: Any) -> Any:
        return super().forward_backward(rows, *args, **options | {"normalize_by": len(rows)})


class AveragesAll(Client):
    """Divides by the tokens of a request."""

    def forward_backward(self, rows: Any, *args: Any, **options: Any) -> Any:
        return super().forward_backward(rows, *args, **options | {"normalize_by": None})


class KnowsNoMask(Client):
    """Learns from targets of weight 0."""

    def forward_backward(self, rows: Any, loss: str, **options: Any) -> Any:
        for row in rows if loss == "cross_entropy" else ():
            weights = row.loss_fn_inputs["weights"]
            row.loss_fn_inputs["weights"] = [one or 1.0 for one in weights]
        return super().forward_backward(rows, loss, **options)


class IsWarm(Client):
    """Computes log-probs at temperature 3."""

    def forward(self, rows: Any, *args: Any) -> Any:
        warm = with_extra(rows, temperature=[[3.0] * len(row.tokens) for row in rows])
        return super().forward(warm, *args)


class Forgets(Client):
    def optim_step(self, adam: Any) -> Any:
        return super().optim_step(replace(adam, learning_rate=0.0))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with ServiceClient(folder=tmp_path_factory.mktemp("probe"), device="cpu") as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Client, None),
        (Averages, "it divides the loss of each row by the row's tokens"),
        (AveragesTargets, "it divides the loss of each row by the row's tokens"),
        (AveragesRows, "it divides the loss of each request by its rows or tokens"),
        (AveragesAll, "it divides the loss of each request by its rows or tokens"),
        (KnowsNoMask, "it learns from tokens whose weight is 0"),
        (IsWarm, "its trainer's log-probs differ from its sampler's by up to"),
        (Forgets, "it does not learn: a step of 0.001 changes a log-prob by 0.0"),
    ],
)
def test_what_a_service_computes_otherwise(
    service: ServiceClient, kind: type[Client], said: str | None
) -> None:
    def made() -> Probe:
        name = f"probe-{next(NUMBERS)}"
        client: Any = kind(service.create_lora_training_client(TINY, rank=8, name=name))
        return Probe(client, service.create_sampling_client(base_model=TINY))

    found = wrong_objective(made)
    assert found is None if said is None else said in (found or "")
