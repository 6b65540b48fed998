"""Step each adapter's AdamW, and read and restore its state.

Knows named parameters and gradients, not models or losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.step_stats import OptimStats

VALUE = "value."
"""Prefix of the name under which an adapter's value function trains; no adapter has a dot."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class AdapterOptimizers:
    """An AdamW (arXiv:1711.05101) for each adapter and each value function.

    ``adam``: what they step with by default. ``value_lr``: the learning rate of value functions.
    """

    def __init__(self, adam: AdamParams, value_lr: float = 0.0) -> None:
        self.adam = adam
        self._value_lr = value_lr
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        """By adapter, and by ``VALUE`` and its name, its trainable tensors."""
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self.non_finite: set[str] = set()
        """Adapters that saw a loss which was not finite since their last step."""

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(name for name in self.parameters if not name.startswith(VALUE))

    def add(self, name: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Train parameters under an adapter's name, or under ``VALUE`` and its name."""
        self.parameters[name] = dict(parameters)
        self._optimizers[name] = torch.optim.AdamW(list(parameters.values()), fused=True)
        self._configure(name, self.adam)

    def remove(self, adapter: str) -> None:
        """Forget an adapter and its value function. Raises ValueError if there is none."""
        for name in self._owned([adapter]):
            del self.parameters[name], self._optimizers[name]
            self.non_finite.discard(name)

    def step(
        self, adam: AdamParams | None = None, adapters: Collection[str] | None = None
    ) -> OptimStats:
        """Apply the accumulated gradients of ``adapters`` (None: of all), then forget them.

        AdamW (arXiv:1711.05101); each adapter's gradient is first scaled down to
        ``grad_clip_norm`` (arXiv:1211.5063, section 3.2).
        If a gradient, or a loss it came from, is not finite, nothing changes in any of these
        adapters. An adapter without gradients keeps its weights and its moments.
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
        total = sum(norm**2 for name, norm in norms.items() if not name.startswith(VALUE)) ** 0.5
        refused = bool(self.non_finite & stepped.keys()) or not all(
            math.isfinite(norm) for norm in norms.values()
        )
        if not refused:
            for name, norm in norms.items():
                if adam.grad_clip_norm and norm > adam.grad_clip_norm:
                    for gradient in gradients[name]:
                        gradient.mul_(adam.grad_clip_norm / norm)
                self._configure(name, adam)
                self._optimizers[name].step()
        self.discard(adapters)
        return OptimStats(total, norms, refused, time.perf_counter() - started)

    def discard(self, adapters: Collection[str] | None = None) -> None:
        """Forget accumulated gradients, and that one of them was not finite; None: of all."""
        for name in self._owned(adapters):
            self._optimizers[name].zero_grad(set_to_none=True)
            self.non_finite.discard(name)

    def state_dict(self, adapters: Collection[str] | None = None) -> dict[str, Tensor]:
        """Copy weights and AdamW state, as ``{weights|exp_avg|exp_avg_sq|step}/adapter/name``.

        Gradients that no ``step`` has applied yet are left out.
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
        """Restore ``state_dict`` in place. Accumulated gradients are dropped.

        An adapter without optimizer state in ``state`` starts with a fresh AdamW.

        Raises:
            ValueError: the state is of other adapters, or of other shapes.
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
        self.discard(adapters)
        with torch.no_grad():
            for key, parameter in expected.items():
                parameter.copy_(state[key])
        for name, parameters in owned.items():
            self._optimizers[name].state.clear()
            for key, parameter in parameters.items():
                moments = {
                    # AdamW's fused kernel wants its step count on the parameter's device.
                    moment: state[at].to(parameter.device, torch.float32, copy=True)
                    for moment in _MOMENTS
                    if (at := f"{moment}/{name}/{key}") in state
                }
                if moments:
                    self._optimizers[name].state[parameter] = moments

    def _owned(self, adapters: Collection[str] | None) -> dict[str, dict[str, nn.Parameter]]:
        """Select what trains for these adapters, value functions included; None: for all."""
        if adapters is None:
            return self.parameters
        if unknown := set(adapters) - set(self.adapters):
            raise ValueError(f"no adapters {sorted(unknown)}; this trains {self.adapters}")
        return {
            name: parameters
            for name, parameters in self.parameters.items()
            if name.removeprefix(VALUE) in adapters
        }

    def _configure(self, name: str, adam: AdamParams) -> None:
        for group in self._optimizers[name].param_groups:
            group["lr"] = self._value_lr if name.startswith(VALUE) else adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
