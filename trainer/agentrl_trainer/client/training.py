"""TrainingClient: Tinker's client that trains one adapter, over a backend.

Operations return at once and run in the order of their calls, so call several before waiting for
the first. ``**tinker`` takes Tinker-only parameters: see ``parameters.TINKER_ONLY``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_trainer.client.async_api import awaited, submitted
from agentrl_trainer.client.futures import APIFuture
from agentrl_trainer.client.parameters import tinker_options
from agentrl_trainer.client.sampling import Client, SamplingClient
from agentrl_trainer.client.types import (
    AdamParams,
    Data,
    Datum,
    Folder,
    ForwardBackwardOutput,
    ModelInfo,
    OptimStepResponse,
    SavedPath,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.prepare_batch import UpdateSettings

if TYPE_CHECKING:
    from agentrl_trainer.client.local.service import LocalService
    from agentrl_trainer.client.local.training import LocalTraining
    from agentrl_trainer.client.tinker.service import TinkerService
    from agentrl_trainer.client.tinker.training import TinkerTraining

T = TypeVar("T")


class TrainingClient(Client):
    """Trains one adapter. Operations run in the order of their calls."""

    def __init__(
        self, backend: LocalTraining | TinkerTraining, service: LocalService | TinkerService
    ) -> None:
        self._backend = backend
        self._service = service
        self.history: list[dict[str, float]] = []
        """The metrics given to ``log``."""

    def forward(
        self, data: Data, loss_fn: str = "cross_entropy", loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute loss and metrics as ``forward_backward`` does, without a gradient.

        The outputs hold the targets' log-probs: locally of those that count in the loss, and for
        ``cross_entropy`` of all. ``data`` may also be the trainer's own rows
        (``agentrl_trainer.data.training_row.TrainingRow``), here and in ``forward_backward``.
        """
        done = self._backend.forward_backward(data, loss_fn, loss_fn_config, backward=False)
        return APIFuture(done)

    forward_async = submitted(forward)

    def forward_backward(
        self,
        data: Data,
        loss_fn: str = "cross_entropy",
        loss_fn_config: LossConfig | None = None,
        *,
        normalize_by: float | None = 1.0,
        logprobs: bool = True,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of the loss to the gradients that ``optim_step`` will apply.

        The loss is a sum over tokens (``losses``), as in Tinker.

        Args:
            normalize_by: divides the loss; None divides by the number of tokens that count in
                ``data``, so that ``loss:sum`` is a mean. Over Tinker for training rows only.
            logprobs: False leaves ``loss_fn_outputs`` empty, which saves their transfer.

        Raises:
            ValueError: the data fit no loss; names datum, field and fix.
        """
        return APIFuture(
            self._backend.forward_backward(data, loss_fn, loss_fn_config, normalize_by, logprobs)
        )

    forward_backward_async = submitted(forward_backward)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss[Datum], **tinker: Any
    ) -> APIFuture[ForwardBackwardOutput]:
        """Run ``forward_backward`` with a function ``(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` are torch tensors [T], one for each datum. The function runs on the training
        thread, in its turn; it must not wait for another operation.
        """
        if not callable(loss_fn):
            raise ValueError(f"loss_fn must be a function of (data, logprobs), not {loss_fn!r}")
        options = tinker_options("forward_backward_custom", tinker, self._backend)
        return APIFuture(self._backend.forward_backward_custom(data, loss_fn, options))

    forward_backward_custom_async = submitted(forward_backward_custom)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> APIFuture[list[TrainingRow]]:
        """Add to the rows what depends on the policy before the update: log-probs of references,
        values, GAE's advantages.

        Raises:
            RefusedRows: the backend cannot learn from these rows.
        """
        return APIFuture(self._backend.prepare(rows, settings))

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the accumulated gradients with AdamW and clear them.

        If a gradient is not finite nothing changes and ``skipped_non_finite`` is 1.
        ``adam_params`` is the older name of ``optim_params``; without either: ``AdamParams()``.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, which is its older name, not both")
        return APIFuture(self._backend.optim_step(optim_params or adam_params or AdamParams()))

    optim_step_async = submitted(optim_step)

    def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        **tinker: Any,
    ) -> APIFuture[SavedPath]:
        """Save weights and optimizer atomically, to continue from."""
        options = tinker_options("save_state", tinker, self._backend)
        return APIFuture(self._backend.save_state(name, overwrite, options))

    save_state_async = submitted(save_state)

    def load_state(self, path: Folder, **tinker: Any) -> APIFuture[None]:
        """Load weights that ``save_state`` wrote, with a new optimizer."""
        options = tinker_options("load_state", tinker, self._backend)
        return APIFuture(self._backend.load_state(str(path), False, options))

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(self, path: Folder, **tinker: Any) -> APIFuture[None]:
        """Load weights and optimizer that ``save_state`` wrote, bit for bit."""
        options = tinker_options("load_state_with_optimizer", tinker, self._backend)
        return APIFuture(self._backend.load_state(str(path), True, options))

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_for_sampler(self, name: str | Path, **tinker: Any) -> APIFuture[SavedPath]:
        """Save the weights to sample with: locally a PEFT folder, which vLLM serves as well.

        A ``Path`` in place of a name is the folder. Over Tinker its last part is the name, and
        ``tinker.json`` in the folder tells where the weights are.
        """
        options = tinker_options("save_weights_for_sampler", tinker, self._backend)
        return APIFuture(self._backend.save_weights_for_sampler(name, options))

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def save_weights_and_get_sampling_client(self, **tinker: Any) -> SamplingClient:
        """Sample with the weights as they are after the operations called so far.

        The weights last as long as the client; nothing stays on disk.
        """
        options = tinker_options("save_weights_and_get_sampling_client", tinker, self._backend)
        return SamplingClient(self._backend.sampler(options))

    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)

    def create_sampling_client(self, model_path: Folder, **tinker: Any) -> SamplingClient:
        """Sample with saved weights, as ``ServiceClient.create_sampling_client`` does."""
        options = tinker_options("create_sampling_client", tinker, self._backend)
        return SamplingClient(self._service.sampler(str(model_path), None, options))

    create_sampling_client_async = awaited(create_sampling_client, on_thread=True)

    def log(
        self, metrics: Mapping[str, float] | None = None, step: int | None = None, **named: float
    ) -> None:
        """Append metrics to ``history``, and as a line to ``metrics.jsonl`` in ``folder``."""
        row: dict[str, float] = {} if step is None else {"step": step}
        for name, value in {**(metrics or {}), **named}.items():
            item: Any = getattr(value, "item", None)  # of a 0-d array or tensor
            try:
                number = value if item is None else item()
                row[name] = number if isinstance(number, int) else float(number)
            except (TypeError, ValueError) as error:
                raise ValueError(f"log: {name} must be a number, not {value!r}") from error
        self.history.append(row)
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def local(self, work: Callable[[Learner], T]) -> APIFuture[T]:
        """Run any function of the learner in its turn; local backend only."""
        return APIFuture(self._backend.local(work))

    @property
    def folder(self) -> Path:
        """Where states, sampler weights and metrics are saved."""
        return self._backend.folder

    @property
    def model_id(self) -> str:
        return self._backend.info.model_id

    def get_info(self) -> ModelInfo:
        return self._backend.info

    get_info_async = submitted(get_info)

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer of the model."""
        return self._backend.tokenizer()

    def close(self) -> APIFuture[None]:
        """Forget the adapter and free its name, after the operations called so far.

        What was saved stays. On Tinker adapters end with their session.
        """
        return APIFuture(self._backend.close())
