"""What a backend has to do for the clients: the two that exist are ``local`` and ``hosted``.

Every operation returns at once, with a future; those of one trained model happen in the order in
which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from agentrl_trainer.checkpoint import Restored
from agentrl_trainer.client.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetServerCapabilitiesResponse,
    LoraOptions,
    ModelInfo,
    OptimStepResponse,
    SampleOptions,
    SampleResponse,
    SamplerOptions,
    SavedPath,
    SaveOptions,
    StateOptions,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.prepare_batch import UpdateSettings

T = TypeVar("T")

EndStatus = Literal["success", "errored", "interrupted"]

Data = Sequence[Datum] | Sequence[TrainingRow]
"""Tinker's datums, or the trainer's own rows (``batches.TrainingRow``)."""


class RefusedRows(ValueError):
    """The backend has no way to learn from these rows; nothing was asked of the service."""


class SamplingBackend(Protocol):
    base_model: str

    @property
    def ready(self) -> Future[None]:
        """Done when the weights are there; sampling may be asked for before."""
        ...

    def sample(self, prompt: list[int], options: SampleOptions) -> Future[SampleResponse]: ...

    def logprobs(
        self, rows: Sequence[list[int]], last_n: int | None = None
    ) -> Future[list[list[float | None]]]: ...

    def tokenizer(self) -> Any: ...


class TrainingBackend(Protocol):
    info: ModelInfo
    folder: Path
    """Where metrics are written."""

    def forward(
        self, data: Data, loss_fn: str, config: LossConfig | None
    ) -> Future[ForwardBackwardOutput]: ...

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None,
        logprobs: bool,
    ) -> Future[ForwardBackwardOutput]: ...

    def forward_backward_custom(
        self, data: Data, function: CustomLoss[Datum]
    ) -> Future[ForwardBackwardOutput]: ...

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> Future[list[TrainingRow]]: ...

    def optim_step(self, adam: AdamParams) -> Future[OptimStepResponse]: ...

    def save_state(self, name: str, overwrite: bool, options: SaveOptions) -> Future[SavedPath]: ...

    def load_state(self, path: str, optimizer: bool, access_token: str | None) -> Future[None]: ...

    def save_weights_for_sampler(
        self, name: str | Path, options: SaveOptions
    ) -> Future[SavedPath]: ...

    def local(self, work: Callable[[Learner], T]) -> Future[T]: ...

    def sampler(self, options: SamplerOptions) -> SamplingBackend:
        """Of the weights as they will be when what was asked for so far is done."""
        ...

    def tokenizer(self) -> Any: ...

    def close(self) -> Future[None]:
        """Forget the adapter when what was asked for so far is done; what was saved stays."""
        ...


class ServiceBackend(Protocol):
    def train(self, base_model: str, options: LoraOptions, name: str | None) -> TrainingBackend: ...

    def train_from(
        self, path: str, *, optimizer: bool, options: StateOptions, name: str | None
    ) -> TrainingBackend: ...

    def sampler(
        self, model_path: str | None, base_model: str | None, options: SamplerOptions
    ) -> SamplingBackend: ...

    def capabilities(self) -> GetServerCapabilitiesResponse: ...

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], keep: int
    ) -> Future[SavedPath]: ...

    def restore_checkpoint(self, root: Path) -> Future[Restored]: ...

    def close(self, status: EndStatus, detail: str | None) -> None:
        """When everything that was asked for is done."""
        ...
