"""One base model in this process: the adapters that train over it, and the sampler that serves
them. Knows threads and when weights are loaded, not the operations of learner and sampler."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_trainer.client.futures import Worker
from agentrl_trainer.inference import RequestError, SamplerEngine
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.lora_targets import adaptable


class LocalBase:
    """Everything that touches the learner runs on ``worker``, in order. Sampling has the engine's
    thread and its own copy of the base.

    ``load`` is called once for training and once for sampling, each at first use.
    """

    def __init__(
        self, name: str, load: Callable[[], BaseModel], learner_options: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.worker = Worker(f"agentrl-train-{name}")
        self.adaptable: list[str] = []
        """Paths of the base's linear layers and experts, once it is loaded for training."""
        self._load = load
        self._learner_options = learner_options
        self._lock = threading.Lock()
        self._training: BaseModel | None = None
        self._engine: SamplerEngine | None = None
        self._served = 0
        self._learner: Learner | None = None

    @property
    def training(self) -> BaseModel:
        with self._lock:
            if self._training is None:
                self._training = self._load()
                self.adaptable = adaptable(self._training.model)
            return self._training

    @property
    def sampler(self) -> SamplerEngine:
        with self._lock:
            if self._engine is None:
                self._engine = SamplerEngine(self._load())
                self._engine.start()
            return self._engine

    @property
    def context_length(self) -> int | None:
        """None before any weights are loaded."""
        loaded = self._training or (self._engine and self._engine.base)
        return loaded and loaded.context_length

    @property
    def learner(self) -> Learner:
        """The learner; use it on the worker."""
        if self._learner is None:
            raise ValueError("nothing trains over this model: create a training client first")
        return self._learner

    def add_adapter(self, name: str, **lora: Any) -> None:
        """Add an adapter to the learner, or make the learner with it; on the worker."""
        if self._learner is None:
            options = {**lora, **self._learner_options}
            self._learner = Learner(self.training, adapters=(name,), **options)
        else:
            self._learner.add_adapter(name, **lora)

    def serve(self, folder: str | Path) -> str:
        """Load a PEFT folder into the sampler; return the name it has there."""
        sampler = self.sampler
        with self._lock:
            self._served += 1
            name = f"weights-{self._served}"
        sampler.load_adapter(name, 1, folder).result()
        return name

    def unload(self, name: str) -> None:
        """Unload served weights. Takes no lock: finalizers call it on any thread."""
        if self._engine is not None:
            with contextlib.suppress(RequestError):  # the sampler has ended
                self._engine.unload_adapter(name)

    def close(self) -> None:
        self.worker.shutdown()
        if self._engine is not None:
            self._engine.stop()
