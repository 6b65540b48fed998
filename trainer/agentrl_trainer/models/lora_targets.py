"""Choose which weights of a model LoRA adapts, and name them as PEFT wants.

``targets`` is "all-linear", a pattern of whole paths, or a list of names as PEFT reads them: by the
end of a path. PEFT's own reading is right for most dense models. Mixtures of experts, multimodal
models and those with layers that must not be adapted get explicit targets.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence, Set
from typing import Any, cast

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from agentrl_trainer.models.loading import is_multimodal
from agentrl_trainer.models.moe import expert_count, expert_rank
from agentrl_trainer.models.sources import ModelError

_SENSES = ("vision", "visual", "audio", "image_embed")  # some decoders hold the towers themselves
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
# Names of what checkpoints keep expert by expert. Among a config's target_modules PEFT 0.21 reads
# them as the experts', wherever they are, so dense layers of these names become target_parameters.
_BEFORE_FUSION = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj",
                  "w3": "gate_up_proj", "w2": "down_proj"}  # fmt: skip
_EXPERT_NAMES = frozenset({*_BEFORE_FUSION, "down_proj"})
# In these PEFT refuses a LoRA of the layer behind the state space: kernels read its weight alone.
_STATE_SPACES = frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"})


def adaptable(model: Any) -> list[str]:
    """List the paths of the linear layers and expert weights that adapters may have."""
    mixture = expert_count(model.config) > 0
    return [p for p in _linears(model) if not (mixture and _is_router(p))] + _expert_stacks(model)


def resolve_targets(config: LoraConfig, model: Any) -> LoraConfig:
    """Replace targets by ones that PEFT reads as they are meant; returns the changed ``config``.

    "all-linear" is every linear layer and all experts, without routers and the output embedding.
    Experts go by their names in the model (``gate_up_proj``) or those that checkpoints use
    (``gate_proj`` and ``up_proj``).

    Raises:
        ModelError: a target is a router, names half of a fused weight, or nothing.
    """
    mixture = expert_count(model.config) > 0
    if not ((left_out := _left_out(model)) or mixture or is_multimodal(model.config)):
        return config
    stacks = _expert_stacks(model)
    if config.target_modules == "all-linear":
        head, experts = model.get_output_embeddings(), stacks
        chosen = [
            path
            for path, module in _text_modules(model)
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head
            if path not in left_out and not (mixture and _is_router(path))
        ]
    else:
        chosen, experts = _named(config.target_modules, _linears(model), stacks)
    expert_like = [p for p in chosen if mixture and _leaf(p) in _EXPERT_NAMES]
    wanted = {p for p in chosen if p not in expert_like}
    others = {_leaf(p) for p, _ in _own_modules(model) if p not in wanted}
    config.target_modules = sorted({p if _leaf(p) in others else _leaf(p) for p in wanted})
    # Quantized weights are no matrices that could be targets by themselves: they are not adapted.
    quantized = bool(getattr(model, "is_quantized", False))
    as_weights = [] if quantized else [f"{p}.weight" for p in expert_like]
    weights = {
        f"{path}.{name}"
        for path, module in _own_modules(model)
        for name, _ in module.named_parameters(recurse=False)
    }
    of_experts = _endings(experts, 2, weights)
    config.target_parameters = sorted({*of_experts, *_endings(as_weights, 3, weights)}) or None
    if experts and (rank := expert_rank(model.config, config.r)) != config.r:
        config.rank_pattern = {re.escape(end): rank for end in of_experts}
    return config


def what_is_trained(model: Any, config: LoraConfig) -> str | None:
    """Describe a ``config`` of ``resolve_targets`` in a sentence; None if the model is dense."""
    if not (count := expert_count(model.config)):
        return None
    targets = config.target_parameters or ()
    stacks = _expert_stacks(model)
    layers = {p.rpartition(".")[0] for p in stacks if any(_names(t, p) for t in targets)}
    rank = next(iter((config.rank_pattern or {}).values()), config.r)
    said = f"the {count} experts of a layer are in no weight that LoRA was put on"
    if layers:
        said = f"each of the {count} experts in {len(layers)} layers has a LoRA of rank {rank}"
    said += "; routers stay as they are"
    left = [p for p in _linears(model) if _leaf(p) in _EXPERT_NAMES]
    if left and getattr(model, "is_quantized", False):
        said += f"; so do {len(left)} layers that are named like experts: in 4 bits"
    return said


@contextlib.contextmanager
def no_false_warnings() -> Iterator[None]:
    """Silence warnings of PEFT that do not apply here."""
    with warnings.catch_warnings():
        for message in (
            "The following rank_pattern keys did not match",  # it looks among modules alone
            "Adapter name '.*' should not be contained",  # names such as "a": part of its "lora_"
            "`is_gradient_checkpointing` is deprecated",  # it reads what transformers renamed
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


# ---- which layers


def _own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the model's modules as they are without PEFT's wrappers."""
    inside = "\0"
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside = f"{path}."
            module = cast(nn.Module, module.get_base_layer())
        yield path, module


