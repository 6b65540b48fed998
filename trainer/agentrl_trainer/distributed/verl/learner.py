"""A learner whose log-probs and gradients verl's workers compute.

    VerlLearner: adapters and their AdamW ── VerlWorkers: verl's controller
                                                │ Ray
                                 VerlWorker 0 .. N-1: the base model, spread by verl's engine

verl trains one adapter, and its checkpoints hold the base model, too. So adapters and optimizers
are here, in float32, as in a ``Learner``: several may train, a checkpoint is that of any run, and
when a worker dies no weight is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import ray  # pyright: ignore[reportMissingImports]
import torch
from peft import LoraConfig
from torch import Tensor
from verl.utils import tensordict_utils  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_device_name  # pyright: ignore[reportMissingImports]

from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.distributed.ranks import custom_in_two_passes
from agentrl_trainer.distributed.verl.rows import (
    VerlLoss,
    logprobs_of,
    shares,
    sums_of,
    temperatures_of,
    to_batch,
)
from agentrl_trainer.distributed.verl.workers import VerlWorkers
from agentrl_trainer.learner.learner import default_token_budget
from agentrl_trainer.learner.loss_options import AdamParams, LossConfig, parse_loss_options
from agentrl_trainer.learner.losses import CustomLoss
from agentrl_trainer.learner.optimizers import AdapterOptimizers
from agentrl_trainer.learner.prepare_batch import finite_rows
from agentrl_trainer.learner.step_stats import StepStats, merged, step_stats
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.lora import (
    adapter_parameters,
    attach_adapter,
    attach_saved_adapter,
    lora_config,
    save_adapter,
)
from agentrl_trainer.models.sources import ModelError

_SHAPE = (
    "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"
)  # fmt: skip


class VerlLearner(AdapterOptimizers):
    """Adapters in training, which verl's workers compute with; see ``Learner``, whose methods and
    options these are.

    Raises:
        ValueError: ``value`` or ``score``, which verl's workers do not have.
        RankError: by a call during which a worker failed; the next call starts other workers. Of
            a ``forward_backward`` that failed, the gradients are incomplete.
    """

    why_not_shared = "verl computes each row by itself"

    def __init__(
        self,
        workers: VerlWorkers,
        base: BaseModel,
        *,
        adapters: Sequence[str] = ("default",),
        rank: int = 32,
        alpha: float = 32.0,
        targets: str | list[str] = "all-linear",
        adam: AdamParams | None = None,
        seed: int = 0,
        token_budget: int | None = None,
        gradient_checkpointing: bool = False,
        value: Any = None,
        score: bool = False,
    ) -> None:
        super().__init__(adam or AdamParams(), 0.0)
        if value or score:
            raise ValueError("verl's workers have no value functions and no reward models")
        self.base = base
        self._workers, self._checkpointing = workers, gradient_checkpointing
        self._token_budget = token_budget or default_token_budget(get_device_name())
        self.model = attach_adapter(base, adapters[0], lora_config(rank, alpha, targets), seed)
        self._lora = self._lora_of(adapters[0])
        if self._lora.rank_pattern or self._lora.target_parameters:
            raise ModelError(f"model: verl cannot adapt the experts of {base.name!r}.")
        self.add_parameters(adapters[0], adapter_parameters(self.model, adapters[0]))
        for i, name in enumerate(adapters[1:], start=1):
            self.add_adapter(name, rank=rank, alpha=alpha, targets=targets, seed=seed + i)
        self._there: tuple[str, int] | None = None
        """The adapter that the workers have, and the sum of its bits."""

    def add_adapter(
        self,
        name: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        targets: str | list[str] = "all-linear",
        seed: int = 0,
    ) -> None:
        attach_adapter(self.model, name, lora_config(rank, alpha, targets), seed)
        self._check_shape(name)
        self.add_parameters(name, adapter_parameters(self.model, name))

    def remove_adapter(self, name: str) -> None:
        self.remove_parameters(name)
        self.model.delete_adapter(name)

    def add_reference(self, name: str, folder: str | Path) -> None:
        attach_saved_adapter(self.model, name, folder)
        self._check_shape(name)

    def _lora_of(self, name: str) -> LoraConfig:
        return cast(LoraConfig, self.model.peft_config[name])

    def _check_shape(self, name: str) -> None:
        """The workers have room for adapters of one shape."""
        own = self._lora_of(name)
        for key in _SHAPE:
            if getattr(own, key) != (first := getattr(self._lora, key)):
                self.model.delete_adapter(name)
                raise ValueError(f"verl: all adapters need one {key}; the first one's is {first}")

    def save(self, name: str, folder: str | Path) -> None:
        save_adapter(self.model, name, folder)

    def what_is_trained(self, name: str) -> None:
        """Return None: the model is dense."""

    # ---- log-probs

    def forward(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        return self._infer(rows, [row.adapter for row in rows])

    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        raise ValueError("verl's workers have no value functions")

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        done, warm = list(rows), [i for i, t in enumerate(temperatures_of(rows)) if t != 1.0]
        given = [rows[index] for index in warm]
        ones = [[1.0] * len(row.tokens) for row in given]
        at_one = self.forward(with_extra(given, temperature=ones))
        for index, moved, before in zip(warm, self.forward(given), at_one, strict=True):
            each = zip(rows[index].logprobs, moved, before, strict=True)
            logprobs = [old + new - plain for old, new, plain in each]
            done[index] = replace(rows[index], logprobs=logprobs)
        return done

    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        return with_extra(rows, reference=self._infer(rows, [adapter] * len(rows)))

    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        return with_extra(rows, proximal=self.forward(rows))

    def _infer(
        self, rows: Sequence[TrainingRow], adapters: Sequence[str | None]
    ) -> list[list[float]]:
        """Compute each row's log-probs under an adapter, or under the base model."""
        found: list[list[float]] = [[] for _ in rows]
        for part in self._parts(rows, adapters):
            more = {"compute_loss": False, "no_lora_adapter": part.adapter is None}
            tensordict_utils.assign_non_tensor(part.batch, **more)
            self._give(part.adapter or self.adapters[0])
            part.read(self._workers.call("infer_batch", part.batch), found)
        return found

    def _parts(self, rows: Sequence[TrainingRow], adapters: Sequence[str | None]) -> list[_Part]:
        """Divide rows into what the workers can compute at once: one adapter, one temperature."""
        share = self._workers.sequence_parts
        parts: list[_Part] = []
        kinds = list(zip(adapters, temperatures_of(rows), strict=True))
        for adapter, temperature in dict.fromkeys(kinds):
            if adapter is not None and adapter not in (known := self.model.peft_config):
                raise ValueError(f"there is no adapter {adapter!r}; there are {[*known]}")
            indices = [i for i, kind in enumerate(kinds) if kind == (adapter, temperature)]
            own = [rows[index] for index in indices]
            order = shares(own, self._workers.size // share)
            batch = to_batch(own, order, temperature, self._token_budget, share)
            parts.append(_Part(adapter, own, indices, order, batch))
        return parts

    def _give(self, adapter: str) -> None:
        """Have the workers compute with an adapter as it is now; start them if there are none."""
        if not self._workers.running:
            self._workers.start(self._lora, self._checkpointing)
            self._there = None
        weights = {k: p.detach() for k, p in adapter_parameters(self.model, adapter).items()}
        bits = sum(int(one.view(torch.int32).sum()) for one in weights.values())
        if self._there != (adapter, bits):
            self._workers.call("set_adapter", ray.put(weights))  # sent once to each node
            self._there = adapter, bits

    # ---- learning

    def forward_backward(
        self,
        rows: Sequence[TrainingRow],
        loss: str = "importance_sampling",
        loss_config: LossConfig | None = None,
        normalize_by: float | None = None,
        logprobs_into: list[list[float]] | None = None,
        *,
        backward: bool = True,
    ) -> StepStats:
        parse_loss_options(loss, loss_config or {})
        if unknown := {row.adapter for row in rows} - set(self.adapters):
            raise ValueError(f"rows for {sorted(unknown)}, but this trains {self.adapters}")
        divisor = normalize_by or max(sum(row.trained for row in rows), 1)
        function = VerlLoss(loss, loss_config or {}, divisor)
        parts = self._parts(rows, [row.adapter for row in rows])
        function.check({name for row in rows for name in row.extra})
        found: list[StepStats] = []
        for part in parts:
            self._give(name := part.rows[0].adapter)
            self._workers.call("set_loss_fn", function)
            computed = self._workers.call(
                "forward_backward" if backward else "infer_batch", part.batch
            )
            metrics = tensordict_utils.get(computed, "metrics")
            if backward:
                self._accumulate(name, self._workers.call("take_gradients")[0])
                if not math.isfinite(metrics["loss"]):
                    self.non_finite.add(name)
            if logprobs_into is not None:
                part.read(computed, logprobs_into)
            refused = backward and bool(self.non_finite)
            sums, counts = sums_of(metrics), count_tokens(part.rows)
            found.append(step_stats(metrics["loss"], sums, counts, non_finite=refused))
        return merged(found)

    def _accumulate(self, adapter: str, gradients: dict[str, Tensor]) -> None:
        for key, parameter in self.parameters[adapter].items():
            if key in gradients:
                before = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = gradients[key] + before

    def finite_rows(
        self, rows: Sequence[TrainingRow], loss: str, loss_config: LossConfig | None = None
    ) -> list[int]:
        return finite_rows(self, rows, loss, loss_config)

    def forward_backward_custom(
        self, rows: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
    ) -> tuple[StepStats, dict[str, float]]:
        return custom_in_two_passes(self, rows, function)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that the workers compute at once, and verl's batch of them."""

    adapter: str | None
    rows: list[TrainingRow]
    indices: list[int]  # of these rows, among all
    order: list[int | None]  # of the batch
    batch: Any

    def read(self, computed: Any, into: list[list[float]]) -> None:
        """Write each row's log-probs to its place among all rows."""
        found = logprobs_of(self.rows, self.order, computed)
        for index, logprobs in zip(self.indices, found, strict=True):
            into[index][:] = logprobs


class VerlTrainers(VerlWorkers):
    """verl's workers, as a client's base model starts them."""

    def learner(self, base: BaseModel, options: Mapping[str, Any]) -> VerlLearner:
        """Make the learner that calls the workers."""
        return VerlLearner(self, base, **options)
