"""Train LoRA adapters over one frozen base model: gradients of a loss, and optimizer steps.

Knows torch, peft and rows. Does not know rollouts, rewards, or where samples come from. The
interface is Tinker's: ``forward_backward`` accumulates, ``optim_step`` updates; the caller decides
what a step is. Several adapters may live on the base, each with its own AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from agentrl_trainer.data.packing import MicroBatch, count_tokens
from agentrl_trainer.data.training_row import LOSS_EXTRA, TrainingRow
from agentrl_trainer.learner.loss_options import (
    AdamParams,
    LossConfig,
    ValueParams,
    parse_loss_options,
)
from agentrl_trainer.learner.losses import LOSSES, CustomLoss, Sums, add_sums
from agentrl_trainer.learner.optimizers import VALUE, AdapterOptimizers
from agentrl_trainer.learner.policies import AdapterPolicies, scatter
from agentrl_trainer.learner.step_stats import OptimStats, StepStats, step_stats
from agentrl_trainer.learner.value_head import value_loss
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.lora import lora_config, save_adapter

_Forward = Callable[[MicroBatch], tuple[Tensor, Tensor | None]]


class Learner(AdapterPolicies):
    """LoRA adapters in training over one frozen base.

    ``adapters`` are drawn from ``seed`` and their position, with B at zero: they start as the base
    model. The base model is put under PEFT in place; use it for nothing else afterwards. ``value``:
    each adapter gets a value function, which learns from rows with ``returns``.

    Raises:
        ValueError: adapter names repeat, or the model shows no hidden states to a value function.
    """

    def __init__(
        self,
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
        value: ValueParams | None = None,
    ) -> None:
        if not adapters or len(set(adapters)) < len(adapters):
            raise ValueError(f"adapters must be distinct names, at least one: {list(adapters)}")
        super().__init__(
            base,
            [
                (name, lora_config(rank, alpha, targets), seed + i)
                for i, name in enumerate(adapters)
            ],
            token_budget=token_budget,
            gradient_checkpointing=gradient_checkpointing,
            value=value,
        )
        self._optimizers = AdapterOptimizers(adam or AdamParams(), value.lr if value else 0.0)
        for name in adapters:
            self._optimize(name)
        self.activate(adapters[0])

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters in training."""
        return self._optimizers.adapters

    def add_adapter(
        self,
        name: str,
        *,
        rank: int = 32,
        alpha: float = 32.0,
        targets: str | list[str] = "all-linear",
        seed: int = 0,
    ) -> None:
        """Train one more adapter beside the others; its rank and targets are its own."""
        active = self.model.active_adapter
        # Evaluation mode is not set again: checkpointed layers would leave their training mode.
        self.attach(name, lora_config(rank, alpha, targets), seed)
        self.activate(cast(str, active) if active in self.adapters else name)
        self._optimize(name)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter: weights, optimizer, value function and accumulated gradients.

        The last one may be removed too; until another is added, nothing can be learned.

        Raises:
            ValueError: there is no such adapter.
        """
        self._optimizers.remove(name)
        if self.adapters:
            self.activate(self.adapters[0])
        self.detach(name)

    def _optimize(self, name: str) -> None:
        self._optimizers.add(name, _adapter_parameters(self.model, name))
        if name in self.value_heads:
            self._optimizers.add(VALUE + name, dict(self.value_heads[name].named_parameters()))

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
        """Add the gradient of ``loss_sum / normalize_by``; without ``backward``, only compute it.

        ``normalize_by`` None: the number of trained tokens in ``rows``, which is right if these
        are the whole optimizer step. After a loss that is not finite, the rest of ``rows`` is left
        out (stats cover what came before), and ``optim_step`` refuses to step.

        ``logprobs_into``: lists as long as each row's tokens, to be filled as by ``forward``.

        Raises:
            ValueError: the loss, an option or an adapter is unknown, or a column is missing.
        """
        config = loss_config or {}
        options = parse_loss_options(loss, config)
        if options.kl.kl_coef and any("reference" not in row.extra for row in rows):
            raise ValueError("kl_coef needs reference log-probs: see Learner.with_reference")
        if unknown := {row.adapter for row in rows} - set(self.adapters):
            raise ValueError(f"rows for {sorted(unknown)}, but this trains {self.adapters}")
        scale = 1.0 / (normalize_by or max(sum(row.trained for row in rows), 1))
        with torch.set_grad_enabled(backward):
            return self._accumulate(
                rows, loss, config, scale, self.forward_batch, logprobs_into, backward=backward
            )

    def _accumulate(
        self,
        rows: Sequence[TrainingRow],
        loss: str,
        config: LossConfig,
        scale: float,
        forward: _Forward,
        logprobs_into: list[list[float]] | None,
        *,
        backward: bool,
    ) -> StepStats:
        started = time.perf_counter()
        sums: Sums = {}
        loss_sum = 0.0
        batches = self.pack(rows)
        counts = count_tokens(rows, batches)
        non_finite = self._optimizers.non_finite
        for batch in batches:
            batch = batch.to(self.base.device)
            logprobs, hidden = forward(batch)
            if logprobs_into is not None:
                scatter(batch, logprobs.detach(), logprobs_into)
            value, part = LOSSES[loss](
                logprobs,
                batch.logprobs,
                batch.advantages,
                torch.ones_like(batch.targets, dtype=torch.bool),
                config,
                sequences=batch.rows,
                **_columns(rows, batch, LOSS_EXTRA),
            )
            if hidden is not None and self.value is not None:
                learn = _columns(rows, batch, ("returns", "values", "weights"))
                if "returns" in learn:
                    predicted = self.value_heads[batch.adapter](hidden)
                    more, more_sums = value_loss(predicted, params=self.value, **learn)
                    value, part = value + more, part | more_sums
            sums = add_sums(sums, part)
            loss_sum += value.item()
            if not backward:
                continue
            if not bool(torch.isfinite(value)):
                non_finite.add(batch.adapter)
                break
            (value * scale).backward()
        skipped = backward and bool(non_finite)
        return step_stats(loss_sum * scale, sums, counts, started, non_finite=skipped)

    def forward_backward_custom(
        self, rows: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
    ) -> tuple[StepStats, dict[str, float]]:
        """Add the gradient of any function of the log-probs; return its own metrics too.

        As in Tinker: a forward pass, the function's gradient with respect to the log-probs, then
        the backward of the cross-entropy that has that gradient. With a single micro-batch it goes
        through the first pass; with more, whose activations would all be held at once, it takes a
        second forward pass. The loss is taken as it is, without a division.
        """
        started = time.perf_counter()
        batches = self.pack(rows)
        found = [[0.0] * len(row.tokens) for row in rows]
        forward = self.forward_batch
        if len(batches) == 1:
            # Packing does not depend on advantages: the second time it makes the same batch.
            kept = self.forward_batch(batches[0].to(self.base.device))
            forward = lambda _: kept  # noqa: E731
            scatter(batches[0], kept[0].detach(), found)
        else:
            found = self.forward(rows)
        logprobs = [torch.tensor(row, requires_grad=True) for row in found]
        loss, metrics = function(rows, logprobs)
        if loss.dim() != 0 or not loss.requires_grad:
            raise ValueError("a custom loss must return a scalar that depends on the log-probs")
        grads = torch.autograd.grad(loss, logprobs, allow_unused=True)
        weighted = [
            replace(
                row,
                advantages=[0.0] * len(row.tokens) if grad is None else (-grad).tolist(),
                # Other columns would change the plain cross-entropy of this policy.
                extra={k: v for k, v in row.extra.items() if k == "temperature"},
            )
            for row, grad in zip(rows, grads, strict=True)
        ]
        stats = self._accumulate(weighted, "cross_entropy", {}, 1.0, forward, None, backward=True)
        seconds = time.perf_counter() - started
        return replace(stats, loss=loss.item(), seconds=seconds), dict(metrics)

    def optim_step(
        self, adam: AdamParams | None = None, adapters: Collection[str] | None = None
    ) -> OptimStats:
        """Apply the accumulated gradients: see ``AdapterOptimizers.step``."""
        return self._optimizers.step(adam, adapters)

    def discard_gradients(self, adapters: Collection[str] | None = None) -> None:
        """Forget accumulated gradients of ``adapters``; None: of all."""
        self._optimizers.discard(adapters)

    def step(
        self,
        rows: Sequence[TrainingRow],
        loss: str = "importance_sampling",
        loss_config: LossConfig | None = None,
        adam: AdamParams | None = None,
    ) -> StepStats:
        """Make one whole optimizer step on these rows."""
        stats = self.forward_backward(rows, loss, loss_config)
        optim = self.optim_step(adam)
        return replace(
            stats,
            grad_norm=optim.grad_norm,
            skipped_non_finite=optim.skipped_non_finite,
            seconds=stats.seconds + optim.seconds,
        )

    # ---- saving

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write a standard PEFT folder."""
        save_adapter(self.model, name, folder)

    def state_dict(self, adapters: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copy weights and optimizer state: see ``AdapterOptimizers.state_dict``."""
        return self._optimizers.state_dict(adapters)

    def load_state_dict(
        self, state: Mapping[str, Tensor], adapters: Collection[str] | None = None
    ) -> None:
        """Restore ``state_dict``: see ``AdapterOptimizers.load_state_dict``."""
        self._optimizers.load_state_dict(state, adapters)


def _adapter_parameters(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Find the adapter's trainable tensors, by names that do not contain the adapter's."""
    found: dict[str, nn.Parameter] = {}
    for key, parameter in model.named_parameters():
        # ...q_proj.lora_A.<adapter>.weight, or ...lora_embedding_A.<adapter>
        before, _, after = key.rpartition("lora_")
        kind, owner, *rest = [*after.split("."), ""]
        if before and owner == adapter:
            found[before + ".".join([f"lora_{kind}", *filter(None, rest)])] = parameter
    return found


def _columns(
    rows: Sequence[TrainingRow], batch: MicroBatch, names: Iterable[str]
) -> dict[str, Tensor]:
    """Collect {name: [N]} of those ``names`` that the batch's rows have."""
    own = [rows[index] for index in batch.indices]
    found: dict[str, Tensor] = {}
    for name in names:
        having = [name in row.extra for row in own]
        if not any(having):
            continue
        if not all(having):
            raise ValueError(f"some rows have {name!r} and some have not: give it to all or none")
        places = zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)
        values = [own[row].extra[name][column + 1] for row, column in places]
        found[name] = torch.tensor(values, dtype=torch.float32, device=batch.targets.device)
    return found
