"""The learner: gradients of a loss into LoRA adapters over one frozen base model.

Knows torch, peft and datums. Does not know rollouts, rewards, or where samples come from. The
interface is Tinker's: ``forward_backward`` accumulates, ``optim_step`` updates; between the two the
caller decides what a step is. Several adapters may live on the base, each with its own AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl_trainer.batches import Datum, MicroBatch, TokenCounts, count_tokens, pack
from agentrl_trainer.logprobs import TokenLogprobs
from agentrl_trainer.losses import LOSSES, LossConfig, Sums, add_sums
from agentrl_trainer.model import (
    BaseModel,
    attach_adapter,
    evaluation_mode,
    lora_config,
    save_adapter,
)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Tinker's, and its defaults."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of each adapter's gradient; 0: off


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one ``forward_backward`` saw, with the policy as it was *before* the update.

    ``sampler_trainer_kl`` and the differences compare the trainer's log-probs with the sampler's.
    On tokens sampled by the current version they measure the disagreement of the two engines and
    should be near zero; on older tokens they measure how far the policy has moved.
    """

    loss: float  # summed, divided by ``normalize_by``
    tokens: int  # trained ones
    entropy: float  # estimate: minus the mean log-prob of the sampled tokens
    ratio_mean: float
    ratio_max: float
    clip_fraction: float
    sampler_trainer_kl: float  # k3 estimate of KL(sampler || trainer), per token
    mean_logprob_difference: float  # absolute
    max_logprob_difference: float  # absolute
    tokens_total: int  # of all rows, context included, each row by itself
    tokens_unique: int  # prefixes that rows share counted once
    tokens_saved: int  # of the total, those that did not go through the model, thanks to sharing
    seconds: float
    skipped_non_finite: bool = False
    grad_norm: float | None = None  # known once the optimizer has stepped


@dataclass(frozen=True, slots=True)
class OptimStats:
    """Norms before clipping: over all adapters, and of each that had gradients."""

    grad_norm: float
    grad_norms: dict[str, float]
    skipped_non_finite: bool
    seconds: float


