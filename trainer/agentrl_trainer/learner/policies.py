"""Compute log-probs and values under the LoRA adapters of one base model.

Knows torch, peft and rows, not losses or optimizers. The adapters share the frozen base; one of
them is active at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl_trainer.data.packing import MicroBatch
from agentrl_trainer.data.packing import pack as pack_rows
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.logprobs import TokenLogprobs
from agentrl_trainer.learner.loss_options import ValueParams
from agentrl_trainer.learner.value_head import ValueHead
from agentrl_trainer.models.loading import BaseModel, evaluation_mode
from agentrl_trainer.models.lora import attach_adapter, load_adapter_weights
from agentrl_trainer.models.lora_targets import what_is_trained

_TOKENS_PER_THREAD = 512
"""More in a micro-batch do not speed up a CPU, but cost memory for their activations."""


class AdapterPolicies:
    """A base model under PEFT, in evaluation mode, with its adapters and their value functions.

    Args:
        adapters: name, configuration and seed of each.
        value: None: no value functions.

    Raises:
        ValueError: the model shows no hidden states, which a value function needs.
    """

    def __init__(
        self,
        base: BaseModel,
        adapters: Sequence[tuple[str, LoraConfig, int]],
        *,
        token_budget: int | None,
        gradient_checkpointing: bool,
        value: ValueParams | None,
    ) -> None:
        self.base = base
        # A CPU is fastest with activations that stay in its caches; a GPU must be filled.
        self.token_budget = token_budget or (4096 if base.device.type == "cpu" else 16384)
        attached: BaseModel | PeftModel = base
        for name, config, seed in adapters:
            attached = attach_adapter(attached, name, config, seed)
        self.model = cast(PeftModel, attached)
        # Dropout would make the trainer's policy differ from the sampler's.
        evaluation_mode(self.model)
        if gradient_checkpointing:
            _checkpoint_layers(base.model)
        self._logprobs = TokenLogprobs(base.model)
        self.value = value
        if value is not None and (why := self._logprobs.why_all_logits):
            raise ValueError(f"a value function needs the model's hidden states, but {why}")
        self.value_heads: dict[str, ValueHead] = {}
        for name, _, seed in adapters:
            self._add_value_head(name, seed)

    def attach(self, name: str, config: LoraConfig, seed: int) -> None:
        """Add an adapter, and its value function if there are any."""
        attach_adapter(self.model, name, config, seed)
        self._add_value_head(name, seed)

    def detach(self, name: str) -> None:
        """Forget an adapter and its value function."""
        self.value_heads.pop(name, None)
        self.model.delete_adapter(name)

    def _add_value_head(self, name: str, seed: int) -> None:
        if self.value is not None:
            width = self.base.model.config.get_text_config().hidden_size
            self.value_heads[name] = ValueHead(width, seed=seed).to(self.base.device)

    def what_is_trained(self, name: str) -> str | None:
        """Describe how an adapter covers a mixture of experts; None if the model is dense."""
        return what_is_trained(self.base.model, cast(LoraConfig, self.model.peft_config[name]))

    @property
    def why_not_shared(self) -> str | None:
        """What about the model forbids computing shared prefixes once; None if they are."""
        return self._logprobs.why_padded

    @torch.no_grad()
    def forward(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """Compute the log-prob of each trained token, aligned with ``tokens``; 0 elsewhere."""
        result = [[0.0] * len(row.tokens) for row in rows]
        for batch in self.pack(rows):
            logprobs, _ = self.forward_batch(batch.to(self.base.device))
            scatter(batch, logprobs, result)
        return result

    @torch.no_grad()
    def values(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        """Predict the value before each trained token, aligned as in ``forward``."""
        if self.value is None:
            raise ValueError("this learner has no value function: give it ValueParams")
        result = [[0.0] * len(row.tokens) for row in rows]
        for batch in self.pack(rows):
            batch = batch.to(self.base.device)
            self.activate(batch.adapter)
            hidden = self._logprobs.hidden(batch).float()
            scatter(batch, self.value_heads[batch.adapter](hidden), result)
        return result

    def with_temperature(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Move the sampler's log-probs to the temperature that each token was sampled at.

        Log-probs are recorded of the policy at temperature 1. The policy that trains is the one
        that sampled: at temperature T, with the log-probs of logits / T (as in verl and TRL). For a
        token of the current policy, that is what the trainer computes; for an older token, the
        distance log p - log q at temperature 1 is kept. So the gradient is exact on policy, and
        importance weights of older tokens are right to first order.
        """
        if not any("temperature" in row.extra for row in rows):
            return list(rows)
        plain = [
            replace(row, extra={k: v for k, v in row.extra.items() if k != "temperature"})
            for row in rows
        ]
        return [
            replace(
                row,
                logprobs=[
                    w + (q - c) if on else q
                    for q, w, c, on in zip(row.logprobs, warm, cold, row.mask, strict=True)
                ],
            )
            for row, warm, cold in zip(rows, self.forward(rows), self.forward(plain), strict=True)
        ]

    def reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[list[float]]:
        """Compute ``forward`` of the base model, or of an adapter (``add_reference``)."""
        if adapter is None:
            with self.model.disable_adapter():
                return self.forward(rows)
        if adapter not in self.model.peft_config:
            known = [*self.model.peft_config]
            raise ValueError(f"there is no adapter {adapter!r}; there are {known}")
        return self.forward([replace(row, adapter=adapter) for row in rows])

    def with_reference(
        self, rows: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        """Add the reference policy's log-probs, which ``kl_coef`` needs."""
        return with_extra(rows, reference=self.reference(rows, adapter))

    def with_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Add the current policy's log-probs, so that ratios are taken against it."""
        return with_extra(rows, proximal=self.forward(rows))

    def add_reference(self, name: str, folder: str | Path) -> None:
        """Attach a saved adapter that does not train; its rank may differ."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Adapter name '.*' should not be contained")
            config = PeftConfig.from_pretrained(str(folder))
            cast(Any, config).lora_dropout = 0.0
            self.model.add_adapter(name, config)
        load_adapter_weights(self.model, name, folder)
        self.model.set_adapter(cast(str, self.model.active_adapter))

    def pack(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        """Pack rows into micro-batches as this model and device can compute them."""
        enough = None
        if self.base.device.type == "cpu":
            enough = _TOKENS_PER_THREAD * torch.get_num_threads()
        share = self.why_not_shared is None
        return pack_rows(rows, token_budget=self.token_budget, enough=enough, share=share)

    def forward_batch(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Compute [N] float32 log-probs of the targets; with a value function, [N, hidden] states
        too, through which no gradient flows."""
        self.activate(batch.adapter)
        if self.value is None:
            return self._logprobs(batch), None
        hidden = self._logprobs.hidden(batch)
        logprobs = self._logprobs.of_hidden(hidden, batch.targets, batch.temperatures)
        return logprobs, hidden.detach().float()

    def activate(self, adapter: str) -> None:
        """Make the model compute with one adapter."""
        if self.model.active_adapter != adapter:
            # PEFT freezes the other adapters meanwhile; their accumulated gradients stay.
            self.model.set_adapter(adapter)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of layers, and compute them again in the backward.

    Layers do so in training mode; their submodules (dropout) stay in evaluation mode.
    """
    # transformers 5.20 renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def scatter(batch: MicroBatch, values: Tensor, result: list[list[float]]) -> None:
    """Write [N] values of the batch's trained tokens to their places in ``result``."""
    where = zip(batch.rows.tolist(), batch.columns.tolist(), values.tolist(), strict=True)
    for row, column, value in where:
        result[batch.indices[row]][column + 1] = value
