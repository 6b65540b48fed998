"""Train LoRA adapters over one frozen base model: gradients of a loss, and optimizer steps.

Knows torch, peft and rows. Does not know rollouts, rewards, or where samples come from. The
interface is Tinker's: ``forward_backward`` accumulates, ``optim_step`` updates; the caller decides
what a step is. Several adapters may live on the base, each with its own AdamW; one of them is
active at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig
from torch import Tensor

from agentrl_trainer.data.packing import MicroBatch, count_tokens, pack
from agentrl_trainer.data.training_row import LOSS_EXTRA, TrainingRow, with_extra
from agentrl_trainer.learner.logprobs import TokenLogprobs, columns_of, gather, scatter
from agentrl_trainer.learner.loss_options import (
    AdamParams,
    LossConfig,
    ValueParams,
    parse_loss_options,
)
from agentrl_trainer.learner.losses import (
    LOSSES,
    CustomLoss,
    Sums,
    add_sums,
    custom_slopes,
    token_sums,
)
from agentrl_trainer.learner.optimizers import VALUE, AdapterOptimizers
from agentrl_trainer.learner.prepare_batch import finite_rows
from agentrl_trainer.learner.reward_head import RewardHead
from agentrl_trainer.learner.stems import OpenStems
from agentrl_trainer.learner.step_stats import StepStats, step_stats
from agentrl_trainer.learner.value_head import ValueHead, value_loss
from agentrl_trainer.models.devices import return_large_tensors
from agentrl_trainer.models.loading import (
    BaseModel,
    checkpoint_layers,
    evaluation_mode,
    layers_recomputed,
)
from agentrl_trainer.models.lora import (
    adapter_parameters,
    attach_adapter,
    attach_saved_adapter,
    lora_config,
    save_adapter,
)
from agentrl_trainer.models.lora_targets import what_is_trained

TOKENS_PER_THREAD = 512
"""More in a micro-batch do not speed up a CPU, but cost memory for their activations."""


class Learner(AdapterOptimizers):
    """LoRA adapters in training over one frozen base.

    ``adapters`` are drawn from ``seed`` and their position, with B at zero: they start as the base
    model. The base model is put under PEFT in place; use it for nothing else afterwards. ``value``:
    each adapter gets a value function, which learns from rows with ``returns``. ``score``: adapters
    become reward models. Each has a head that trains with it, and scores stand where log-probs
    would (``forward``, ``forward_backward_custom``): see ``reward_head.score_row``.

    Raises:
        ValueError: adapter names repeat, or the model shows no hidden states to a head.
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
        score: bool = False,
    ) -> None:
        super().__init__(adam or AdamParams(), value.lr if value else 0.0)
        self.base = base
        # A CPU is fastest with activations that stay in its caches; a CUDA GPU must be filled.
        self.token_budget = token_budget or default_token_budget(base.device.type)
        return_large_tensors(base.device, self.token_budget)
        self.value = value
        self.value_heads: dict[str, ValueHead] = {}
        self.score = score
        self.reward_heads: dict[str, RewardHead] = {}
        self.model = attach_adapter(base, adapters[0], lora_config(rank, alpha, targets), seed)
        # Dropout would make the trainer's policy differ from the sampler's.
        evaluation_mode(self.model)
        self._logprobs = TokenLogprobs(base.model)
        if (value or score) and (why := self._logprobs.why_all_logits):
            what = "reward model" if score else "value function"
            raise ValueError(f"a {what} needs the model's hidden states, but {why}")
        self._train(adapters[0], seed)
        for i, name in enumerate(adapters[1:], start=1):
            self.add_adapter(name, rank=rank, alpha=alpha, targets=targets, seed=seed + i)
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            checkpoint_layers(base.model)

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
        attach_adapter(self.model, name, lora_config(rank, alpha, targets), seed)
        self._activate(cast(str, active) if active in self.adapters else name)
        self._train(name, seed)

    def _train(self, name: str, seed: int) -> None:
        """Give an attached adapter its heads, if there are any, and its optimizer."""
        parameters = adapter_parameters(self.model, name)
        if self.score:
            head = self.reward_heads[name] = RewardHead(self._width).to(self.base.device)
            parameters |= dict(head.named_parameters())
        self.add_parameters(name, parameters)
        if self.value is not None:
            head = self.value_heads[name] = ValueHead(self._width, seed=seed).to(self.base.device)
            self.add_parameters(VALUE + name, dict(head.named_parameters()))

    @property
    def _width(self) -> int:
        return self.base.model.config.get_text_config().hidden_size

    def save(self, name: str, folder: str | Path) -> None:
        """Write an adapter, with its reward head if it has one, as a PEFT folder."""
        head = self.reward_heads[name].score.weight if self.score else None
        save_adapter(self.model, name, folder, head)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter: weights, optimizer, value function and accumulated gradients.

        The last one may be removed too; until another is added, nothing can be learned.

        Raises:
            ValueError: there is no such adapter.
        """
        self.remove_parameters(name)
        self.value_heads.pop(name, None)
        self.reward_heads.pop(name, None)
        if self.adapters:
            self._activate(self.adapters[0])
        self.model.delete_adapter(name)

    def add_reference(self, name: str, folder: str | Path) -> None:
        """Attach a saved adapter that does not train; its rank may differ."""
        attach_saved_adapter(self.model, name, folder)
        self.model.set_adapter(cast(str, self.model.active_adapter))

    def what_is_trained(self, name: str) -> str | None:
        """Describe how an adapter covers a mixture of experts; None if the model is dense."""
        return what_is_trained(self.base.model, cast(LoraConfig, self.model.peft_config[name]))

    @property
    def why_not_shared(self) -> str | None:
        """What about the model forbids computing shared prefixes once; None if they are."""
        return self._logprobs.why_padded

    # ---- log-probs and values

    def forward(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """Compute the log-prob of each trained token, aligned with ``tokens``; 0 elsewhere."""
        return self._compute(rows, lambda batch: self._forward_batch(batch)[0])

    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """Predict the value before each trained token, aligned as in ``forward``."""
        if self.value is None:
            raise ValueError("this learner has no value function: give it ValueParams")
        hidden = self._logprobs.hidden
        return self._compute(rows, lambda b: self.value_heads[b.adapter](hidden(b).float()))

    @torch.no_grad()
    def _compute(
        self, rows: Sequence[TrainingRow], function: Callable[[MicroBatch], Tensor]
    ) -> list[list[float]]:
        """Collect the [N] values of each micro-batch, aligned with the rows' tokens."""
        result = [[0.0] * len(row.tokens) for row in rows]
        for batch in self._ready(self._stems(self._pack(rows), backward=False)):
            values = function(batch)
            if len(batch.indices) == 1 or bool(values.isfinite().all()):
                scatter(batch, values, result)
                continue
            for index in batch.indices:  # NaN spreads from row to row in the attention of a trie
                [result[index]] = self._compute([rows[index]], function)
        return result

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Move the sampler's log-probs to the temperature that each token was sampled at.

        Log-probs are recorded of the policy at temperature 1. The policy that trains is the one
        that sampled: at temperature T, with the log-probs of logits / T (as in verl and TRL). For a
        token of the current policy, that is what the trainer computes; for an older token, the
        distance log p - log q at temperature 1 is kept. So the gradient is exact on policy, and
        importance weights of older tokens are right to first order.
        """
        warm = [index for index, row in enumerate(rows) if "temperature" in row.extra]
        done, given = list(rows), [rows[index] for index in warm]
        added = self._compute(given, self._logprobs.of_temperature)
        for index, row, moves in zip(warm, given, added, strict=True):
            moved = [logprob + move for logprob, move in zip(row.logprobs, moves, strict=True)]
            done[index] = replace(row, logprobs=moved)
        return done

    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        """Add the log-probs under the base model, or an adapter (``add_reference``), which
        ``kl_coef`` needs."""
        if adapter is None:
            with self.model.disable_adapter():
                return with_extra(rows, reference=self.forward(rows))
        if adapter not in (known := self.model.peft_config):
            raise ValueError(f"there is no adapter {adapter!r}; there are {[*known]}")
        frozen = self.forward([replace(row, adapter=adapter) for row in rows])
        return with_extra(rows, reference=frozen)

    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Add the current policy's log-probs, so that ratios are taken against it."""
        return with_extra(rows, proximal=self.forward(rows))

    def _pack(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        share = self.why_not_shared is None
        return pack(rows, token_budget=self.token_budget, enough=self._enough, share=share)

    @property
    def _enough(self) -> int | None:
        """Tokens that keep a CPU busy."""
        on_cpu = self.base.device.type == "cpu"
        return TOKENS_PER_THREAD * torch.get_num_threads() if on_cpu else None

    def _stems(self, batches: Sequence[MicroBatch], *, backward: bool) -> OpenStems:
        segment = min(self.token_budget, self._enough or 2**20)
        return OpenStems(
            batches, self._logprobs.states, self._activate, self.base.device,
            keep=self.token_budget, segment=segment, backward=backward,
        )  # fmt: skip

    def _ready(self, stems: OpenStems) -> Iterator[MicroBatch]:
        """Yield micro-batches on the device, their adapters active and their stems computed.

        For a backward, gradients go through the stems behind the last micro-batch of each.
        """
        for batch in stems.batches:
            before = stems.before(batch.stem)
            self._activate(batch.adapter)
            batch = batch.to(self.base.device)
            over = stems.backward and batch.input_ids.numel() > self.token_budget  # a single row
            with layers_recomputed(self.model, over and not self._checkpointing):
                yield replace(batch, trie=batch.trie and replace(batch.trie, stem=before))
            stems.recomputed += over * batch.input_ids.numel()
        stems.before(None)

    def _forward_batch(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Compute [N] float32 log-probs of the targets, or scores; with a value function, [N,
        hidden] states too, through which no gradient flows."""
        if self.score:
            return self.reward_heads[batch.adapter](self._logprobs.hidden(batch)), None
        if self.value is None:
            return self._logprobs(batch), None
        hidden = self._logprobs.hidden(batch)
        logprobs = self._logprobs.of_hidden(hidden, batch.targets, batch.temperatures)
        return logprobs, hidden.detach().float()

    def _activate(self, adapter: str) -> None:
        """Make the model compute with one adapter."""
        if self.model.active_adapter != adapter:
            # PEFT freezes the other adapters meanwhile; their accumulated gradients stay.
            self.model.set_adapter(adapter)

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
        parse_loss_options(loss, config)
        if unknown := {row.adapter for row in rows} - set(self.adapters):
            raise ValueError(f"rows for {sorted(unknown)}, but this trains {self.adapters}")
        scale = 1.0 / (normalize_by or max(sum(row.trained for row in rows), 1))
        sums: Sums = {}
        loss_sum = 0.0
        batches = self._pack(rows)
        with torch.set_grad_enabled(backward):
            for batch in self._ready(stems := self._stems(batches, backward=backward)):
                logprobs, hidden = self._forward_batch(batch)
                more = {"sequences": batch.rows, **columns_of(rows, batch, LOSS_EXTRA)}
                given = (logprobs, batch.logprobs, batch.advantages, config)
                value, part = LOSSES[loss](*given, **more)
                if hidden is not None and self.value is not None:
                    learn = columns_of(rows, batch, ("returns", "values", "weights"))
                    if "returns" in learn:
                        predicted = self.value_heads[batch.adapter](hidden)
                        more, more_sums = value_loss(predicted, params=self.value, **learn)
                        value, part = value + more, part | more_sums
                if logprobs_into is not None:
                    scatter(batch, logprobs.detach(), logprobs_into)
                sums = add_sums(sums, part)
                loss_sum += value.item()
                if backward and not self._backward(value, batch.adapter, scale):
                    break
        refused = backward and bool(self.non_finite)
        counts = count_tokens(rows, batches, recomputed=stems.recomputed)
        return step_stats(loss_sum * scale, sums, counts, non_finite=refused)

    def finite_rows(
        self, rows: Sequence[TrainingRow], loss: str, loss_config: LossConfig | None = None
    ) -> list[int]:
        """Find the rows whose own loss and gradient are finite; drops accumulated gradients."""
        return finite_rows(self, rows, loss, loss_config)

    def _backward(self, value: Tensor, adapter: str, scale: float = 1.0) -> bool:
        """Add the gradient of a loss times ``scale``; returns whether the loss is finite."""
        if not bool(torch.isfinite(value)):
            self.non_finite.add(adapter)
            return False
        (value * scale).backward()
        return True

    def forward_backward_custom(
        self, rows: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
    ) -> tuple[StepStats, dict[str, float]]:
        """Add the gradient of any function of the log-probs; return its own metrics too.

        As in Tinker: a forward pass, the function's gradient with respect to the log-probs, then
        the backward of the log-probs that have that gradient. With a single micro-batch it goes
        through the first pass; with more, or with one that is too long to hold its activations, it
        takes a second forward pass. The loss is taken as it is, without a division.
        """
        batches = self._pack(rows)
        kept: Tensor | None = None
        [first] = batches if len(batches) == 1 else [None]
        if first and first.stem is None and first.input_ids.numel() <= self.token_budget:
            [batch] = self._ready(self._stems(batches, backward=True))
            kept, _ = self._forward_batch(batch)
            found = [[0.0] * len(row.tokens) for row in rows]
            scatter(batches[0], kept.detach(), found)
        else:
            found = self.forward(rows)
        loss, metrics, of_rows = custom_slopes(rows, found, function)
        slopes = dict(enumerate(of_rows))
        sums: Sums = {}
        for batch in self._ready(stems := self._stems(batches, backward=True)):
            computed = self._forward_batch(batch)[0] if kept is None else kept
            sums = add_sums(sums, token_sums(computed, computed - batch.logprobs))
            if not self._backward((computed * gather(batch, slopes)).sum(), batch.adapter):
                break
        counts = count_tokens(rows, batches, recomputed=stems.recomputed)
        return step_stats(loss, sums, counts, non_finite=bool(self.non_finite)), metrics


def default_token_budget(device: str) -> int:
    """Return the tokens of a micro-batch on a device of this type."""
    return 16384 if device == "cuda" else 4096
