"""One adapter in training: every operation runs in its turn on the base's training thread.

Knows the learner, training rows, and where states and PEFT folders are written.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from agentrl_trainer.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from agentrl_trainer.client.futures import wait
from agentrl_trainer.client.local.base import LocalBase
from agentrl_trainer.client.local.sampling import LocalSampling
from agentrl_trainer.client.naming import SAMPLERS, STATES, check_name
from agentrl_trainer.client.rows import check_loss, metrics_of, outputs, to_rows
from agentrl_trainer.client.types import (
    AdamParams,
    Data,
    Datum,
    ForwardBackwardOutput,
    LoraOptions,
    ModelData,
    ModelInfo,
    OptimStepResponse,
    Options,
    SavedPath,
)
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import LossConfig
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.prepare_batch import UpdateSettings, prepare
from agentrl_trainer.models.lora import save_adapter

T = TypeVar("T")


class LocalTraining:
    """``forget`` is called with the name when the client is closed."""

    is_local = True

    def __init__(
        self,
        base: LocalBase,
        name: str,
        folder: Path,
        options: LoraOptions,
        forget: Callable[[str], None],
    ) -> None:
        self.base = base
        self.name = name
        self.folder = folder
        self._options = options
        self._forget = forget
        self._updates = 0
        self._closed = False
        self._failed: BaseException | None = None  # why this step's gradients are incomplete
        model = base.training
        config = model.model.config
        self._vocabulary = int(model.model.get_input_embeddings().weight.shape[0])  # type: ignore
        self.info = ModelInfo(
            model_id=name,
            model_data=ModelData(str(config.model_type), base.name, base.name),
            model_name=base.name,
            lora_rank=options.rank,
        )
        lora = {
            "rank": options.rank,
            "alpha": options.alpha,
            "targets": _targets(base.adaptable, options),
            "seed": secrets.randbelow(2**31) if options.seed is None else options.seed,
        }
        added = base.run(lambda: base.add_adapter(name, **lora))
        try:
            wait(added)
        except BaseException:
            added.cancel()
            raise

    @property
    def learner(self) -> Learner:
        return self.base.learner

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None = 1.0,
        logprobs: bool = True,
        *,
        backward: bool = True,
    ) -> Future[ForwardBackwardOutput]:
        """``backward`` False leaves the gradients as they are."""
        check_loss(loss_fn, config)
        if normalize_by is not None and not normalize_by > 0:
            raise ValueError(f"normalize_by must be above 0, or None; not {normalize_by}")
        # The log-probs alone may be those of a custom loss, whose data hold any inputs.
        alone = not backward and loss_fn == "cross_entropy"
        rows = self._rows(data, None if alone else loss_fn)

        def work() -> ForwardBackwardOutput:
            found = [[0.0] * len(row.tokens) for row in rows] if logprobs else None
            stats = self.learner.forward_backward(
                rows, loss_fn, config, normalize_by, found, backward=backward
            )
            return ForwardBackwardOutput(outputs(found or []), metrics_of(stats, loss_fn), stats)

        return self._accumulate(work) if backward else self.base.run(work)

    def forward_backward_custom(
        self, data: Sequence[Datum], function: CustomLoss[Datum], tinker: Options
    ) -> Future[ForwardBackwardOutput]:
        rows = self._rows(data, None)
        found: list[list[float]] = []

        def of_targets(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            found.extend(row.tolist() for row in logprobs)
            return function(data, [row[1:] for row in logprobs])

        def work() -> ForwardBackwardOutput:
            stats, metrics = self.learner.forward_backward_custom(rows, of_targets)
            known = metrics_of(stats, "cross_entropy")
            return ForwardBackwardOutput(outputs(found), {**known, **metrics}, stats)

        return self._accumulate(work)

    def _accumulate(self, work: Callable[[], T]) -> Future[T]:
        def guarded() -> T:
            try:
                return work()
            except BaseException as error:
                self._failed = error
                raise

        return self.base.run(guarded)

    def _rows(self, data: Data, loss_fn: str | None) -> list[TrainingRow]:
        context = self.base.training.context_length
        return to_rows(data, self.name, loss_fn, self._vocabulary, context)

    def prepare(
        self, rows: Sequence[TrainingRow], settings: UpdateSettings
    ) -> Future[list[TrainingRow]]:
        return self.base.run(lambda: prepare(self.learner, rows, settings))

    def optim_step(self, adam: AdamParams) -> Future[OptimStepResponse]:
        ours = check_adam(adam)

        def work() -> OptimStepResponse:
            failed, self._failed = self._failed, None
            if failed is not None:
                self.learner.discard_gradients([self.name])
                raise RuntimeError(
                    "nothing was updated: a forward_backward before this step failed, so its "
                    f"gradients are incomplete ({failed})"
                ) from failed
            stats = self.learner.optim_step(ours, [self.name])
            self._updates += not stats.skipped_non_finite
            skipped = float(stats.skipped_non_finite)
            return OptimStepResponse({"grad_norm": stats.grad_norm, "skipped_non_finite": skipped})

        return self.base.run(work)

    def local(self, work: Callable[[Learner], T]) -> Future[T]:
        return self.base.run(lambda: work(self.learner))

    def save_state(self, name: str, overwrite: bool, tinker: Options) -> Future[SavedPath]:
        target = self._target(STATES, name, overwrite)

        def work() -> SavedPath:
            meta = {
                "base_model": self.base.name,
                "adapter": self.name,
                "lora": asdict(self._options),
                "user_metadata": dict(tinker.get("user_metadata", {})),
            }
            state = self.learner.state_dict([self.name])
            save_checkpoint(target, self._updates, tensors=state, meta=meta, keep=1)
            return SavedPath(str(target))

        return self.base.run(work)

    def load_state(self, path: str, optimizer: bool, tinker: Options) -> Future[None]:
        def work() -> None:
            found = read_state(path)
            ours = _renamed(found.tensors, found.meta["adapter"], self.name)
            if not optimizer:
                ours = {key: value for key, value in ours.items() if key.startswith("weights/")}
            self.learner.load_state_dict(ours, [self.name])
            self._updates = found.step if optimizer else 0
            self._failed = None

        return self.base.run(work)

    def save_weights_for_sampler(self, name: str | Path, tinker: Options) -> Future[SavedPath]:
        target = name if isinstance(name, Path) else self._target(SAMPLERS, name, overwrite=True)

        def work() -> SavedPath:
            save_adapter(self.learner.model, self.name, target)
            return SavedPath(str(target))

        return self.base.run(work)

    def _target(self, kind: str, name: str, overwrite: bool) -> Path:
        check_name(name)
        target = self.folder / kind / name
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} exists: take another name, or overwrite=True")
        return target

    def sampler(self, tinker: Options) -> LocalSampling:
        def work() -> str:
            with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
                save_adapter(self.learner.model, self.name, Path(folder) / "adapter")
                return self.base.serve(Path(folder) / "adapter")

        return LocalSampling(self.base, self.base.run(work))

    def tokenizer(self) -> Any:
        return self.base.training.tokenizer

    def close(self) -> Future[None]:
        def work() -> None:
            if not self._closed:
                self.learner.remove_adapter(self.name)
                self._closed = True
                self._forget(self.name)

        return self.base.run(work)


def read_state(path: str) -> Checkpoint:
    """Read what ``save_state`` wrote; ValueError if there is no whole state at ``path``."""
    latest = latest_checkpoint(path)
    if latest.checkpoint is None:
        why = "; ".join(f"{folder.name}: {fault}" for folder, fault in latest.torn.items())
        raise ValueError(
            f"path: {path} holds no whole state{f' ({why})' if why else ''}; give what save_state "
            "returned"
        )
    return latest.checkpoint


def _renamed(state: Mapping[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """Rename the owner in the keys ``kind/owner/key``; an owner is an adapter, or its value
    function ``value.<adapter>``."""
    found: dict[str, Tensor] = {}
    for whole, tensor in state.items():
        kind, owner, key = whole.split("/", 2)
        part, dot, adapter = owner.rpartition(".")  # an adapter's name has no dot
        if adapter == before:
            found[f"{kind}/{part}{dot}{after}/{key}"] = tensor
    return found


def check_adam(adam: AdamParams) -> AdamParams:
    """Return AdamW's parameters; ValueError for a value that AdamW cannot take.

    Accepts any object with the fields of ``AdamParams``, such as the SDK's.
    """
    values: dict[str, Any] = {f.name: getattr(adam, f.name, None) for f in fields(AdamParams)}
    for name, value in values.items():
        if value is None or not 0 <= value < (1 if name.startswith("beta") else float("inf")):
            raise ValueError(
                f"optim_params: AdamW needs a finite {name} from 0 (betas below 1), not {value!r}"
            )
    return AdamParams(**values)


def _targets(paths: Sequence[str], options: LoraOptions) -> str | list[str]:
    """Return PEFT's target_modules."""
    if options.targets is not None:
        return options.targets
    if options.train_mlp and options.train_attn:
        return "all-linear"
    if not (options.train_mlp or options.train_attn):
        raise ValueError("train_mlp and train_attn are both False: nothing would be trained")
    wanted = "mlp" if options.train_mlp else "attn"
    split = [path.rpartition(".") for path in paths]
    found = sorted({leaf for owner, _, leaf in split if wanted in owner})
    if not found:
        raise ValueError(
            f"the model has no linear layers under a name with {wanted!r}: set targets"
        )
    return found
