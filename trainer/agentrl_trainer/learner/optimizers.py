"""Step each adapter's AdamW, read and restore its state, and set its learning rate.

Knows named parameters and gradients, not models or losses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.step_stats import OptimStats
from agentrl_trainer.models.devices import return_freed_memory

VALUE = "value."
"""Prefix of the name under which an adapter's value function trains; no adapter has a dot."""


class AdapterOptimizers:
    """An AdamW (arXiv:1711.05101) for each adapter and each value function.

    ``adam``: what they step with by default. ``value_lr``: the learning rate of value functions.
    """

    def __init__(self, adam: AdamParams, value_lr: float) -> None:
        self.adam = adam
        self._value_lr = value_lr
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        """By adapter, and by ``VALUE`` and its name, its trainable tensors."""
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self.non_finite: set[str] = set()
        """Adapters that saw a loss which was not finite since their last step."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters in training."""
        return tuple(name for name in self.parameters if not name.startswith(VALUE))

    def add_parameters(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        """Train parameters under an adapter's name, or under ``VALUE`` and its name."""
        self.parameters[name] = parameters
        self._optimizers[name] = torch.optim.AdamW(list(parameters.values()), fused=True)

    def remove_parameters(self, adapter: str) -> None:
        """Forget those of an adapter and its value function; ValueError if there is none."""
        for name in self._owned([adapter]):
            del self.parameters[name], self._optimizers[name]
            self.non_finite.discard(name)

    def optim_step(
        self, adam: AdamParams | None = None, adapters: Collection[str] | None = None
    ) -> OptimStats:
        """Apply the accumulated gradients of ``adapters`` (None: of all), then forget them.

        AdamW (arXiv:1711.05101); each adapter's gradient is first scaled down to
        ``grad_clip_norm`` (arXiv:1211.5063, section 3.2).
        If a gradient, or a loss it came from, is not finite, nothing changes in any of these
        adapters. An adapter without gradients keeps its weights and its moments.
        """
        adam = adam or self.adam
        stepped = self._owned(adapters)
        norms: dict[str, Tensor] = {}
        for name, parameters in stepped.items():
            if found := [p.grad for p in parameters.values() if p.grad is not None]:
                norms[name] = nn.utils.get_total_norm(found)
        of_policy = [float(norm) for name, norm in norms.items() if not name.startswith(VALUE)]
        finite = all(bool(norm.isfinite()) for norm in norms.values())
        refused = not (finite and self.non_finite.isdisjoint(stepped))
        if not refused:
            for name, norm in norms.items():
                if adam.grad_clip_norm:
                    own = stepped[name].values()
                    nn.utils.clip_grads_with_norm_(own, adam.grad_clip_norm, norm)
                (group,) = self._optimizers[name].param_groups
                rate = self._value_lr if name.startswith(VALUE) else adam.learning_rate
                group |= {"lr": rate, "betas": (adam.beta1, adam.beta2)}
                group |= {"eps": adam.eps, "weight_decay": adam.weight_decay}
                self._optimizers[name].step()
        self.discard_gradients(adapters)
        return_freed_memory()
        return OptimStats(math.hypot(*of_policy), refused)

    def discard_gradients(self, adapters: Collection[str] | None = None) -> None:
        """Forget accumulated gradients, and that one of them was not finite; None: of all."""
        for name in self._owned(adapters):
            self._optimizers[name].zero_grad(set_to_none=True)
            self.non_finite.discard(name)

    def gradients_finite(self, adapters: Collection[str] | None = None) -> bool:
        """Tell whether all accumulated gradients of ``adapters`` (None: of all) are finite."""
        every = [one.grad for own in self._owned(adapters).values() for one in own.values()]
        return all(bool(grad.isfinite().all()) for grad in every if grad is not None)

    def state_dict(self, adapters: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copy weights and AdamW state, as ``{weights|exp_avg|exp_avg_sq|step}/adapter/name``.

        Gradients that no ``optim_step`` has applied yet are left out.
        """
        state: dict[str, Tensor] = {}
        for name, parameters in self._owned(adapters).items():
            for key, weights in parameters.items():
                found = {"weights": weights, **self._optimizers[name].state.get(weights, {})}
                for kind, value in found.items():
                    state[f"{kind}/{name}/{key}"] = value.detach().cpu().clone()
        return state

    def load_state_dict(
        self, state: Mapping[str, Tensor], adapters: Collection[str] | None = None
    ) -> None:
        """Restore ``state_dict`` in place. Accumulated gradients are dropped.

        An adapter without optimizer state in ``state`` starts with a fresh AdamW.

        Raises:
            ValueError: the state is of other adapters, or of other shapes.
        """
        owned = self._owned(adapters)
        expected = {f"{name}/{key}": p for name, own in owned.items() for key, p in own.items()}
        kinds: dict[str, dict[str, Tensor]] = {}
        for at, tensor in state.items():
            kind, _, key = at.partition("/")
            kinds.setdefault(kind, {})[key] = tensor
        weights = kinds.pop("weights", {})
        if odd := sorted(weights.keys() ^ expected.keys()):
            raise ValueError(f"state of another set of adapters: {len(odd)} differ, {odd[:3]} ...")
        for key, parameter in expected.items():
            if (shape := weights[key].shape) != parameter.shape:
                raise ValueError(f"{key} has shape {[*shape]}, expected {[*parameter.shape]}")
        self.discard_gradients(adapters)
        for name, parameters in owned.items():
            own = self._optimizers[name].state
            own.clear()
            for key, parameter in parameters.items():
                at = f"{name}/{key}"
                parameter.data.copy_(weights[at])
                # AdamW's fused kernel wants its step count on the parameter's device.
                moments = {
                    kind: found[at].to(parameter.device, torch.float32, copy=True)
                    for kind, found in kinds.items()
                    if at in found
                }
                if moments:
                    own[parameter] = moments

    def _owned(self, adapters: Collection[str] | None) -> dict[str, dict[str, nn.Parameter]]:
        """Select what trains for these adapters, value functions included; None: for all."""
        if adapters is None:
            return self.parameters
        if unknown := set(adapters) - set(self.adapters):
            raise ValueError(f"no adapters {sorted(unknown)}; this trains {self.adapters}")
        return {n: p for n, p in self.parameters.items() if n.removeprefix(VALUE) in adapters}


# ---- the learning rate: its peak by the size of the model, and its schedule over a run

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(schedule: Schedule, step: int, steps: int, warmup_steps: int = 0) -> float:
    """Compute the factor of the peak learning rate in ``step`` of ``steps``, counted from 1.

    The first ``warmup_steps`` rise in equal parts; the first step after them has the whole rate.
    From there "constant" stays, while "linear" and "cosine" (half a period, arXiv:1608.03983
    without restarts) fall, to reach zero in the step after the last. Steps beyond the last (a run
    that was made longer) get the last one's. A resumed run gets the same factors, because they
    depend on the step alone.
    """
    if step < 1 or steps < 1 or warmup_steps < 0:
        raise ValueError(f"steps count from 1: step {step} of {steps}, warmup_steps {warmup_steps}")
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    done = (min(step, steps) - 1 - warmup_steps) / max(steps - warmup_steps, 1)
    if schedule == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))


def default_learning_rate(parameters: int, alpha: float = 32.0) -> float:
    """Choose Adam's learning rate for LoRA by the size of the base model.

    A power law through two points: 1.5e-3 at 0.85 million parameters, measured on agentrl-tiny, and
    4e-5 at 4 billion, the usual recommendation (ten times that of full fine-tuning).

    The rank does not enter: the update is alpha / rank times a sum of ``rank`` products, each of
    which Adam moves by the same amount (Schulman et al., "LoRA Without Regret", 2025, who find the
    same best rate from rank 4 to 512; ``benchmarks/learning_rate`` finds it from 1 to 128). Alpha
    does: with B at zero the first updates are alpha times the rate, and both points are of alpha
    32.
    """
    small, large = (0.85e6, 1.5e-3), (4e9, 4e-5)
    exponent = math.log(large[1] / small[1]) / math.log(large[0] / small[0])
    return min(5e-3, small[1] * (parameters / small[0]) ** exponent) * 32.0 / alpha
