"""Compute linear layers and their LoRAs as one operation, in fewer passes over memory than PEFT.

PEFT computes ``W x + B(A(x)) * scaling`` as five operations, with three tensors of the output's
size, and autograd adds the input's gradients from both branches. Here the sums ride on the products
with B and A, and the scaling on tensors of rank r. Inputs that are cheap to compute are not kept
for the backward, but computed again: what an RMSNorm gives, and what a gated MLP's last layer gets.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from agentrl_trainer.models.rms_norm import Normed, is_plain, join_norm, same_code


def join_loras(model: PeftModel) -> None:
    """Compute linear layers by ``LoraLinear``, those at the end of an MLP by ``GatedLoraLinear``,
    where one plain adapter is active, in the precision of the layer. Everything else is left to
    PEFT, such as dropout and quantized layers."""
    for module in model.modules():
        if _joinable(module):
            module.forward = MethodType(_linear, module)
        elif is_plain(module):
            join_norm(module)
    for mlp in _joined_mlps(model):
        mlp.forward = MethodType(_gated_mlp, mlp)


def width_computed_again(model: PeftModel) -> int:
    """Return how many numbers a token has that are computed again for the backward."""
    norms = [cast(Any, module).weight for module in model.modules() if is_plain(module)]
    widths = [weight.numel() for weight in norms]
    whole = [width for width in widths if width == max(widths)]  # others normalize single heads
    mlps = [mlp.down_proj.in_features for mlp in _joined_mlps(model)]
    return sum(mlps) + sum(whole[1:])  # the output head, which has no adapter, reads one


def _joined_mlps(model: PeftModel) -> list[Any]:
    """Return the MLPs that compute the input of their ``down_proj`` again."""
    return [m for m in model.modules() if _is_gated(m) and _joinable(m.down_proj)]


def _joinable(module: Any) -> bool:
    return type(module) is Linear and type(module.base_layer) is nn.Linear


def _is_gated(module: Any) -> bool:
    """Whether a module computes ``down_proj(silu(gate_proj(x)) * up_proj(x))``."""
    return same_code(module, LlamaMLP) and type(module.act_fn) in (SiLUActivation, nn.SiLU)


class _Lora(NamedTuple):
    """An adapter that is computed with its layer."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scaling: float


def _active_lora(layer: Linear, dtype: torch.dtype) -> _Lora | None:
    """Return the layer's adapter if it is active, alone, plain, and of the input's precision."""
    if not _joinable(layer):  # merged since
        return None
    name = layer.active_adapters[0] if len(layer.active_adapters) == 1 else ""
    if name not in layer.lora_A or layer.disable_adapters or layer.merged:
        return None
    if name in layer.lora_variant or type(layer.lora_dropout[name]) is not nn.Identity:
        return None
    a, b = cast(Tensor, layer.lora_A[name].weight), cast(Tensor, layer.lora_B[name].weight)
    same = dtype == cast(nn.Linear, layer.base_layer).weight.dtype == a.dtype
    return _Lora(a, b, layer.scaling[name]) if same else None


def _linear(self: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    lora = None if args or kwargs else _active_lora(self, x.dtype)
    if lora is None:
        return Linear.forward(self, x, *args, **kwargs)
    base, rows = cast(nn.Linear, self.base_layer), x.flatten(0, -2)
    y = cast(Tensor, LoraLinear.apply(rows, base.weight, base.bias, *lora, Normed.of(x)))
    return y.view(*x.shape[:-1], -1)  # here, so that a model may change y in place


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    lora = _active_lora(down, gate.dtype)
    if lora is None:
        return down(self.act_fn(gate) * up)
    rows, base = (gate.flatten(0, -2), up.flatten(0, -2)), down.base_layer
    y = cast(Tensor, GatedLoraLinear.apply(*rows, base.weight, base.bias, *lora))
    return y.view(*x.shape[:-1], -1)


class LoraLinear(torch.autograd.Function):
    """``x [rows, in] -> x Wᵀ + bias + scaling * x Aᵀ Bᵀ`` (arXiv:2106.09685), with W [out, in] and
    bias frozen, A [r, in] and B [out, r]. ``normed``: how to make ``x`` again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        normed: Normed | None,
    ) -> Tensor:
        low = x @ a.t()
        ctx.maker, *kept = normed or (None, x)
        ctx.save_for_backward(low, weight, a, b, *kept)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(low, b.t(), alpha=scaling)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor, None, None]:
        low, weight, a, b, *kept = ctx.saved_tensors
        x = kept[0] if ctx.maker is None else ctx.maker(*kept).flatten(0, -2)
        (grad,) = grads
        of_low = torch.mm(grad, b).mul_(ctx.scaling)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(grad, weight).addmm_(of_low, a)
        of_a = of_low.t() @ x
        of_b = torch.mm(grad.t(), low).mul_(ctx.scaling)
        return of_x, None, None, of_a, of_b, None, None


class GatedLoraLinear(torch.autograd.Function):
    """``LoraLinear`` of ``silu(gate) * up`` (SwiGLU, arXiv:2002.05202), both [rows, in]."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        x = F.silu(gate).mul_(up)
        low = x @ a.t()
        ctx.save_for_backward(gate, up, low, weight, a, b)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(low, b.t(), alpha=scaling)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None, None, Tensor, Tensor, None]:
        gate, up, low, weight, a, b = ctx.saved_tensors
        (grad,) = grads
        of_low = torch.mm(grad, b).mul_(ctx.scaling)
        of_b = torch.mm(grad.t(), low).mul_(ctx.scaling)
        of_x = torch.mm(grad, weight).addmm_(of_low, a)
        active = F.silu(gate)
        of_a = of_low.t() @ (active * up)
        of_up = active.mul_(of_x)
        of_gate = torch.ops.aten.silu_backward(of_x.mul_(up), gate)
        return of_gate, of_up, None, None, of_a, of_b, None
