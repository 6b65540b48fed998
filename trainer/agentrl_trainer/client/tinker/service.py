"""The service on Tinker: a session of the SDK, and checkpoints that hold the paths of states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tinker
from torch import Tensor

from agentrl_trainer.checkpoint import Checkpoint
from agentrl_trainer.client.futures import APIFuture, OperationThread, finished
from agentrl_trainer.client.service import ServiceClient, folder_of
from agentrl_trainer.client.tinker.clients import TinkerSamplingClient, TinkerTrainingClient
from agentrl_trainer.client.tinker.probe import Probe, wrong_objective
from agentrl_trainer.client.types import (
    EndStatus,
    Folder,
    GetServerCapabilitiesResponse,
    LoraOptions,
)

_STATES = "tinker_states"  # in a checkpoint's meta: the path of each client's state


class TinkerServiceClient(ServiceClient):
    """``options`` are those of the SDK's ServiceClient; without ``api_key`` it reads
    ``TINKER_API_KEY``, without ``base_url`` it reaches Tinker itself."""

    def __init__(
        self, *, base_url: str | None = None, folder: Folder | None = None, **options: Any
    ) -> None:
        for local in ("backend", "device", "dtype"):
            options.pop(local, None)
        self.folder = folder_of(folder, "tinker")
        self._service: Any = tinker.ServiceClient(base_url=base_url, **options)
        self._rest: Any = tinker.RestClient(base_url=base_url, api_key=options.get("api_key"))
        self._trained: dict[str, TinkerTrainingClient] = {}
        self.responses = OperationThread("agentrl-tinker")
        """Sends operations in order, and works on the service's responses."""

    def _train(
        self, base_model: str, lora: LoraOptions, name: str | None, more: Mapping[str, Any]
    ) -> TinkerTrainingClient:
        if lora.targets is not None or lora.alpha != LoraOptions().alpha:
            raise ValueError("targets and alpha are for the local backend; leave them out")
        made = self._service.create_lora_training_client(
            base_model,
            rank=lora.rank,
            seed=lora.seed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            **more,
        )
        return self._training(made.result(), name)

    def _train_from(
        self,
        path: Folder,
        base_model: str | None,
        name: str | None,
        optimizer: bool,
        more: Mapping[str, Any],
    ) -> TinkerTrainingClient:
        make = self._service.create_training_client_from_state
        if optimizer:
            make = self._service.create_training_client_from_state_with_optimizer
        return self._training(make(str(path), base_model, **more).result(), name)

    def _training(self, client: Any, name: str | None) -> TinkerTrainingClient:
        made = TinkerTrainingClient(self, client, name)
        self._trained[made.name] = made
        return made

    def resume(self, path: str) -> Any:
        """Return the SDK's client that continues from a state."""
        return self._service.create_training_client_from_state_with_optimizer(path).result()

    def create_sampling_client(
        self, model_path: Folder | None = None, base_model: str | None = None, **more: Any
    ) -> TinkerSamplingClient:
        if (model_path is None) == (base_model is None):
            raise ValueError("give either model_path or base_model")
        path = None if model_path is None else str(model_path)
        made = self._service.create_sampling_client(path, base_model, **more)
        return TinkerSamplingClient(made)

    def wrong_objective(self, base_model: str, rank: int) -> str | None:
        """Return what the service computes otherwise than Tinker; None: nothing was found."""
        return wrong_objective(lambda: self.probe(base_model, rank))

    def probe(self, base_model: str, rank: int) -> Probe:
        """Make an adapter to ask about, which no checkpoint holds."""
        client = self._service.create_lora_training_client(base_model, rank=rank).result()
        sampling = self.create_sampling_client(base_model=base_model)
        return Probe(TinkerTrainingClient(self, client, "probe"), sampling)

    def check(self) -> None:
        """Do nothing: no process of this machine trains, and the next operation asks the server."""

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        return self._rest.get_server_capabilities().result()  # has the same fields

    @property
    def _worker(self) -> OperationThread:
        return self.responses

    def _save_states(self, step: int) -> Callable[[], tuple[Mapping[str, Tensor], dict[str, Any]]]:
        saving = {
            name: client.save_state(f"step-{step:08d}", overwrite=True).future()
            for name, client in self._trained.items()
        }
        return lambda: ({}, {_STATES: {name: one.result().path for name, one in saving.items()}})

    def _load_states(self, checkpoint: Checkpoint) -> None:
        states = checkpoint.meta.get(_STATES, {})
        if states.keys() != self._trained.keys():
            raise ValueError(
                f"checkpoint {checkpoint.step} holds states of {sorted(states) or 'no client'} on "
                f"Tinker, but this trains {sorted(self._trained)}"
            )
        for name, path in states.items():
            # The SDK deprecates loading into an existing client, so each gets a new one.
            self._trained[name].continue_as(self.resume(path), path)

    def close(self, status: EndStatus = "success", detail: str | None = None) -> APIFuture[None]:
        self.responses.shutdown()
        self._writer.shutdown()
        self._service.close(status, detail).result()
        return finished(None)
