"""Adapt mixtures of experts with LoRA: the layout of their weights, and how a layer is computed.

Knows transformers' expert modules and PEFT's ``ParamWrapper``, not training or sampling.

transformers keeps all experts of a layer in one tensor, ``gate_up_proj`` [E, 2I, H] and
``down_proj`` [E, H, I], so they are no ``nn.Linear`` and PEFT adapts them as ``target_parameters``:
A is [E * r, in], B is [out, r * E], and the update of expert e is ``B_e A_e * alpha / r``.

- Each expert has a LoRA of its own, of rank ``rank / experts per token``: so a token meets as much
  LoRA as in a dense layer, and parameters keep the same share ("LoRA Without Regret", Schulman et
  al. 2025, thinkingmachines.ai/blog/lora). Alpha stays, as 1/r scaling wants.
- Routers are not trained. Reinforcement learning through a discrete choice has no gradient for the
  experts not chosen, moves all tokens at once, and the sampler's and trainer's choices would drift
  apart. Tinker leaves them alone as well.

Shapes: E experts, K of them per token, T tokens, S = T * K slots, r the experts' rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")


def expert_count(config: Any, names: Sequence[str] = _COUNTS) -> int:
    """Return the number of experts of each layer that has any; 0 if the model is dense."""
    found = (getattr(config.get_text_config(), name, None) for name in names)
    return next((n for n in found if isinstance(n, int)), 0)


def expert_rank(config: Any, rank: int) -> int:
    """Return the rank of each expert's LoRA, if other layers have ``rank``."""
    return max(1, rank // max(1, expert_count(config, _ACTIVE)))


def lora_scaling(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Compute alpha / rank as PEFT does for ``path``, from a folder's ``adapter_config.json``."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    alpha = cast(float, patterns.get(get_pattern_key(list(patterns), path), config["lora_alpha"]))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def keep_weights_unmerged(model: nn.Module) -> None:
    """Compute adapters of ``target_parameters`` beside their weights, as LoRA of a layer is.

    PEFT adds the update to a copy of all experts' weights in every forward, which a backward would
    keep for each layer. Here a token meets the small matrices of its own experts, in the adapter's
    precision. Modules that are neither linear nor standard experts are left to PEFT.
    """
    inner = {id(m.base_layer) for m in model.modules() if isinstance(m, ParamWrapper)}
    for wrapper in model.modules():
        if not isinstance(wrapper, ParamWrapper) or id(wrapper) in inner:
            continue
        base = wrapper.get_base_layer()
        # transformers' ``use_experts_implementation`` gives modules that it decorates these.
        known = all(hasattr(base, name) for name in ("has_gate", "has_bias", "is_transposed"))
        if isinstance(base, nn.Linear):
            forward = _linear_forward
        elif known and not getattr(base, "has_post_expert_norm", False):
            forward = _experts_forward
        else:
            continue
        # Set on the instance: PEFT knows wrappers by the name of their class.
        cast(Any, wrapper).forward = MethodType(forward, wrapper)


def _linear_forward(self: ParamWrapper, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out = self.base_layer(x, *args, **kwargs)
    if self.disable_adapters or self.merged:
        return out
    for a, b, scale in _active(self):
        out = out + (F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(out.dtype)
    return out


def _experts_forward(
    self: ParamWrapper, hidden: Tensor, chosen: Tensor, weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute a layer of experts and their LoRA.

    ``hidden`` [T, H]; ``chosen`` experts and their ``weights`` [T, K]; returns [T, H].
    """
    wrappers: dict[str, ParamWrapper] = {}
    experts: Any = self
    while isinstance(experts, ParamWrapper):
        wrappers[experts.parameter_name] = experts
        experts = experts.base_layer
    if self.disable_adapters or self.merged:
        return experts(hidden, chosen, weights, *args, **kwargs)

    order = chosen.flatten().argsort(stable=True)  # slots, those of an expert side by side
    expert = chosen.flatten()[order]
    numbers = torch.arange(experts.num_experts, device=expert.device)
    ends = torch.searchsorted(expert, numbers, right=True).int()

    def product(name: str, x: Tensor) -> Tensor:
        weight: Tensor = getattr(experts, name)
        out = grouped(x, weight if experts.is_transposed else weight.transpose(1, 2), ends)
        if experts.has_bias:
            out = out + getattr(experts, f"{name}_bias")[expert]
        for a, b, scale in _active(wrappers[name]) if name in wrappers else ():
            down = a.reshape(weight.shape[0], -1, a.shape[-1])  # [E, r, in]
            # [E, out, r]: in PEFT's B the expert is the faster index.
            up = b.reshape(b.shape[0], -1, weight.shape[0]).permute(2, 0, 1)
            small = grouped(x.to(a.dtype), down.transpose(1, 2), ends)
            out = out + (grouped(small, up.transpose(1, 2), ends) * scale).to(out.dtype)
        return out

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = product(first, hidden[order // chosen.shape[1]])
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = product("down_proj", inner) * weights.flatten()[order, None]
    back = out[order.argsort()].view(*chosen.shape, -1)
    return back.sum(1).to(hidden.dtype)


def _active(wrapper: ParamWrapper) -> list[tuple[Tensor, Tensor, float]]:
    """List A, B and the scaling of the adapters that are switched on."""
    a, b, scaling = cast(Any, (wrapper.lora_A, wrapper.lora_B, wrapper.scaling))
    return [(a[n].weight, b[n].weight, scaling[n]) for n in wrapper.active_adapters if n in a]


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute ``x[ends[e - 1] : ends[e]] @ weights[e]``; x [S, in], weights [E, in, out]."""
    x = x.to(weights.dtype)
    if hasattr(F, "grouped_mm") and weights.dtype in (torch.float32, torch.bfloat16, torch.float16):
        aligned = 16 // weights.element_size()  # kernels want rows of 16 bytes
        short, wide = -weights.shape[1] % aligned, -weights.shape[2] % aligned
        if short or wide:  # ranks are small: zeros change nothing
            weights = F.pad(weights, (0, wide, 0, short))
            x = F.pad(x, (0, short))
        elif 1 not in weights.stride()[1:]:
            weights = weights.contiguous()
        out = F.grouped_mm(x, weights, offs=ends)
        return out[:, : out.shape[1] - wide] if wide else out
    parts = x.tensor_split(ends[:-1].cpu().long())
    return torch.cat([part @ weights[e] for e, part in enumerate(parts)])
