"""The learner: gradients of a loss into LoRA adapters over one frozen base model.

Knows torch, peft and datums. Does not know rollouts, rewards, or where samples come from. The
interface is Tinker's: ``forward_backward`` accumulates, ``optim_step`` updates; between the two the
caller decides what a step is. Several adapters may live on the base, each with its own AdamW.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl_trainer.data.packing import (
    LOSS_EXTRA,
    MicroBatch,
    TokenCounts,
    TrainingRow,
    count_tokens,
    pack,
)
from agentrl_trainer.learner.logprobs import TokenLogprobs
from agentrl_trainer.learner.losses import LOSSES, Loss, LossConfig, Sums, add_sums
from agentrl_trainer.learner.value_head import ValueHead, ValueParams, value_loss
from agentrl_trainer.models.loading import (
    BaseModel,
    attach_adapter,
    evaluation_mode,
    load_adapter_weights,
    lora_config,
    save_adapter,
)
from agentrl_trainer.models.moe import what_is_trained

D = TypeVar("D")

CustomLoss: TypeAlias = Callable[[Sequence[D], list[Tensor]], tuple[Tensor, Mapping[str, float]]]
"""``(data, logprobs) -> (loss, metrics)``, a differentiable function of the log-probs.

``logprobs`` holds one tensor for each datum or row of ``data``. Of a ``TrainingRow`` it has the
shape [tokens of the row] and is 0 where nothing trains; of a client's ``Datum`` it is aligned with
the targets, [T]. The loss counts as it is: divide it yourself."""

_Forward = Callable[[MicroBatch], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's parameters, with Tinker's names and defaults."""

    learning_rate: float = 1e-4
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
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per token, of what not every step has: ``kl_reference``, ``correction`` (mean weight),
    ``dropped`` (fraction that the correction cut), ``value_loss``, ``value_error`` (absolute)."""


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

    ``value``: each adapter gets a value function, which learns from datums with ``returns``.
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
        self.value = value
        self._value_heads: dict[str, ValueHead] = {}
        if value is not None:
            if why := self._logprobs.why_all_logits:
                raise ValueError(f"a value function needs the model's hidden states, but {why}")
            for index, name in enumerate(self.adapters):
                self._add_value_head(name, seed + index)
        self._optimizers = {
            name: _adamw(list(parameters.values()), self.adam)
            for name, parameters in self._parameters.items()
        }
        self.model.set_adapter(self.adapters[0])
        self._poisoned: set[str] = set()  # adapters some of whose gradients are not finite

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
        self.model.set_adapter(cast(str, active) if active in self.adapters else name)
        # Not put into evaluation mode again: checkpointed layers would leave their training mode.
        self._parameters[name] = _adapter_parameters(self.model, name)
        self.adapters = (*self.adapters, name)
        if self.value is not None:
            self._add_value_head(name, seed)
        for own, parameters in self._owned([name]).items():
            self._optimizers[own] = _adamw(list(parameters.values()), self.adam)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter: weights, optimizer, value function and gathered gradients.

        The last one may go as well; until there is another nothing can be learned.

        Raises:
            ValueError: there is no such adapter.
        """
        for own in self._owned([name]):
            del self._parameters[own], self._optimizers[own]
            self._poisoned.discard(own)
        self._value_heads.pop(name, None)
        self.adapters = tuple(other for other in self.adapters if other != name)
        if self.adapters:
            self._activate(self.adapters[0])
        self.model.delete_adapter(name)

    def _add_value_head(self, adapter: str, seed: int) -> None:
        width = self.base.model.config.get_text_config().hidden_size
        head = ValueHead(width, seed=seed).to(self.base.device)
        self._value_heads[adapter] = head
        # It steps, clips and is saved as if it were an adapter of its own.
        self._parameters[_VALUE + adapter] = dict(head.named_parameters())

    def what_is_trained(self, name: str) -> str | None:
        """How an adapter covers a mixture of experts; None: the model is dense."""
        return what_is_trained(self.base.model, cast(LoraConfig, self.model.peft_config[name]))

    @property
    def why_not_shared(self) -> str | None:
        """What about the model forbids computing shared prefixes once; None: they are."""
        return self._logprobs.why_padded

    # ---- learning

    def forward_backward(
        self,
        datums: Sequence[TrainingRow],
        loss: str = "importance_sampling",
        loss_config: LossConfig | None = None,
        normalize_by: float | None = None,
        logprobs_into: list[list[float]] | None = None,
        *,
        backward: bool = True,
    ) -> StepStats:
        """Add the gradient of ``loss_sum / normalize_by`` to what the optimizer will apply; without
        ``backward`` only compute the loss.

        ``normalize_by`` None: the number of trained tokens in ``datums``, which is right when these
        are the whole optimizer step. A loss that is not finite poisons the step: the rest of
        ``datums`` is left out (stats cover what came before), and ``optim_step`` will refuse.

        ``logprobs_into``: rows as long as each datum's tokens, to be filled as by ``forward``.
        """
        function = _loss(loss)
        options = loss_config or {}
        if function.options(options)["kl_coef"] and any("reference" not in d.extra for d in datums):
            raise ValueError("kl_coef needs reference log-probs: see Learner.with_reference")
        if unknown := {datum.adapter for datum in datums} - set(self.adapters):
            raise ValueError(f"datums for {sorted(unknown)}, but this trains {self.adapters}")
        tokens = sum(datum.trained for datum in datums)
        scale = 1.0 / (normalize_by or max(tokens, 1))
        with torch.set_grad_enabled(backward):
            return self._accumulate(
                datums, function, options, scale, self._forward, logprobs_into, backward=backward
            )

    def _accumulate(
        self,
        datums: Sequence[TrainingRow],
        function: Loss,
        options: LossConfig,
        scale: float,
        forward: _Forward,
        logprobs_into: list[list[float]] | None,
        *,
        backward: bool,
    ) -> StepStats:
        started = time.perf_counter()
        sums: Sums = {}
        loss_sum = 0.0
        batches = self._pack(datums)
        counts = count_tokens(datums, batches)
        for batch in batches:
            batch = batch.to(self.base.device)
            logprobs, hidden = forward(batch)
            if logprobs_into is not None:
                _scatter(batch, logprobs.detach(), logprobs_into)
            value, part = function(
                logprobs,
                batch.logprobs,
                batch.advantages,
                torch.ones_like(batch.targets, dtype=torch.bool),
                options,
                sequences=batch.rows,
                **_extra(datums, batch, LOSS_EXTRA),
            )
            if hidden is not None and self.value is not None:
                head = self._value_heads[batch.adapter]
                learn = _extra(datums, batch, ("returns", "values", "weights"))
                if "returns" in learn:
                    more, more_sums = value_loss(head(hidden), params=self.value, **learn)
                    value, part = value + more, part | more_sums
            sums = add_sums(sums, part)
            loss_sum += value.item()
            if not backward:
                continue
            if not bool(torch.isfinite(value)):
                self._poisoned.add(batch.adapter)
                break
            (value * scale).backward()
        poisoned = backward and bool(self._poisoned)
        return step_stats(loss_sum * scale, sums, counts, started, poisoned=poisoned)

    def optim_step(
        self, adam: AdamParams | None = None, adapters: Collection[str] | None = None
    ) -> OptimStats:
        """Apply the accumulated gradients, then forget them; of ``adapters``, or of all.

        AdamW (arXiv:1711.05101), each adapter's gradient scaled down to ``grad_clip_norm`` before
        (arXiv:1211.5063, section 3.2).

        If any of them, or a loss they came from, is not finite, nothing changes in any of these
        adapters. An adapter without gradients keeps its weights and its momenta.
        """
        started = time.perf_counter()
        adam = adam or self.adam
        stepped = self._owned(adapters)
        gradients = {
            name: [p.grad for p in parameters.values() if p.grad is not None]
            for name, parameters in stepped.items()
        }
        norms = {
            name: float(torch.nn.utils.get_total_norm(grads))
            for name, grads in gradients.items()
            if grads
        }
        total = sum(norm**2 for name, norm in norms.items() if name in self.adapters) ** 0.5
        refused = bool(self._poisoned & stepped.keys()) or not all(map(_finite, norms.values()))
        if not refused:
            for name, norm in norms.items():
                if adam.grad_clip_norm and norm > adam.grad_clip_norm:
                    for gradient in gradients[name]:
                        gradient.mul_(adam.grad_clip_norm / norm)
                _configure(self._optimizers[name], self._adam_of(name, adam))
                self._optimizers[name].step()
        self.discard_gradients(adapters)
        return OptimStats(total, norms, refused, time.perf_counter() - started)

    def _adam_of(self, name: str, adam: AdamParams) -> AdamParams:
        own = self.value is not None and name.startswith(_VALUE)
        return (
            replace(adam, learning_rate=self.value.lr) if own and self.value is not None else adam
        )

    def step(
        self,
        datums: Sequence[TrainingRow],
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

    def discard_gradients(self, adapters: Collection[str] | None = None) -> None:
        """Forget accumulated gradients, and that one of them was not finite; None: of all."""
        for name in self._owned(adapters):
            self._optimizers[name].zero_grad(set_to_none=True)
            self._poisoned.discard(name)

    def _owned(self, adapters: Collection[str] | None) -> dict[str, dict[str, nn.Parameter]]:
        """What trains for these adapters, value functions included; None: for all."""
        if adapters is None:
            return self._parameters
        if unknown := set(adapters) - set(self.adapters):
            raise ValueError(f"no adapters {sorted(unknown)}; this trains {self.adapters}")
        return {
            name: parameters
            for name, parameters in self._parameters.items()
            if name.removeprefix(_VALUE) in adapters
        }

    @torch.no_grad()
    def forward(self, datums: Sequence[TrainingRow]) -> list[list[float]]:
        """The policy's log-prob of each trained token, aligned with ``tokens``; 0 elsewhere."""
        result = [[0.0] * len(datum.tokens) for datum in datums]
        for batch in self._pack(datums):
            logprobs, _ = self._forward(batch.to(self.base.device))
            _scatter(batch, logprobs, result)
        return result

    def with_temperature(self, datums: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The datums with the sampler's log-probs at the temperature that each token was sampled
        at, where they say one; without, as they are.

        Log-probs are recorded of the policy at temperature 1. What is optimised is the policy that
        sampled: at temperature T, whose log-probs are those of logits / T (verl and TRL do so
        too). For a token of the policy at hand, that is simply what the trainer computes; for an
        older token the distance it has moved, log p - log q, is taken over from temperature 1. So
        the gradient is exact on policy, and importance weights of older tokens are to first order.
        """
        if not any("temperature" in datum.extra for datum in datums):
            return list(datums)
        plain = [
            replace(d, extra={k: v for k, v in d.extra.items() if k != "temperature"})
            for d in datums
        ]
        done: list[TrainingRow] = []
        for datum, warm, cold in zip(
            datums, self.forward(datums), self.forward(plain), strict=True
        ):
            moved = [
                w + (q - c) if on else q
                for q, w, c, on in zip(datum.logprobs, warm, cold, datum.mask, strict=True)
            ]
            done.append(replace(datum, logprobs=moved))
        return done

    def reference(
        self, datums: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[list[float]]:
        """``forward`` of another policy: the base model, or an adapter (``add_reference``)."""
        if adapter is None:
            with self.model.disable_adapter():
                return self.forward(datums)
        if adapter not in self.model.peft_config:
            raise ValueError(
                f"there is no adapter {adapter!r}; there are {[*self.model.peft_config]}"
            )
        return self.forward([replace(datum, adapter=adapter) for datum in datums])

    def with_reference(
        self, datums: Sequence[TrainingRow], adapter: str | None = None
    ) -> list[TrainingRow]:
        """The datums with the reference policy's log-probs, which ``kl_coef`` needs."""
        return with_extra(datums, reference=self.reference(datums, adapter))

    def with_proximal(self, datums: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The datums with the log-probs of the policy as it is now; ratios are against it then."""
        return with_extra(datums, proximal=self.forward(datums))

    def add_reference(self, name: str, folder: str | Path) -> None:
        """Attach a saved adapter, which does not train; its rank may be another."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Adapter name '.*' should not be contained")
            config = PeftConfig.from_pretrained(str(folder))
            cast(Any, config).lora_dropout = 0.0  # a reference is not drawn anew
            self.model.add_adapter(name, config)
        load_adapter_weights(self.model, name, folder)
        active = self.model.active_adapter
        self.model.set_adapter(active if isinstance(active, str) else self.adapters[0])

    @torch.no_grad()
    def values(self, datums: Sequence[TrainingRow]) -> list[list[float]]:
        """The value function's prediction before each trained token, aligned as in ``forward``."""
        if self.value is None:
            raise ValueError("this learner has no value function: give it ValueParams")
        result = [[0.0] * len(datum.tokens) for datum in datums]
        for batch in self._pack(datums):
            batch = batch.to(self.base.device)
            self._activate(batch.adapter)
            hidden = self._logprobs.hidden(batch).float()  # without the vocabulary
            _scatter(batch, self._value_heads[batch.adapter](hidden), result)
        return result

    def forward_backward_custom(
        self, datums: Sequence[TrainingRow], function: CustomLoss[TrainingRow]
    ) -> tuple[StepStats, dict[str, float]]:
        """Add the gradient of any function of the log-probs; returns its own metrics too.

        As in Tinker: a forward pass, the function's gradient with respect to the log-probs, then
        the backward of the cross-entropy which has that gradient. It goes through the first pass
        where that is one micro-batch; of more, whose activations would all be held at once, it
        takes a forward pass more. The loss counts as it is: divide it yourself.
        """
        started = time.perf_counter()
        batches = self._pack(datums)
        if len(batches) == 1:
            # What is packed how depends on no advantage: it is the same batch the second time.
            kept = self._forward(batches[0].to(self.base.device))
            forward: _Forward = lambda _: kept  # noqa: E731
            rows = [[0.0] * len(datum.tokens) for datum in datums]
            _scatter(batches[0], kept[0].detach(), rows)
        else:
            forward, rows = self._forward, self.forward(datums)
        logprobs = [torch.tensor(row, requires_grad=True) for row in rows]
        loss, metrics = function(datums, logprobs)
        if loss.dim() != 0 or not loss.requires_grad:
            raise ValueError("a custom loss must return a scalar that depends on the log-probs")
        grads = torch.autograd.grad(loss, logprobs, allow_unused=True)
        weighted = [
            replace(
                datum,
                advantages=[0.0] * len(datum.tokens) if grad is None else (-grad).tolist(),
                # Nothing else: this is a plain cross-entropy, of the same policy.
                extra={k: v for k, v in datum.extra.items() if k == "temperature"},
            )
            for datum, grad in zip(datums, grads, strict=True)
        ]
        stats = self._accumulate(
            weighted, _loss("cross_entropy"), {}, 1.0, forward, None, backward=True
        )
        seconds = time.perf_counter() - started
        return replace(stats, loss=loss.item(), seconds=seconds), dict(metrics)

    def _pack(self, datums: Sequence[TrainingRow]) -> list[MicroBatch]:
        share = self.why_not_shared is None
        enough = None
        if self.base.device.type == "cpu":  # a GPU wants to be filled
            enough = _TOKENS_PER_THREAD * torch.get_num_threads()
        return pack(datums, token_budget=self.token_budget, enough=enough, share=share)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """[N] float32 log-probs of the targets; with a value function, [N, hidden] states too,
        through which no gradient flows: the value function does not shape the policy."""
        self._activate(batch.adapter)
        if self.value is None:
            return self._logprobs(batch), None
        hidden = self._logprobs.hidden(batch)
        logprobs = self._logprobs.of_hidden(hidden, batch.targets, batch.temperatures)
        return logprobs, hidden.detach().float()

    def _activate(self, adapter: str) -> None:
        if self.model.active_adapter != adapter:
            # PEFT freezes the others meanwhile; the gradients they have gathered stay.
            self.model.set_adapter(adapter)

    # ---- saving

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write a standard PEFT folder."""
        save_adapter(self.model, name, folder)

    def state_dict(self, adapters: Collection[str] | None = None) -> dict[str, Tensor]:
        """Weights and AdamW state, flat, as ``{weights|exp_avg|exp_avg_sq|step}/adapter/name``;
        of ``adapters``, or of all.

        Copies. Gradients that no ``optim_step`` has applied yet are not part of it.
        """
        state: dict[str, Tensor] = {}
        for name, parameters in self._owned(adapters).items():
            for key, parameter in parameters.items():
                state[f"weights/{name}/{key}"] = parameter.detach().cpu().clone()
                for moment, value in self._optimizers[name].state.get(parameter, {}).items():
                    state[f"{moment}/{name}/{key}"] = value.detach().cpu().clone()
        return state

    def load_state_dict(
        self, state: Mapping[str, Tensor], adapters: Collection[str] | None = None
    ) -> None:
        """Inverse of ``state_dict``; in place. Accumulated gradients are dropped.

        Without an optimizer's state in ``state`` that adapter's AdamW begins anew.
        """
        owned = self._owned(adapters)
        expected = {
            f"weights/{name}/{key}": parameter
            for name, parameters in owned.items()
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
        self.discard_gradients(adapters)
        with torch.no_grad():
            for key, parameter in expected.items():
                parameter.copy_(state[key])
        for name, parameters in owned.items():
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
        group["lr"] = adam.learning_rate
        group["betas"] = (adam.beta1, adam.beta2)
        group["eps"] = adam.eps
        group["weight_decay"] = adam.weight_decay


_OPTIONAL = ("kl_reference", "correction", "dropped", "value_loss", "value_error")
_TOKENS_PER_THREAD = 512
"""More in a micro-batch make a CPU no quicker, but cost memory for their activations."""
_VALUE = "value."  # no adapter's name has a dot


def with_extra(
    datums: Sequence[TrainingRow], **columns: Sequence[list[float]]
) -> list[TrainingRow]:
    """The datums with more about each token: for each name, a list parallel to ``datums``."""
    return [
        replace(datum, extra={**datum.extra, **{name: rows[i] for name, rows in columns.items()}})
        for i, datum in enumerate(datums)
    ]


def _extra(
    datums: Sequence[TrainingRow], batch: MicroBatch, names: Iterable[str]
) -> dict[str, Tensor]:
    """{name: [N]}, of those names that the batch's datums have."""
    own = [datums[index] for index in batch.indices]
    if not any(datum.extra for datum in own):
        return {}
    rows, columns = batch.rows.tolist(), batch.columns.tolist()
    found: dict[str, Tensor] = {}
    for name in names:
        having = [name in datum.extra for datum in own]
        if not any(having):
            continue
        if not all(having):
            raise ValueError(f"some datums have {name!r} and some have not: give it to all or none")
        values = [
            own[row].extra[name][column + 1] for row, column in zip(rows, columns, strict=True)
        ]
        found[name] = torch.tensor(values, dtype=torch.float32, device=batch.targets.device)
    return found


def _scatter(batch: MicroBatch, values: Tensor, result: list[list[float]]) -> None:
    where = zip(batch.rows.tolist(), batch.columns.tolist(), values.tolist(), strict=True)
    for row, column, value in where:
        result[batch.indices[row]][column + 1] = value


def _loss(name: str) -> Loss:
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: choose one of {sorted(LOSSES)}")
    return LOSSES[name]


def _finite(value: float) -> bool:
    return value - value == 0.0


def step_stats(
    loss: float, sums: Sums, counts: TokenCounts, started: float, *, poisoned: bool
) -> StepStats:
    """What was seen, from a loss's sums over all tokens. ``started``: by ``perf_counter``."""
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
        metrics={name: mean(name) for name in _OPTIONAL if name in values},
    )
