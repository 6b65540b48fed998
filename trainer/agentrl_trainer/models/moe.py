"""LoRA for mixtures of experts: which weights it adapts, and how a layer is computed with it.

Knows: transformers' expert modules, PEFT's ``ParamWrapper``. Does not know: training, sampling.

transformers keeps all experts of a layer in one tensor, ``gate_up_proj`` [E, 2I, H] and
``down_proj`` [E, H, I], so they are no ``nn.Linear`` and PEFT adapts them as ``target_parameters``:
A is [E * r, in], B is [out, r * E], and the update of expert e is ``B_e A_e * alpha / r``.

- Experts are trained, each with a LoRA of its own, of rank ``rank / experts per token``: so a token
  meets as much LoRA as it would in a dense layer, and parameters keep the same share ("LoRA Without
  Regret", Schulman et al. 2025, thinkingmachines.ai/blog/lora). Alpha stays, as 1/r scaling wants.
- Routers are not. Reinforcement learning through a discrete choice has no gradient for the experts
  not chosen, moves all tokens at once, and the sampler's and trainer's choices would drift apart.
  Tinker leaves them alone as well.

Shapes: E experts, K of them per token, T tokens, S = T * K slots, r the experts' rank.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Names of what checkpoints keep expert by expert. Among a config's target_modules PEFT 0.21 reads
# them as the experts', wherever they are, so dense layers of these names become target_parameters.
_BEFORE_FUSION = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj",
                  "w3": "gate_up_proj", "w2": "down_proj"}  # fmt: skip
_TAKEN = frozenset({*_BEFORE_FUSION, "down_proj"})
_SENSES = ("vision", "visual", "audio", "image_embed")  # some decoders hold the towers themselves
# In these PEFT refuses a LoRA of the layer behind the state space: kernels read its weight alone.
_STATE_SPACES = frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"})


class TargetError(ValueError):
    """LoRA targets that this model does not have, or does not let train."""


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One weight of all experts of a layer."""

    owner: nn.Module
    name: str

    @property
    def weight(self) -> nn.Parameter:
        """[E, out, in], or [E, in, out] where ``transposed``."""
        return cast(nn.Parameter, getattr(self.owner, self.name))

    @property
    def transposed(self) -> bool:
        return bool(getattr(self.owner, "is_transposed", False))


def expert_count(config: Any) -> int:
    """Experts of each layer that has any; 0: the model is dense."""
    return _first(config, _COUNTS)


def expert_rank(config: Any, rank: int) -> int:
    """The rank of each expert's LoRA, where other layers have ``rank``."""
    return max(1, rank // max(1, _first(config, _ACTIVE)))


def _first(config: Any, names: Sequence[str]) -> int:
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in names)
    return next((n for n in found if isinstance(n, int)), 0)


def adaptable(model: Any) -> list[str]:
    """Paths of the linear layers and expert weights that adapters may have."""
    linears = [path for path, module in text_modules(model) if isinstance(module, nn.Linear)]
    stacks = list(expert_stacks(model))
    mixture = expert_count(model.config) > 0
    return [path for path in linears if not (mixture and is_router(path))] + stacks


def expert_stacks(model: Any) -> dict[str, ExpertStack]:
    """The experts' weights by path, in the order in which PEFT wraps those of a module."""
    if not (count := expert_count(model.config)):
        return {}
    return {
        f"{path}.{name}": ExpertStack(module, name)
        for path, module in text_modules(model)
        if not isinstance(module, nn.Conv1d)  # its weight has three dimensions as well
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and weight.shape[0] == count and weight.is_floating_point()
    }


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's modules as if PEFT had put nothing around them."""
    inside = "\0"
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside = f"{path}."
            module = cast(nn.Module, module.get_base_layer())
        yield path, module


def is_multimodal(config: Any) -> bool:
    """Whether a model has other inputs than text, for which it has towers."""
    towers = any(getattr(config, f"{sense}_config", None) for sense in ("vision", "audio"))
    return towers or config.get_text_config() is not config


def text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """``own_modules`` that tokens go through; towers for images and sound are left out."""
    if not is_multimodal(model.config):
        yield from own_modules(model)
        return
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in (head, *decoder.modules()) if module is not None}
    for path, module in own_modules(model):
        if id(module) in inside and not any(word in path for word in _SENSES):
            yield path, module


def is_router(path: str) -> bool:
    """Whether a layer chooses among experts: told by its name, for there is no type."""
    return not _ROUTERS.isdisjoint(path.split("."))


