"""The service on Tinker: a session of the SDK, and checkpoints that hold the paths of states."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl_trainer.checkpoint import (
    Restored,
    latest_checkpoint,
    restore_rng,
    save_checkpoint,
)
from agentrl_trainer.client.futures import Worker
from agentrl_trainer.client.naming import new_folder
from agentrl_trainer.client.tinker.sampling import TinkerSampling
from agentrl_trainer.client.tinker.training import TinkerTraining
from agentrl_trainer.client.types import (
    EndStatus,
    Folder,
    GetServerCapabilitiesResponse,
    LoraOptions,
    Options,
    SavedPath,
)

_STATES = "tinker_states"  # in a checkpoint's meta: the path of each client's state


class TinkerService:
    """``options`` are those of the SDK's ServiceClient; without ``api_key`` it reads
    ``TINKER_API_KEY``, without ``base_url`` it reaches Tinker itself."""

    is_local = False

    def __init__(self, base_url: str | None, folder: Folder | None, options: Options) -> None:
        try:
            self._sdk = import_module("tinker")
        except ImportError as error:
            raise ImportError(
                "backend='tinker' needs the official SDK: pip install 'tinker>=0.38,<1'"
            ) from error
        self._folder = Path(folder) if folder is not None else new_folder("tinker")
        self._service = self._sdk.ServiceClient(base_url=base_url, **options)
        self._rest = self._sdk.RestClient(base_url=base_url, api_key=options.get("api_key"))
        self._trained: dict[str, TinkerTraining] = {}
        self._worker = Worker("agentrl-tinker")  # for work on the service's responses

    def train(
        self, base_model: str, options: LoraOptions, name: str | None, tinker: Options
    ) -> TinkerTraining:
        if options.targets is not None or options.alpha != LoraOptions().alpha:
            raise ValueError("targets and alpha are for the local backend; leave them out")
        made = self._service.create_lora_training_client(
            base_model,
            rank=options.rank,
            seed=options.seed,
            train_mlp=options.train_mlp,
            train_attn=options.train_attn,
            **tinker,
        )
        return self._training(made.result(), name)

    def train_from(
        self, path: str, base_model: str | None, optimizer: bool, name: str | None, tinker: Options
    ) -> TinkerTraining:
        make = self._service.create_training_client_from_state
        if optimizer:
            make = self._resume
        return self._training(make(path, base_model, **tinker).result(), name)

    def _resume(self, path: str, *args: Any, **options: Any) -> Any:
        make = self._service.create_training_client_from_state_with_optimizer
        return make(path, *args, **options)

    def _training(self, client: Any, name: str | None) -> TinkerTraining:
        made = TinkerTraining(
            self._sdk, client, self._folder, name, self._worker, self.sampler, self._resume
        )
        self._trained[made.name] = made
        return made

    def sampler(
        self, model_path: str | None, base_model: str | None, tinker: Options
    ) -> TinkerSampling:
        made = self._service.create_sampling_client(
            model_path=model_path, base_model=base_model, **tinker
        )
        return TinkerSampling(self._sdk, made)

    def capabilities(self) -> GetServerCapabilitiesResponse:
        return self._rest.get_server_capabilities().result()  # has the same fields

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], keep: int
    ) -> Future[SavedPath]:
        saving = {
            name: training.save_state(f"step-{step:08d}", True, {})
            for name, training in self._trained.items()
        }

        def work() -> SavedPath:
            kept = {**meta, _STATES: {name: saved.result().path for name, saved in saving.items()}}
            return SavedPath(str(save_checkpoint(root, step, tensors={}, meta=kept, keep=keep)))

        return self._worker.submit(work)

    def restore_checkpoint(self, root: Path) -> Future[Restored]:
        def work() -> Restored:
            found = latest_checkpoint(root)
            checkpoint = found.checkpoint
            if checkpoint is None:
                return Restored(None, {}, found.torn)
            states = checkpoint.meta.get(_STATES, {})
            if states.keys() != self._trained.keys():
                raise ValueError(
                    f"the checkpoint in {root} holds states of {sorted(states) or 'no client'} on "
                    f"Tinker, but this trains {sorted(self._trained)}"
                )
            # The SDK deprecates loading into an existing client, so each gets a new one.
            resumed = {name: self._resume(path) for name, path in states.items()}
            for name, made in resumed.items():
                self._trained[name].continue_as(made.result(), states[name])
            restore_rng(checkpoint.rng)
            return Restored(checkpoint.step, checkpoint.meta, found.torn)

        return self._worker.submit(work)

    def close(self, status: EndStatus, detail: str | None) -> None:
        self._worker.shutdown()
        self._service.close(status, detail).result()
