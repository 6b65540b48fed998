"""One base model in this process: the adapters that train over it, their saved states, and the
sampler that serves them. Knows threads and when weights are loaded, not what is computed."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, cast

from torch import Tensor

from agentrl_trainer.checkpoint import Checkpoint, latest_checkpoint
from agentrl_trainer.client.futures import OperationThread
from agentrl_trainer.client.types import Folder
from agentrl_trainer.inference import RequestError, SamplerEngine
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.devices import on_own_thread
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.lora_targets import adaptable


class TrainingProcesses(Protocol):
    """Processes that train with this one, or in place of it: its followers, or verl's workers."""

    def load(self, load: Callable[..., BaseModel]) -> BaseModel:
        """Load what this process needs of the base model, by ``load`` or otherwise."""
        ...

    def learner(self, base: BaseModel, options: Mapping[str, Any]) -> Any:
        """Make what has the methods of a ``Learner``."""
        ...

    def check(self) -> None:
        """Raise an error if one of them has ended while they were idle, where that is known."""
        ...

    def end(self) -> None: ...


class LocalBase:
    """Everything that touches the learner runs on ``worker``, in order. Sampling has the engine's
    thread and its own copy of the base.

    ``load`` is called once for training and once for sampling, each at first use.
    """

    def __init__(
        self,
        name: str,
        load: Callable[..., BaseModel],
        learner_options: Mapping[str, Any],
        processes: TrainingProcesses | None = None,
    ) -> None:
        self.name = name
        self.worker = OperationThread(f"agentrl-train-{name}")
        self.adaptable: list[str] = []
        """Paths of the base's linear layers and experts, once it is loaded for training."""
        self._load = load
        self._learner_options, self._processes = learner_options, processes
        self._lock = threading.Lock()
        self._training: BaseModel | None = None
        self._engine: SamplerEngine | None = None
        self._served = itertools.count(1)
        self._learner: Learner | None = None

    @property
    def training(self) -> BaseModel:
        with self._lock:
            if self._training is None:
                self._training = on_own_thread(self._load_for_training)
                self.adaptable = adaptable(self._training.model)
            return self._training

    @property
    def sampler(self) -> SamplerEngine:
        with self._lock:
            if self._engine is None:
                self._engine = SamplerEngine(on_own_thread(self._load))
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
            base, options = self.training, {"adapters": (name,), **lora, **self._learner_options}
            if self._processes is None:
                self._learner = Learner(base, **options)
            else:
                self._learner = cast(Learner, self._processes.learner(base, options))
        else:
            self._learner.add_adapter(name, **lora)

    def _load_for_training(self) -> BaseModel:
        return self._load() if self._processes is None else self._processes.load(self._load)

    def serve(self, folder: Folder) -> str:
        """Load a PEFT folder into the sampler; return the name it has there."""
        name = f"weights-{next(self._served)}"
        self.sampler.load_adapter(name, 1, folder).result()
        return name

    def unload(self, served: Future[str | None]) -> None:
        """Unload what was served. Takes no lock: finalizers call it on any thread."""
        if self._engine is None or served.exception() is not None:
            return
        if (name := served.result()) is not None:
            with contextlib.suppress(RequestError):  # the sampler has ended
                self._engine.unload_adapter(name)

    def check(self) -> None:
        if self._processes is not None:
            self._processes.check()

    def close(self) -> None:
        if self._processes is not None:
            self.worker.submit(self._processes.end).result()
        self.worker.shutdown()
        if self._engine is not None:
            self._engine.stop()


def read_state(path: Folder) -> Checkpoint:
    """Read what ``save_state`` wrote; ValueError if there is no whole state at ``path``."""
    latest = latest_checkpoint(path)
    if latest.checkpoint is None:
        why = "; ".join(f"{folder.name}: {fault}" for folder, fault in latest.torn.items())
        raise ValueError(
            f"path: {path} holds no whole state{f' ({why})' if why else ''}; give what save_state "
            "returned"
        )
    return latest.checkpoint


def tensors_of(state: Checkpoint, name: str, *, optimizer: bool) -> dict[str, Tensor]:
    """Return a state's tensors for the adapter ``name``, whatever its name was.

    Keys are ``kind/owner/key``; an owner is an adapter, or its value function ``value.<adapter>``.
    """
    found: dict[str, Tensor] = {}
    for whole, tensor in state.tensors.items():
        kind, owner, key = whole.split("/", 2)
        part, dot, adapter = owner.rpartition(".")  # an adapter's name has no dot
        if adapter == state.meta["adapter"] and (optimizer or kind == "weights"):
            found[f"{kind}/{part}{dot}{name}/{key}"] = tensor
    return found