def _is_taken(path: str) -> bool:
    return path.rpartition(".")[2] in _TAKEN


# ---- which weights are adapted


def for_experts(config: LoraConfig, model: Any) -> LoraConfig:
    """``config`` with targets that mean for this model what they say; most dense ones: as it is.

    "all-linear" is every linear layer and all experts, without routers and the output embedding. A
    list names layers as PEFT does, by the end of their path; experts go by their names here
    (``gate_up_proj``) or those that checkpoints use (``gate_proj`` and ``up_proj``).

    Raises:
        TargetError: a target is a router, names half of a fused weight, or nothing.
    """
    if not expert_count(model.config):
        if not _is_odd(model):
            return config
        config = copy.deepcopy(config)
        if config.target_modules == "all-linear":
            chosen = _by_default(model)
        else:
            chosen, _ = _named(config.target_modules, adaptable(model), [])
        config.target_modules = _shortest(chosen, model)
        return config
    stacks = expert_stacks(model)
    linears = {p: m for p, m in text_modules(model) if isinstance(m, nn.Linear)}
    if config.target_modules == "all-linear":
        chosen, experts = _by_default(model), list(stacks)
    else:
        chosen, experts = _named(config.target_modules, list(linears), list(stacks))
    quantized = bool(getattr(model, "is_quantized", False))
    taken = [p for p in chosen if _is_taken(p)]
    # Quantized weights are no matrices that could be targets by themselves: these stay as they are.
    by_weight = [] if quantized else [f"{p}.weight" for p in taken]

    changed = copy.deepcopy(config)
    changed.target_modules = _shortest([p for p in chosen if p not in taken], model)
    weights = {
        f"{path}.{name}"
        for path, module in own_modules(model)
        for name, _ in module.named_parameters(recurse=False)
    }
    of_experts = _endings(experts, 2, weights)
    changed.target_parameters = sorted({*of_experts, *_endings(by_weight, 3, weights)})
    if experts and (rank := expert_rank(model.config, config.r)) != config.r:
        changed.rank_pattern = {re.escape(end): rank for end in of_experts}
    return changed


def _is_odd(model: Any) -> bool:
    """Whether PEFT's own reading of targets would be wrong for a dense model."""
    return is_multimodal(model.config) or bool(_left_out(model))


def _by_default(model: Any) -> list[str]:
    """Paths of the linear layers that "all-linear" means."""
    head = model.get_output_embeddings()
    mixture = expert_count(model.config) > 0
    odd = _left_out(model)
    return [
        path
        for path, module in text_modules(model)
        if isinstance(module, (nn.Linear, Conv1D))
        and module is not head
        and not (mixture and is_router(path))
        and path not in odd
    ]


def _left_out(model: Any) -> set[str]:
    """Linear layers in which a LoRA would do nothing, or not the same everywhere.

    Of state spaces the step's: its weight is multiplied by itself, past the layer, so a LoRA beside
    it is not computed, and one merged into it is. Of sparse attention the indexer, which chooses
    keys without a gradient.
    """
    found: set[str] = set()
    modules = dict(own_modules(model))
    for path, module in modules.items():
        owner, _, leaf = path.rpartition(".")
        if not isinstance(module, nn.Linear):
            continue
        step = leaf == "dt_proj" and hasattr(modules[owner], "A_log")
        refused = leaf == "out_proj" and model.config.model_type in _STATE_SPACES
        if step or refused or "indexer" in path.split("."):
            found.add(path)
    return found


def what_is_trained(model: Any, config: LoraConfig) -> str | None:
    """A sentence about ``config`` as ``for_experts`` left it; None: the model is dense."""
    count = expert_count(model.config)
    if not count:
        return None
    stacks = expert_stacks(model)
    targets = config.target_parameters or ()
    layers = {p.rpartition(".")[0] for p in stacks if any(_ends(p, t) for t in targets)}
    rank = next(iter((config.rank_pattern or {}).values()), config.r)
    said = [
        f"each of the {count} experts in {len(layers)} layers has a LoRA of rank {rank}"
        if layers
        else f"the {count} experts of a layer are in no weight that LoRA was put on"
    ]
    said.append("routers stay as they are")
    if getattr(model, "is_quantized", False):
        left = [p for p, m in own_modules(model) if isinstance(m, nn.Linear) and _is_taken(p)]
        said += [f"so do {len(left)} layers that are named like experts: in 4 bits"] if left else []
    return "; ".join(said)


