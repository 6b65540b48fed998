"""ServiceClient: Tinker's entry point, which makes training and sampling clients.

    service = ServiceClient()
    training = service.create_lora_training_client("agentrl-tiny", rank=16)
    done = training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-3))
    print(done.result().metrics["loss:sum"])

``**tinker`` takes Tinker-only parameters: see ``parameters.TINKER_ONLY``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Self

import torch
from torch import Tensor

from agentrl_trainer.checkpoint import (
    Checkpoint,
    Latest,
    capture,
    latest_checkpoint,
    restore_rng,
)
from agentrl_trainer.client.futures import APIFuture, OperationThread, awaited, finished
from agentrl_trainer.client.local_base import LocalBase, read_state
from agentrl_trainer.client.parameters import TINKER_ONLY, check_tinker_only
from agentrl_trainer.client.sampling import SamplingClient
from agentrl_trainer.client.training import TrainingClient
from agentrl_trainer.client.types import (
    EndStatus,
    Folder,
    GetServerCapabilitiesResponse,
    LoraOptions,
    SavedPath,
    SupportedModel,
)
from agentrl_trainer.distributed.plan import RankPlan
from agentrl_trainer.distributed.ranks import Followers
from agentrl_trainer.models.loading import BaseModel, load_base
from agentrl_trainer.models.saved_lora import CONFIG_FILE
from agentrl_trainer.names import TINY_MODEL, check_name

_TINKER = "agentrl_trainer.client.tinker.service:TinkerServiceClient"  # a subclass of ServiceClient

_VERL = "agentrl_trainer.distributed.verl.learner:VerlTrainers"


class ServiceClient:
    """Makes training and sampling clients. With a ``base_url`` or ``backend="tinker"`` it is a
    ``TinkerServiceClient``, which sends the same calls to the official SDK.

    Args:
        backend: "local" is this process, with torch; "verl" samples here and trains on verl's
            workers, on the Ray cluster that this process has joined; "tinker" is the official SDK
            (``pip install 'tinker>=0.38,<1'``), and the default if ``base_url`` is given.
        base_url: a server that speaks Tinker's protocol; None with "tinker" is Tinker itself.
        folder: where states and metrics are saved; default a new folder in ``runs/``.
        device, dtype: of the local model, see ``loading.load_base``.
        options: Tinker-only parameters, and for the local backend ``load_in_4bit``,
            ``trust_remote_code``, ``chat_template`` (``loading.load_base``), ``token_budget``,
            ``gradient_checkpointing`` and ``value`` (``learner.Learner``), ``trainers``: of the
            processes that train as one, of which this is the first (``size``, ``shard``,
            ``launch`` and ``setup`` of ``distributed.plan.RankPlan``), and ``threads``: torch's
            for a model of so many parameters, where the process leaves them to the service. For
            verl ``trainers`` are its workers (``size``, ``nodes``, ``setup``, ``engine`` and
            ``of_model`` of ``distributed.verl.workers.VerlWorkers``).
    """

    folder: Path
    """Where states and metrics are saved."""
    names: set[str]
    """Of the training clients that are not closed."""

    def __new__(cls, **options: Any) -> Self:
        base_url = options.get("base_url")
        kind = options.get("backend") or ("local" if base_url is None else "tinker")
        if kind not in ("local", "verl", "tinker"):
            raise ValueError(f"backend must be 'local', 'verl' or 'tinker', not {kind!r}")
        if kind != "tinker" and base_url is not None:
            raise ValueError(f"base_url is for backend='tinker', not for {kind!r}")
        if kind != "tinker":
            return super().__new__(cls)
        try:
            return super().__new__(resolve_name(_TINKER))
        except ImportError as error:
            raise ImportError(
                "backend='tinker' needs the official SDK: pip install 'tinker>=0.38,<1'"
            ) from error

    def __init__(
        self,
        *,
        base_url: str | None = None,
        backend: Literal["local", "verl", "tinker"] | None = None,
        folder: Folder | None = None,
        device: str = "auto",
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        ours = {k: v for k, v in options.items() if k not in TINKER_ONLY["ServiceClient"]}
        self.folder = folder_of(folder, "client")
        self.names: set[str] = set()
        of_model = ours.keys() & {"load_in_4bit", "trust_remote_code", "chat_template"}
        self._model_options = {name: ours.pop(name) for name in of_model}
        self._model_options |= {"device": device, "dtype": dtype}
        self._threads: Callable[[int], int] | None = ours.pop("threads", None)
        self._ranks: dict[str, Any] = {"size": 1, **ours.pop("trainers", {})}
        self._on_verl = backend == "verl"
        self._learner_options = ours
        self._bases: dict[str, LocalBase] = {}
        self._made = 0
        self._lock = threading.Lock()

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        *,
        name: str | None = None,
        alpha: float = 32.0,
        targets: str | list[str] | None = None,
        **tinker: Any,
    ) -> TrainingClient:
        """Make a new adapter over a base model, which all clients of a service share.

        Args:
            seed: None draws a new one each time.
            alpha, targets: LoRA's scale, and PEFT's target_modules in place of ``train_mlp`` and
                ``train_attn``; local backend only.
        """
        lora = LoraOptions(rank, seed, train_mlp, train_attn, alpha, targets)
        return self._train(base_model, lora, name, tinker)

    create_lora_training_client_async = awaited(create_lora_training_client, on_thread=True)

    def create_training_client_from_state(
        self, path: Folder, base_model: str | None = None, *, name: str | None = None, **tinker: Any
    ) -> TrainingClient:
        """Make a client from weights that ``save_state`` wrote, with a new optimizer.

        ``base_model`` replaces the one that was trained; its shapes must be the same.
        """
        return self._train_from(path, base_model, name, False, tinker)

    create_training_client_from_state_async = awaited(
        create_training_client_from_state, on_thread=True
    )

    def create_training_client_from_state_with_optimizer(
        self, path: Folder, base_model: str | None = None, *, name: str | None = None, **tinker: Any
    ) -> TrainingClient:
        """Make a client that continues exactly where ``save_state`` was called."""
        return self._train_from(path, base_model, name, True, tinker)

    create_training_client_from_state_with_optimizer_async = awaited(
        create_training_client_from_state_with_optimizer, on_thread=True
    )

    def _base(self, name: str) -> LocalBase:
        with self._lock:
            if name not in self._bases:
                processes = None
                if self._on_verl:
                    processes = _verl()(name, self._model_options, **self._ranks)
                elif self._ranks["size"] > 1:
                    processes = Followers(RankPlan(name, self._model_options, **self._ranks))
                load = partial(self._load, name)
                self._bases[name] = LocalBase(name, load, self._learner_options, processes)
            return self._bases[name]

    def _load(self, name: str, load: Callable[[], BaseModel] | None = None) -> BaseModel:
        base = load() if load else load_base(name, **self._model_options)
        if self._threads is not None:  # of the threads that train and sample, which start next
            torch.set_num_threads(self._threads(base.parameters))
        return base

    def _train(
        self, base_model: str, lora: LoraOptions, name: str | None, more: Mapping[str, Any]
    ) -> TrainingClient:
        check_tinker_only("create_lora_training_client", more)
        base = self._base(base_model)
        base.training  # noqa: B018 - an unknown model fails here, not in a future
        with self._lock:
            self._made += 1
            name = name or f"model-{self._made}"
            if check_name(name, "name", dots=False) in self.names:
                raise ValueError(f"name: {name!r} is taken by another client of this service")
            self.names.add(name)
        try:
            return TrainingClient(self, base, name, lora)
        except BaseException:
            self.names.discard(name)
            raise

    def _train_from(
        self,
        path: Folder,
        base_model: str | None,
        name: str | None,
        optimizer: bool,
        more: Mapping[str, Any],
    ) -> TrainingClient:
        method = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
        check_tinker_only(method, more)
        meta = read_state(path).meta
        known = {field.name for field in fields(LoraOptions)}  # older states hold more
        lora = LoraOptions(**{name: meta["lora"][name] for name in known})
        client = self._train(base_model or meta["base_model"], lora, name, {})
        try:
            (client.load_state_with_optimizer if optimizer else client.load_state)(path).result()
        except BaseException:
            client.close().result()
            raise
        return client

    def create_sampling_client(
        self, model_path: Folder | None = None, base_model: str | None = None, **tinker: Any
    ) -> SamplingClient:
        """Sample with saved weights (``save_weights_for_sampler``), or with a base model."""
        check_tinker_only("create_sampling_client", tinker)
        if base_model is not None and model_path is None:
            base = self._base(base_model)
            base.sampler  # noqa: B018 - an unknown model fails here
            return SamplingClient(base, finished(None))
        if base_model is not None or model_path is None:
            raise ValueError("give either model_path or base_model")
        config = Path(model_path) / CONFIG_FILE
        if not config.is_file():
            raise ValueError(
                f"model_path: {config} does not exist; give what save_weights_for_sampler returned"
            )
        base = self._base(json.loads(config.read_text())["base_model_name_or_path"])
        return SamplingClient(base, finished(base.serve(model_path)))

    create_sampling_client_async = awaited(create_sampling_client, on_thread=True)

    def save_checkpoint(
        self,
        root: Folder,
        step: int,
        *,
        meta: Mapping[str, Any] | None = None,
        keep: int = 2,
        keep_step: int | None = None,
    ) -> APIFuture[SavedPath]:
        """Save all adapters, their optimizers and the random states atomically as one checkpoint
        (``agentrl_trainer.checkpoint``). Later operations run while it is written. Its meta also
        has the number of ``trainers``.

        Over Tinker it holds the paths of states (``save_state``), which stay there.
        """
        contents = self._save_states(step)

        def begin() -> APIFuture[SavedPath]:
            tensors, own = contents()
            captured = capture(step, tensors=tensors, meta={**(meta or {}), **own})
            write = partial(captured.write, root, keep=keep, keep_step=keep_step)
            return self._writer.submit(lambda: SavedPath(str(write())))

        return self._worker.start(begin)

    def restore_checkpoint(
        self, root: Folder, unknown_after: int | None = None
    ) -> APIFuture[Latest]:
        """Restore the newest whole checkpoint below ``root``, if there is one.

        The same clients must exist as when it was saved. The result tells which checkpoint it is,
        and which ones were passed over: those that are torn, and of steps after ``unknown_after``.
        """

        def work() -> Latest:
            found = latest_checkpoint(root, unknown_after)
            if found.checkpoint is not None:
                self._load_states(found.checkpoint)
                restore_rng(found.checkpoint.rng)
            return found

        return self._worker.submit(work)

    @property
    def _worker(self) -> OperationThread:
        return self._only_base().worker

    @cached_property
    def _writer(self) -> OperationThread:
        return OperationThread("agentrl-checkpoint")

    def _save_states(self, step: int) -> Callable[[], tuple[Mapping[str, Tensor], dict[str, Any]]]:
        """Return what gives, on the worker, a checkpoint's tensors and additions to its meta."""
        base = self._only_base()
        return lambda: (base.learner.state_dict(), {"trainers": self._ranks["size"]})

    def _load_states(self, checkpoint: Checkpoint) -> None:
        self._only_base().learner.load_state_dict(checkpoint.tensors)

    def _only_base(self) -> LocalBase:
        loaded = [name for name, base in self._bases.items() if base.context_length is not None]
        if len(loaded) != 1:
            raise ValueError(f"a checkpoint is of one base model; this has {loaded}")
        return self._bases[loaded[0]]

    def check(self) -> None:
        """Look whether the processes that train with this one are there. Cheap, on any thread.

        Raises:
            RankError: one has ended since the last operation; the next one would fail.
        """
        for base in list(self._bases.values()):
            base.check()

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the known base models: locally the loaded ones, and the tiny one of the package.

        Locally any causal language model may be trained.
        """
        lengths = {name: base.context_length for name, base in self._bases.items()}
        loaded = {name: length for name, length in lengths.items() if length is not None}
        known = sorted({TINY_MODEL: None, **loaded}.items())
        return GetServerCapabilitiesResponse([SupportedModel(*one, True, True) for one in known])

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await asyncio.to_thread(self.get_server_capabilities)

    def supported_models(self) -> list[str]:
        """Return the names of ``get_server_capabilities``."""
        return [model.model_name for model in self.get_server_capabilities().supported_models]

    def close(self, status: EndStatus = "success", detail: str | None = None) -> APIFuture[None]:
        """Run the operations called so far, then end the session; its clients are of no use after.

        ``status`` and ``detail`` tell Tinker how it ended. Waits, though it returns a future.
        """
        for base in self._bases.values():
            base.close()
        self._writer.shutdown()
        return finished(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            self.close("errored", repr(error))
        else:
            self.close("success" if error is None else "interrupted")


def _verl() -> Any:
    try:
        return resolve_name(_VERL)
    except ImportError as error:
        raise ImportError(
            f"backend='verl' needs verl and ray, see docs/scale.md: {error}"
        ) from error


def folder_of(given: Folder | None, kind: str) -> Path:
    """Return a service's folder, by default one below ``runs/`` named by the time."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Path("runs") / f"{kind}-{stamp}" if given is None else Path(given)