class Learner:
    """LoRA adapters in training over one frozen base.

    ``adapters`` are drawn from ``seed`` and their position, with B at zero: they start as the base
    model. The base model is put under PEFT in place; nobody else should use it afterwards.
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
    ) -> None:
        if not adapters or len(set(adapters)) < len(adapters):
            raise ValueError(f"adapters must be distinct names, at least one: {list(adapters)}")
        self.base = base
        self.adapters = tuple(adapters)
        self.adam = adam or AdamParams()
        # A CPU is quickest with activations that stay in its caches; a GPU wants to be filled.
        self.token_budget = token_budget or (4096 if base.device.type == "cpu" else 16384)
        attached: BaseModel | PeftModel = base
        for index, name in enumerate(self.adapters):
            attached = attach_adapter(
                attached, name, lora_config(rank, alpha, targets), seed + index
            )
        self.model = cast(PeftModel, attached)
        # Evaluation mode: dropout anywhere would make the trainer's policy differ from the
        # sampler's.
        evaluation_mode(self.model)
        if gradient_checkpointing:
            _checkpoint_layers(base.model)
        self._logprobs = TokenLogprobs(base.model)
        self._parameters = {name: _adapter_parameters(self.model, name) for name in self.adapters}
        self._optimizers = {
            name: _adamw(list(parameters.values()), self.adam)
            for name, parameters in self._parameters.items()
        }
        self.model.set_adapter(self.adapters[0])
        self._poisoned = False

    @property
    def why_not_shared(self) -> str | None:
        """What about the model forbids computing shared prefixes once; None: they are."""
        return self._logprobs.why_padded

    # ---- learning

    def forward_backward(
        self,
        datums: Sequence[Datum],
        loss: str = "importance_sampling",
        loss_config: LossConfig | None = None,
        normalize_by: float | None = None,
    ) -> StepStats:
        """Add the gradient of ``loss_sum / normalize_by`` to what the optimizer will apply.

        ``normalize_by`` None: the number of trained tokens in ``datums``, which is right when these
        are the whole optimizer step. A loss that is not finite poisons the step: the rest of
        ``datums`` is left out (stats cover what came before), and ``optim_step`` will refuse.
        """
        started = time.perf_counter()
        function = _loss(loss)
        if unknown := {datum.adapter for datum in datums} - set(self.adapters):
            raise ValueError(f"datums for {sorted(unknown)}, but this trains {self.adapters}")
        tokens = sum(datum.trained for datum in datums)
        scale = 1.0 / (normalize_by or max(tokens, 1))

        sums: Sums = {}
        loss_sum = 0.0
        batches = self._pack(datums)
        counts = count_tokens(datums, batches)
        for batch in batches:
            batch = batch.to(self.base.device)
            logprobs = self._forward(batch)
            value, part = function(
                logprobs,
                batch.logprobs,
                batch.advantages,
                torch.ones_like(batch.targets, dtype=torch.bool),
                loss_config or {},
            )
            sums = add_sums(sums, part)
            loss_sum += value.item()
            if not bool(torch.isfinite(value)):
                self._poisoned = True
                break
            (value * scale).backward()
        return _stats(loss_sum * scale, sums, counts, started, poisoned=self._poisoned)

    def optim_step(self, adam: AdamParams | None = None) -> OptimStats:
        """Apply the accumulated gradients, then forget them.

        If any of them, or a loss they came from, is not finite, nothing changes in any adapter.
        An adapter without gradients keeps its weights and its momenta.
        """
        started = time.perf_counter()
        adam = adam or self.adam
        gradients = {
            name: [p.grad for p in parameters.values() if p.grad is not None]
            for name, parameters in self._parameters.items()
        }
        norms = {
            name: float(torch.nn.utils.get_total_norm(grads))
            for name, grads in gradients.items()
            if grads
        }
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        refused = self._poisoned or not _finite(total)
        if not refused:
            for name, norm in norms.items():
                if adam.grad_clip_norm and norm > adam.grad_clip_norm:
                    for gradient in gradients[name]:
                        gradient.mul_(adam.grad_clip_norm / norm)
                _configure(self._optimizers[name], adam)
                self._optimizers[name].step()
        self.discard_gradients()
        return OptimStats(total, norms, refused, time.perf_counter() - started)

    def step(
        self,
        datums: Sequence[Datum],
        loss: str = "importance_sampling",
        loss_config: LossConfig | None = None,
        adam: AdamParams | None = None,
    ) -> StepStats:
        """One whole optimizer step on these datums."""
        stats = self.forward_backward(datums, loss, loss_config)
        optim = self.optim_step(adam)
        return replace(
            stats,
            grad_norm=optim.grad_norm,
            skipped_non_finite=optim.skipped_non_finite,
            seconds=stats.seconds + optim.seconds,
        )

    def discard_gradients(self) -> None:
        """Forget accumulated gradients, and that one of them was not finite."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        self._poisoned = False

    @torch.no_grad()
    def forward(self, datums: Sequence[Datum]) -> list[list[float]]:
        """The policy's log-prob of each trained token, aligned with ``tokens``; 0 elsewhere."""
        result = [[0.0] * len(datum.tokens) for datum in datums]
        for batch in self._pack(datums):
            values = self._forward(batch.to(self.base.device)).tolist()
            where = zip(batch.rows.tolist(), batch.columns.tolist(), values, strict=True)
            for row, column, value in where:
                result[batch.indices[row]][column + 1] = value
        return result

    def _pack(self, datums: Sequence[Datum]) -> list[MicroBatch]:
        share = self.why_not_shared is None
        return pack(datums, token_budget=self.token_budget, share=share)

    def _forward(self, batch: MicroBatch) -> Tensor:
        """[N] float32 log-probs of the targets."""
        if self.model.active_adapter != batch.adapter:
            # PEFT freezes the others meanwhile; the gradients they have gathered stay.
            self.model.set_adapter(batch.adapter)
        return self._logprobs(batch)

    # ---- saving

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write a standard PEFT folder."""
        save_adapter(self.model, name, folder)

    def state_dict(self) -> dict[str, Tensor]:
        """Weights and AdamW state, flat, as ``{weights|exp_avg|exp_avg_sq|step}/adapter/name``.

        Copies. Gradients that no ``optim_step`` has applied yet are not part of it.
        """
        state: dict[str, Tensor] = {}
        for name, parameters in self._parameters.items():
            for key, parameter in parameters.items():
                state[f"weights/{name}/{key}"] = parameter.detach().cpu().clone()
                for moment, value in self._optimizers[name].state.get(parameter, {}).items():
                    state[f"{moment}/{name}/{key}"] = value.detach().cpu().clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of ``state_dict``; in place. Accumulated gradients are dropped."""
        expected = {
            f"weights/{name}/{key}": parameter
            for name, parameters in self._parameters.items()
            for key, parameter in parameters.items()
        }
        found = {key for key in state if key.startswith("weights/")}
        if found != expected.keys():
            odd = sorted(found ^ expected.keys())
            raise ValueError(f"state of another set of adapters: {len(odd)} differ, {odd[:3]} ...")
        for key, parameter in expected.items():
            if state[key].shape != parameter.shape:
                raise ValueError(
                    f"{key} has shape {tuple(state[key].shape)}, expected {tuple(parameter.shape)}"
                )
        self.discard_gradients()
        with torch.no_grad():
            for key, parameter in expected.items():
                parameter.copy_(state[key])
        for name, parameters in self._parameters.items():
            self._optimizers[name].state.clear()
            for key, parameter in parameters.items():
                moments = {
                    moment: state[f"{moment}/{name}/{key}"]
                    for moment in ("step", "exp_avg", "exp_avg_sq")
                    if f"{moment}/{name}/{key}" in state
                }
                if moments:
                    self._optimizers[name].state[parameter] = {
                        # AdamW's fused kernel wants its step count beside the parameter.
                        moment: value.to(parameter.device, torch.float32, copy=True)
                        for moment, value in moments.items()
                    }


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Layers keep their inputs only, and run again in the backward.

    They do so in training mode; what is inside of them (dropout) stays in evaluation mode.
    """
    # transformers renamed it in 5.20.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True


def _adapter_parameters(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """The adapter's trainable tensors, by a name that does not depend on the adapter's."""
    found: dict[str, nn.Parameter] = {}
    for key, parameter in model.named_parameters():
        # ...q_proj.lora_A.<adapter>.weight, or ...lora_embedding_A.<adapter>
        before, _, after = key.rpartition("lora_")
        kind, owner, *rest = [*after.split("."), ""]
        if before and owner == adapter:
            found[before + ".".join([f"lora_{kind}", *filter(None, rest)])] = parameter
    return found


def _adamw(parameters: list[nn.Parameter], adam: AdamParams) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters, fused=True)
    _configure(optimizer, adam)
    return optimizer


def _configure(optimizer: torch.optim.AdamW, adam: AdamParams) -> None:
    for group in optimizer.param_groups:
        group["lr"] = adam.lr
        group["betas"] = (adam.beta1, adam.beta2)
        group["eps"] = adam.eps
        group["weight_decay"] = adam.weight_decay


def _loss(name: str) -> Any:
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: choose one of {sorted(LOSSES)}")
    return LOSSES[name]


def _finite(value: float) -> bool:
    return value - value == 0.0


def _stats(
    loss: float, sums: Sums, counts: TokenCounts, started: float, *, poisoned: bool
) -> StepStats:
    values = {name: float(value) for name, value in sums.items()}

    def mean(name: str) -> float:
        return values.get(name, 0.0) / max(values.get("tokens", 0.0), 1.0)

    return StepStats(
        loss=loss,
        tokens=int(values.get("tokens", 0)),
        entropy=-mean("logprob"),
        ratio_mean=mean("ratio"),
        ratio_max=values.get("ratio_max", 0.0),
        clip_fraction=mean("clipped"),
        sampler_trainer_kl=mean("kl_k3"),
        mean_logprob_difference=mean("difference"),
        max_logprob_difference=values.get("difference_max", 0.0),
        tokens_total=counts.total,
        tokens_unique=counts.unique,
        tokens_saved=counts.saved,
        seconds=time.perf_counter() - started,
        skipped_non_finite=poisoned,
    )