def _named(
    targets: Any, linears: Sequence[str], stacks: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Paths of linear layers and of expert weights that ``targets`` name."""
    if isinstance(targets, str):  # PEFT: a pattern of whole paths
        chosen = [p for p in linears if re.fullmatch(targets, p)]
        experts = [p for p in stacks if re.fullmatch(targets, p)]
        _require(bool(chosen or experts), targets, linears, stacks)
    else:
        chosen, experts = [], []
        fused: dict[str, set[str]] = {}  # path: the names that asked for it
        for target in sorted(targets):
            mine = [p for p in linears if _ends(p, target)]
            owner, _, leaf = target.rpartition(".")
            if leaf in _BEFORE_FUSION:  # between the owner and the weight may be "experts"
                named = [p for p in stacks if _ends(p, _BEFORE_FUSION[leaf])]
                whole = [p for p in named if not owner or f".{owner}." in f".{p}"]
            else:
                whole = [p for p in stacks if _ends(p, target)]
            _require(bool(mine or whole), target, linears, stacks)
            chosen += mine
            for path in whole:
                fused.setdefault(path, set()).add(leaf)
        for path, names in fused.items():
            for both in ({"gate_proj", "up_proj"}, {"w1", "w3"}):
                if len(both & names) == 1:
                    raise TargetError(
                        f"targets: {' and '.join(sorted(both))} of the experts are one weight in "
                        "this model: name both, or gate_up_proj, or neither."
                    )
            experts.append(path)
    if routers := [p for p in chosen if is_router(p)]:
        raise TargetError(
            f"targets: {routers[0]} chooses the experts, and routers are not trained. Leave "
            f"{routers[0].rpartition('.')[2]!r} out."
        )
    return list(dict.fromkeys(chosen)), experts


def _require(found: bool, target: str, linears: Sequence[str], stacks: Sequence[str]) -> None:
    if found:
        return
    known = sorted({p.rpartition(".")[2] for p in (*linears, *stacks) if not is_router(p)})
    raise TargetError(f"targets: {target!r} is nothing to train here; there is {', '.join(known)}.")


def _ends(path: str, target: str) -> bool:
    """Whether PEFT takes ``path`` for what ``target`` names."""
    return path == target or path.endswith(f".{target}")


def _endings(chosen: Sequence[str], parts: int, others: Set[str]) -> list[str]:
    """Last parts of the paths, the same for all layers, where they name no other weight as well."""
    others = others - set(chosen)
    short = {path: ".".join(path.split(".")[-parts:]) for path in chosen}
    clash = {end for end in short.values() if any(_ends(path, end) for path in others)}
    return list(dict.fromkeys(path if end in clash else end for path, end in short.items()))


def _shortest(chosen: Sequence[str], model: Any) -> list[str]:
    """Leaf names where all modules of the name are meant, else whole paths."""
    wanted = set(chosen)
    others = {p.rpartition(".")[2] for p, _ in own_modules(model) if p not in wanted}
    leaf = {p: p.rpartition(".")[2] for p in chosen}
    return sorted({name if name not in others else p for p, name in leaf.items()})


# ---- adapters on disk


def places(
    target_parameters: Sequence[str], stacks: Mapping[str, ExpertStack]
) -> dict[str, tuple[str, ExpertStack]]:
    """What PEFT calls the weights of experts in a file: their path there to theirs in the model.

    A module's second weight wraps the first, so the first is found under one more "base_layer".
    """
    wanted = [p for p in stacks if any(_ends(p, t) for t in target_parameters)]
    by_module: dict[str, list[str]] = {}
    for path in wanted:
        by_module.setdefault(path.rpartition(".")[0], []).append(path)
    return {
        module + ".base_layer" * depth: (path, stacks[path])
        for module, paths in by_module.items()
        for depth, path in enumerate(reversed(paths))
    }


def factors(a: Tensor, b: Tensor, stack: ExpertStack) -> tuple[Tensor, Tensor]:
    """PEFT's A [E * r, in] and B [out, r * E], such that ``b @ a`` is the update of the weight."""
    by_expert = _by_expert(a, b, stack.weight.shape[0])
    if stack.transposed:
        return by_expert[1].transpose(1, 2), by_expert[0].transpose(1, 2)
    return by_expert


def _by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """[E, r, in] and [E, out, r]. In B the expert is the quicker index: PEFT's own layout."""
    return (
        a.reshape(experts, -1, a.shape[-1]),
        b.reshape(b.shape[0], -1, experts).permute(2, 0, 1),
    )


def scaling(config: Mapping[str, Any], path: str, rank: int) -> float:
    """alpha / rank as PEFT has it for ``path``, of a folder's ``adapter_config.json``."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    alpha = cast(float, patterns.get(get_pattern_key(list(patterns), path), config["lora_alpha"]))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


@contextlib.contextmanager
def no_false_warnings() -> Iterator[None]:
    """Around attaching and loading: PEFT looks for ``rank_pattern`` among modules alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following rank_pattern keys did not match")
        yield


# ---- computing with them


def beside_the_weights(model: nn.Module) -> None:
    """Makes wrapped weights be used as they are, with the adapters' products beside them.

    PEFT adds the update to a copy of all experts' weights in every forward, which a backward would
    keep for each layer: of a model with 30 billion parameters, another 30 billion. Here a token
    meets the small matrices of its own experts, in the adapter's precision.
    Expert modules with an interface of their own are left to PEFT.
    """
    for wrapper in list(_outermost(model)):
        inner = wrapper.get_base_layer()
        forward: Callable[..., Tensor] | None = None
        if isinstance(inner, nn.Linear):
            forward = _linear_forward
        elif _is_standard(inner):
            forward = _experts_forward
        if forward is not None:
            # Of the instance: PEFT knows wrappers by the name of their class.
            cast(Any, wrapper).forward = MethodType(forward, wrapper)


def _outermost(model: nn.Module) -> Iterator[ParamWrapper]:
    inner = {id(m.base_layer) for m in model.modules() if isinstance(m, ParamWrapper)}
    return (m for m in model.modules() if isinstance(m, ParamWrapper) and id(m) not in inner)


def _is_standard(experts: nn.Module) -> bool:
    """Whether the module is one that transformers' ``use_experts_implementation`` decorates."""
    known = all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed"))
    return known and not getattr(experts, "has_post_expert_norm", False)


def _active(wrapper: ParamWrapper) -> list[tuple[Tensor, Tensor, float]]:
    return [
        (
            wrapper.lora_A[name].weight,  # pyright: ignore[reportReturnType]
            wrapper.lora_B[name].weight,
            wrapper.scaling[name],
        )
        for name in wrapper.active_adapters
        if name in wrapper.lora_A
    ]


def _linear_forward(self: ParamWrapper, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As PEFT's LoRA of a linear layer."""
    out = self.base_layer(x, *args, **kwargs)
    if self.disable_adapters or self.merged:
        return out
    for a, b, scale in _active(self):
        out = out + (F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(out.dtype)
    return out


def _experts_forward(
    self: ParamWrapper, hidden: Tensor, chosen: Tensor, weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """``hidden`` [T, H]; ``chosen`` experts and their ``weights`` [T, K]; returns [T, H]."""
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
            down, up = _by_expert(a, b, weight.shape[0])
            small = grouped(x.to(a.dtype), down.transpose(1, 2), ends)
            out = out + (grouped(small, up.transpose(1, 2), ends) * scale).to(out.dtype)
        return out

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = product(first, hidden[order // chosen.shape[1]])
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = product("down_proj", inner) * weights.flatten()[order, None]
    back = out[order.argsort()].view(*chosen.shape, -1)
    return back.sum(1).to(hidden.dtype)


_ALIGNED = 16  # bytes; what grouped kernels want of every row


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """``x[ends[e - 1] : ends[e]] @ weights[e]`` for each e; x [S, in], weights [E, in, out]."""
    x = x.to(weights.dtype)
    if hasattr(F, "grouped_mm") and weights.dtype in (torch.float32, torch.bfloat16, torch.float16):
        short = -weights.shape[1] % (_ALIGNED // weights.element_size())
        wide = -weights.shape[2] % (_ALIGNED // weights.element_size())
        if short or wide:  # ranks are small: zeros change nothing
            weights = F.pad(weights, (0, wide, 0, short))
            x = F.pad(x, (0, short))
        elif 1 not in weights.stride()[1:]:
            weights = weights.contiguous()
        out = F.grouped_mm(x, weights, offs=ends)
        return out[:, : out.shape[1] - wide] if wide else out
    parts = x.tensor_split(ends[:-1].cpu().long())
    return torch.cat([part @ weights[e] for e, part in enumerate(parts)])
