"""One service for all tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from client_data import TINY

from agentrl_trainer.client import ServiceClient, TrainingClient


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ServiceClient(folder=tmp_path_factory.mktemp("client")) as made:
        # The training thread starts now, with one thread of torch's as the tests have.
        made.create_lora_training_client(TINY, rank=4).close().result()
        torch.set_num_threads(before)
        yield made


@pytest.fixture(scope="session")
def shared(service: ServiceClient) -> TrainingClient:
    """For tests that leave the weights as they are."""
    return service.create_lora_training_client(TINY, rank=4, seed=3)


@pytest.fixture
def training(service: ServiceClient) -> Iterator[TrainingClient]:
    made = service.create_lora_training_client(TINY, rank=4, seed=3)
    yield made
    made.close().result()
