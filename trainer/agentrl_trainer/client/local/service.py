"""The local service: base models and training clients by name, checkpoints of all adapters."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentrl_trainer.checkpoint import (
    Restored,
    latest_checkpoint,
    restore_rng,
    save_checkpoint,
)
from agentrl_trainer.client.futures import finished, wait
from agentrl_trainer.client.local.base import LocalBase
from agentrl_trainer.client.local.sampling import LocalSampling
from agentrl_trainer.client.local.training import LocalTraining, read_state
from agentrl_trainer.client.naming import check_name, new_folder
from agentrl_trainer.client.types import (
    EndStatus,
    Folder,
    GetServerCapabilitiesResponse,
    LoraOptions,
    Options,
    SavedPath,
    SupportedModel,
)
from agentrl_trainer.models.loading import TINY_MODEL
from agentrl_trainer.models.lora import CONFIG_FILE


class LocalService:
    """``learner_options`` are those of ``learner.Learner``; the others but ``folder`` are
    ``load_base``'s."""

    is_local = True

    def __init__(
        self,
        folder: Folder | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_in_4bit: bool = False,
        trust_remote_code: bool = False,
        **learner_options: Any,
    ) -> None:
        self.folder = Path(folder) if folder is not None else new_folder("client")
        self._model_options = {
            "device": device,
            "dtype": dtype,
            "load_in_4bit": load_in_4bit,
            "trust_remote_code": trust_remote_code,
        }
        self._learner_options = learner_options
        self._bases: dict[str, LocalBase] = {}
        self._names: set[str] = set()
        self._made = 0
        self._lock = threading.Lock()

    def base(self, name: str) -> LocalBase:
        with self._lock:
            if name not in self._bases:
                self._bases[name] = LocalBase(name, self._model_options, self._learner_options)
            return self._bases[name]

    def train(
        self, base_model: str, options: LoraOptions, name: str | None, tinker: Options
    ) -> LocalTraining:
        base = self.base(base_model)
        base.training  # noqa: B018 - an unknown model fails here, not in a future
        with self._lock:
            self._made += 1
            name = name or f"model-{self._made}"
            check_name(name)
            if "." in name:
                raise ValueError(f"name: {name!r} may not have dots")
            if name in self._names:
                raise ValueError(f"name: {name!r} is taken by another client of this service")
            self._names.add(name)
        try:
            return LocalTraining(base, name, self.folder / name, options, self._forget)
        except BaseException:
            self._forget(name)
            raise

    def _forget(self, name: str) -> None:
        """Free the name of a closed client."""
        with self._lock:
            self._names.discard(name)

    def train_from(
        self, path: str, base_model: str | None, optimizer: bool, name: str | None, tinker: Options
    ) -> LocalTraining:
        meta = read_state(path).meta
        known = {field.name for field in fields(LoraOptions)}  # older states hold more
        lora = LoraOptions(**{name: meta["lora"][name] for name in known})
        client = self.train(base_model or meta["base_model"], lora, name, tinker)
        try:
            wait(client.load_state(path, optimizer, tinker))
        except BaseException:
            wait(client.close())
            raise
        return client

    def sampler(
        self, model_path: str | None, base_model: str | None, tinker: Options
    ) -> LocalSampling:
        if model_path is None:
            assert base_model is not None
            base = self.base(base_model)
            base.sampler  # noqa: B018 - an unknown model fails here
            return LocalSampling(base, finished(None))
        config = Path(model_path) / CONFIG_FILE
        if not config.is_file():
            raise ValueError(
                f"model_path: {config} does not exist; give what save_weights_for_sampler returned"
            )
        base = self.base(json.loads(config.read_text())["base_model_name_or_path"])
        return LocalSampling(base, finished(base.serve(model_path)))

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the loaded models, and the tiny one that is part of the package."""
        known: dict[str, LocalBase | None] = {TINY_MODEL: None, **self._loaded}
        return GetServerCapabilitiesResponse(
            [
                SupportedModel(name, base and base.context_length, trainable=True, sampleable=True)
                for name, base in sorted(known.items())
            ]
        )

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], keep: int
    ) -> Future[SavedPath]:
        base = self._only_base()

        def work() -> SavedPath:
            state = base.learner.state_dict()
            return SavedPath(str(save_checkpoint(root, step, tensors=state, meta=meta, keep=keep)))

        return base.run(work)

    def restore_checkpoint(self, root: Path) -> Future[Restored]:
        base = self._only_base()

        def work() -> Restored:
            found = latest_checkpoint(root)
            checkpoint = found.checkpoint
            if checkpoint is None:
                return Restored(None, {}, found.torn)
            base.learner.load_state_dict(checkpoint.tensors)
            restore_rng(checkpoint.rng)
            return Restored(checkpoint.step, checkpoint.meta, found.torn)

        return base.run(work)

    @property
    def _loaded(self) -> dict[str, LocalBase]:
        """The base models that could be loaded."""
        known = self._bases.items()
        return {name: base for name, base in known if base.context_length is not None}

    def _only_base(self) -> LocalBase:
        if len(self._loaded) != 1:
            raise ValueError(f"a checkpoint is of one base model; this has {[*self._loaded]}")
        return next(iter(self._loaded.values()))

    def close(self, status: EndStatus, detail: str | None) -> None:
        for base in self._bases.values():
            base.close()