def _text_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """List the modules that tokens go through; towers of other inputs are left out."""
    found = list(_own_modules(model))
    if not is_multimodal(model.config):
        return found
    inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return [(p, m) for p, m in found if m in inside and not any(word in p for word in _SENSES)]


def _linears(model: Any) -> list[str]:
    return [path for path, module in _text_modules(model) if isinstance(module, nn.Linear)]


def _expert_stacks(model: Any) -> list[str]:
    """List the paths of the experts' weights, in the order in which PEFT wraps those of a module.

    A weight of all experts of a layer is [E, out, in], or [E, in, out].
    """
    count = expert_count(model.config)
    return [
        f"{path}.{name}"
        for path, module in (_text_modules(model) if count else ())
        if not isinstance(module, nn.Conv1d)  # its weight has three dimensions as well
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and weight.shape[0] == count and weight.is_floating_point()
    ]


def _left_out(model: Any) -> set[str]:
    """Find linear layers in which a LoRA would have no effect, or not the same everywhere.

    In state spaces that is the step's layer: its weight is multiplied by itself, past the layer, so
    a LoRA beside it is not computed, but one merged into it is. In sparse attention it is the
    indexer, which chooses keys without a gradient.
    """
    modules = dict(_own_modules(model))
    state_space = model.config.model_type in _STATE_SPACES

    def refused(path: str) -> bool:
        owner, _, leaf = path.rpartition(".")
        step = leaf == "dt_proj" and hasattr(modules[owner], "A_log")
        return step or (leaf == "out_proj" and state_space) or "indexer" in path.split(".")

    return {path for path, m in modules.items() if isinstance(m, nn.Linear) and refused(path)}


def _is_router(path: str) -> bool:
    """Tell by its name whether a layer chooses among experts: there is no type for it."""
    return not _ROUTERS.isdisjoint(path.split("."))


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


# ---- what targets name


def _names(target: str, path: str) -> bool:
    """Tell whether PEFT takes ``path`` for what ``target`` names."""
    return path == target or path.endswith(f".{target}")


def _named(
    targets: Any, linears: Sequence[str], stacks: Sequence[str]
) -> tuple[list[str], list[str]]:
    """List the paths of linear layers and of expert weights that ``targets`` name."""
    chosen: list[str] = []
    fused: dict[str, set[str]] = {}  # by path, the targets' names for it
    pattern = isinstance(targets, str)  # of whole paths, as in PEFT
    for target in [targets] if pattern else sorted(targets):
        if pattern:
            linear = [p for p in linears if re.fullmatch(target, p)]
            experts = [p for p in stacks if re.fullmatch(target, p)]
        else:
            linear = [p for p in linears if _names(target, p)]
            owner, _, leaf = target.rpartition(".")
            experts = [p for p in stacks if _names(_BEFORE_FUSION.get(leaf, target), p)]
            if leaf in _BEFORE_FUSION:  # between the owner and the weight may be "experts"
                experts = [p for p in experts if not owner or f".{owner}." in f".{p}"]
        if not linear and not experts:
            known = sorted({_leaf(p) for p in (*linears, *stacks) if not _is_router(p)})
            raise ModelError(
                f"targets: {target!r} is nothing to train here; there is {', '.join(known)}."
            )
        chosen += linear
        for path in experts:
            fused.setdefault(path, set()).add("" if pattern else _leaf(target))
    for halves in ({"gate_proj", "up_proj"}, {"w1", "w3"}):
        if any(len(halves & said) == 1 for said in fused.values()):
            raise ModelError(
                f"targets: {' and '.join(sorted(halves))} of the experts are one weight in "
                "this model: name both, or gate_up_proj, or neither."
            )
    if routers := [p for p in chosen if _is_router(p)]:
        raise ModelError(
            f"targets: {routers[0]} chooses the experts, and routers are not trained. Leave "
            f"{_leaf(routers[0])!r} out."
        )
    return list(dict.fromkeys(chosen)), [*fused]


def _endings(chosen: Sequence[str], parts: int, weights: Set[str]) -> list[str]:
    """Shorten paths to their last parts, the same for all layers, if these name nothing else."""
    others = weights - set(chosen)
    short = {path: ".".join(path.split(".")[-parts:]) for path in chosen}
    clash = {end for end in short.values() if any(_names(end, path) for path in others)}
    return list(dict.fromkeys(path if end in clash else end for path, end in short.items()))
