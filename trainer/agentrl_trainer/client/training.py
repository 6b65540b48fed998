"""TrainingClient: Tinker's client that trains one adapter, here over a base model in this process.

Operations return at once and run in the order of their calls, so call several before waiting for
the first. ``**tinker`` takes Tinker-only parameters: see ``parameters.TINKER_ONLY``.

<folder>/<client>/weights/<name>          states, from ``save_state``
<folder>/<client>/sampler_weights/<name>  adapters, from ``save_weights_for_sampler``
<folder>/<client>/metrics.jsonl           metrics, from ``log``
"""

from __future__ import annotations

import json
import math
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from agentrl_trainer.checkpoint import save_checkpoint
from agentrl_trainer.client.futures import APIFuture, awaited, submitted
from agentrl_trainer.client.local_base import LocalBase, read_state, tensors_of
from agentrl_trainer.client.parameters import check_tinker_only
from agentrl_trainer.client.rows import metrics_of, outputs, to_rows
from agentrl_trainer.client.sampling import Client, SamplingClient
from agentrl_trainer.client.types import (
    AdamParams,
    D,
    Data,
    Folder,
    ForwardBackwardOutput,
    LoraOptions,
    LossCall,
    ModelData,
    ModelInfo,
    OptimStepResponse,
    SavedPath,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import LossConfig, parse_loss_options
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare
from agentrl_trainer.names import check_name

if TYPE_CHECKING:
    from agentrl_trainer.client.service import ServiceClient

STATES, SAMPLERS = "weights", "sampler_weights"

T = TypeVar("T")


class TrainingClient(Client):
    """Trains one adapter. Operations run in the order of their calls. A service makes the clients,
    and gives each a name of its own."""

    folder: Path
    """Where states, sampler weights and metrics are saved."""
    history: list[dict[str, float]]
    """The metrics given to ``log``."""

    def __init__(
        self, service: ServiceClient, base: LocalBase, name: str, options: LoraOptions
    ) -> None:
        self.folder = service.folder / name
        self.history = []
        self._service, self._base, self._name, self._options = service, base, name, options
        self._closed = False
        self._failed: BaseException | None = None  # why this step's gradients are incomplete
        self._run = base.worker.submit
        model = base.training.model
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore
        data = ModelData(str(model.config.model_type), base.name, base.name)
        self._info = ModelInfo(name, data, base.name, lora_rank=options.rank)
        lora = {
            "rank": options.rank,
            "alpha": options.alpha,
            "targets": options.target_modules(base.adaptable),
            "seed": secrets.randbelow(2**31) if options.seed is None else options.seed,
        }
        added = self._run(lambda: base.add_adapter(name, **lora))
        try:
            added.result()
        except BaseException:
            added.cancel()
            raise

    def forward(
        self, data: Data, loss_fn: str = "cross_entropy", loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute loss and metrics as ``forward_backward`` does, without a gradient.

        The outputs hold the targets' log-probs: locally of those that count in the loss, and for
        ``cross_entropy`` of all. ``data`` may also be the trainer's own rows
        (``agentrl_trainer.data.training_row.TrainingRow``), here and in ``forward_backward``.
        """
        return self._loss(LossCall(data, loss_fn, loss_fn_config, backward=False))

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
        return self._loss(LossCall(data, loss_fn, loss_fn_config, normalize_by, logprobs))

    forward_backward_async = submitted(forward_backward)

    def _loss(self, call: LossCall) -> APIFuture[ForwardBackwardOutput]:
        parse_loss_options(call.loss_fn, call.config or {})
        by = call.normalize_by
        if by is not None and not by > 0:
            raise ValueError(f"normalize_by must be above 0, or None; not {by}")
        # The log-probs alone may be those of a custom loss, whose data hold any inputs.
        alone = not call.backward and call.loss_fn == "cross_entropy"
        rows = self._rows(call.data, None if alone else call.loss_fn)

        def work() -> ForwardBackwardOutput:
            found = [[0.0] * len(row.tokens) for row in rows] if call.logprobs else None
            stats = self._base.learner.forward_backward(
                rows, call.loss_fn, call.config, by, found, backward=call.backward
            )
            metrics = metrics_of(stats, call.loss_fn)
            return ForwardBackwardOutput(outputs(found or []), metrics, stats)

        return self._accumulate(work) if call.backward else self._run(work)

    def forward_backward_custom(
        self, data: Sequence[D], loss_fn: CustomLoss[D], **tinker: Any
    ) -> APIFuture[ForwardBackwardOutput]:
        """Run ``forward_backward`` with a function ``(data, logprobs) -> (loss, metrics)``.

        ``logprobs`` are torch tensors [T], one for each datum or training row. The function runs on
        the training thread, in its turn; it must not wait for another operation of that thread.
        """
        check_tinker_only("forward_backward_custom", tinker)
        if not callable(loss_fn):
            raise ValueError(f"loss_fn must be a function of (data, logprobs), not {loss_fn!r}")
        rows = self._rows(cast(Data, data), None)
        found: list[list[float]] = []

        def of_targets(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            found.extend(row.tolist() for row in logprobs)
            return loss_fn(data, [row[1:] for row in logprobs])

        def work() -> ForwardBackwardOutput:
            stats, metrics = self._base.learner.forward_backward_custom(rows, of_targets)
            known = metrics_of(stats, "cross_entropy")
            return ForwardBackwardOutput(outputs(found), {**known, **metrics}, stats)

        return self._accumulate(work)

    forward_backward_custom_async = submitted(forward_backward_custom)

    def _rows(self, data: Data, loss_fn: str | None) -> list[TrainingRow]:
        context = self._base.training.context_length
        return to_rows(data, self._name, loss_fn, self._vocabulary, context)

    def _accumulate(self, work: Callable[[], T]) -> APIFuture[T]:
        def guarded() -> T:
            try:
                return work()
            except BaseException as error:
                self._failed = error
                raise

        return self._run(guarded)

    def spoil_step(self, error: Exception) -> None:
        """Have the next ``optim_step`` refuse, as after a ``forward_backward`` that failed."""

        def fail() -> None:
            raise error

        self._accumulate(fail)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> APIFuture[list[TrainingRow]]:
        """Add to the rows what depends on the policy before the update: log-probs of references,
        values, GAE's advantages.

        Raises:
            RefusedRows: the backend cannot learn from these rows.
        """
        return self._run(lambda: prepare(self._base.learner, rows, settings))

    def finite_rows(
        self, rows: Sequence[TrainingRow], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[list[int]]:
        """Find the training rows whose own loss and gradient are finite, after a step that was
        not. Gradients that no ``optim_step`` has applied are dropped."""
        own = self._rows(rows, loss_fn)
        return self._run(lambda: self._base.learner.finite_rows(own, loss_fn, loss_fn_config))

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the accumulated gradients with AdamW and clear them.

        If a gradient is not finite nothing changes and ``skipped_non_finite`` is 1.
        ``adam_params`` is the older name of ``optim_params``; without either: ``AdamParams()``.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, which is its older name, not both")
        return self._step(optim_params or adam_params or AdamParams())

    optim_step_async = submitted(optim_step)

    def _step(self, adam: AdamParams) -> APIFuture[OptimStepResponse]:
        # Any object with the fields of AdamParams will do, such as the SDK's.
        values: dict[str, Any] = {f.name: getattr(adam, f.name, None) for f in fields(AdamParams)}
        for name, value in values.items():
            if value is None or not 0 <= value < (1 if name.startswith("beta") else math.inf):
                raise ValueError(
                    f"optim_params: AdamW needs a finite {name} from 0 (betas below 1), "
                    f"not {value!r}"
                )

        def work() -> OptimStepResponse:
            learner = self._base.learner
            failed, self._failed = self._failed, None
            if failed is not None:
                learner.discard_gradients([self._name])
                raise RuntimeError(
                    "nothing was updated: a forward_backward before this step failed, so its "
                    f"gradients are incomplete ({failed})"
                ) from failed
            stats = learner.optim_step(AdamParams(**values), [self._name])
            skipped = float(stats.skipped_non_finite)
            return OptimStepResponse({"grad_norm": stats.grad_norm, "skipped_non_finite": skipped})

        return self._run(work)

    def save_state(
        self, name: str, *, overwrite: bool = False, **tinker: Any
    ) -> APIFuture[SavedPath]:
        """Save weights and optimizer atomically, to continue from."""
        check_tinker_only("save_state", tinker)
        target = self._target(STATES, name, overwrite)
        meta = {
            "base_model": self._base.name,
            "adapter": self._name,
            "lora": asdict(self._options),
            "user_metadata": dict(tinker.get("user_metadata") or {}),
        }

        def work() -> SavedPath:
            state = self._base.learner.state_dict([self._name])
            save_checkpoint(target, 0, tensors=state, meta=meta, keep=1)
            return SavedPath(str(target))

        return self._run(work)

    save_state_async = submitted(save_state)

    def load_state(self, path: Folder, **tinker: Any) -> APIFuture[None]:
        """Load weights that ``save_state`` wrote, with a new optimizer."""
        return self._load(path, False, tinker)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(self, path: Folder, **tinker: Any) -> APIFuture[None]:
        """Load weights and optimizer that ``save_state`` wrote, bit for bit."""
        return self._load(path, True, tinker)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def _load(self, path: Folder, optimizer: bool, more: Mapping[str, Any]) -> APIFuture[None]:
        check_tinker_only("load_state_with_optimizer", more)  # both have the same

        def work() -> None:
            ours = tensors_of(read_state(path), self._name, optimizer=optimizer)
            self._base.learner.load_state_dict(ours, [self._name])
            self._failed = None

        return self._run(work)

    def save_weights_for_sampler(self, name: str | Path, **tinker: Any) -> APIFuture[SavedPath]:
        """Save the weights to sample with: locally a PEFT folder, which vLLM serves as well.

        A ``Path`` in place of a name is the folder. Over Tinker its last part is the name, and
        ``tinker.json`` in the folder tells where the weights are.
        """
        check_tinker_only("save_weights_for_sampler", tinker)
        target = name if isinstance(name, Path) else self._target(SAMPLERS, name, overwrite=True)

        def work() -> SavedPath:
            self._base.learner.save(self._name, target)
            return SavedPath(str(target))

        return self._run(work)

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def _target(self, kind: str, name: str, overwrite: bool) -> Path:
        target = self.folder / kind / check_name(name, "name")
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} exists: take another name, or overwrite=True")
        return target

    def save_weights_and_get_sampling_client(self, **tinker: Any) -> SamplingClient:
        """Sample with the weights as they are after the operations called so far.

        The weights last as long as the client; nothing stays on disk.
        """
        check_tinker_only("save_weights_and_get_sampling_client", tinker)

        def work() -> str:
            with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
                self._base.learner.save(self._name, Path(folder) / "adapter")
                return self._base.serve(Path(folder) / "adapter")

        return SamplingClient(self._base, self._run(work))

    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client)

    def create_sampling_client(self, model_path: Folder, **tinker: Any) -> SamplingClient:
        """Sample with saved weights, as ``ServiceClient.create_sampling_client`` does."""
        return self._service.create_sampling_client(model_path, **tinker)

    create_sampling_client_async = awaited(create_sampling_client, on_thread=True)

    def log(
        self, metrics: Mapping[str, float] | None = None, step: int | None = None, **named: float
    ) -> None:
        """Append metrics to ``history``, and as a line to ``metrics.jsonl`` in ``folder``."""
        row: dict[str, float] = {} if step is None else {"step": step}
        for name, value in {**(metrics or {}), **named}.items():
            try:
                row[name] = value if isinstance(value, int) else float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"log: {name} must be a number, not {value!r}") from error
        self.history.append(row)
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def local(self, work: Callable[[Learner], T]) -> APIFuture[T]:
        """Run any function of the learner in its turn; local backend only."""
        return self._run(lambda: work(self._base.learner))

    @property
    def model_id(self) -> str:
        return self._info.model_id

    def get_info(self) -> ModelInfo:
        return self._info

    get_info_async = submitted(get_info)

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer of the model."""
        return self._base.training.tokenizer

    def close(self) -> APIFuture[None]:
        """Forget the adapter and free its name, after the operations called so far.

        What was saved stays. On Tinker adapters end with their session.
        """

        def work() -> None:
            if not self._closed:
                self._base.learner.remove_adapter(self._name)
                self._closed = True
                self._service.names.discard(self._name)

        return self._run(work)
