"""One base model in this process: who trains over it, and who samples from it.

Knows threads and when weights are loaded; not what is asked of learner and sampler.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from agentrl_trainer.client.futures import Worker
from agentrl_trainer.client.types import Folder
from agentrl_trainer.inference import RequestError, SamplerEngine
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import BaseModel, load_base
from agentrl_trainer.models.lora_targets import adaptable

T = TypeVar("T")


class LocalBase:
    """One base model: the adapters that train over it, and the sampler that serves them.

    ``learner_options`` go to ``Learner``. The weights are loaded once for training and once for
    sampling, each when it is first asked for.
    """

    def __init__(
        self,
        name: str,
        device: str,
        dtype: str,
        load_in_4bit: bool,
        trust_remote_code: bool,
        learner_options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self._load = partial(
            load_base,
            name,
            device=device,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
            trust_remote_code=trust_remote_code,
        )
        self._learner_options = learner_options
        self._worker = Worker(f"agentrl-train-{name}")
        self._lock = threading.Lock()
        self._training: BaseModel | None = None
        self._engine: SamplerEngine | None = None
        self._served = 0
        self.learner: Learner | None = None
        self.adaptable: list[str] = []
        """The base's linear layers and experts, by path; known once it is loaded for training."""

    def run(self, work: Callable[[], T]) -> Future[T]:
        """In its turn, on the base's thread."""
        return self._worker.submit(work)

    @property
    def training(self) -> BaseModel:
        with self._lock:
            if self._training is None:
                self._training = self._load()
                self.adaptable = adaptable(self._training.model)
            return self._training

    @property
    def context_length(self) -> int | None:
        """None while no weights are loaded."""
        loaded = self._training or (self._engine.base if self._engine is not None else None)
        return None if loaded is None else loaded.context_length

    @property
    def sampler(self) -> SamplerEngine:
        with self._lock:
            if self._engine is None:
                self._engine = SamplerEngine(self._load())
                self._engine.start()
            return self._engine

    def add_adapter(
        self, name: str, rank: int, alpha: float, targets: str | list[str], seed: int
    ) -> None:
        """On the base's thread."""
        if self.learner is None:
            self.learner = Learner(
                self.training,
                adapters=(name,),
                rank=rank,
                alpha=alpha,
                targets=targets,
                seed=seed,
                **self._learner_options,
            )
        else:
            self.learner.add_adapter(name, rank=rank, alpha=alpha, targets=targets, seed=seed)

    def remove_adapter(self, name: str) -> None:
        """On the base's thread."""
        self.trained().remove_adapter(name)

    def trained(self) -> Learner:
        """On the base's thread."""
        if self.learner is None:
            raise ValueError("nothing trains over this model: create a training client first")
        return self.learner

    def serve(self, folder: Folder) -> str:
        """Load a PEFT folder into the sampler, under a name of its own."""
        sampler = self.sampler
        with self._lock:
            self._served += 1
            name = f"weights-{self._served}"
        sampler.load_adapter(name, 1, folder).result()
        return name

    def unload(self, name: str) -> None:
        """Forget served weights. Takes no lock: finalizers call it, whatever their thread holds."""
        if self._engine is not None:
            with contextlib.suppress(RequestError):  # the sampler has ended
                self._engine.unload_adapter(name)

    def close(self) -> None:
        self._worker.shutdown()
        if self._engine is not None:
            self._engine.stop()
