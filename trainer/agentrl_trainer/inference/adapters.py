"""LoRA weights for sampling: several adapters, several versions, one base model.

Knows: PEFT folders and the model's parameters. Does not know: requests, caches.

Two ways to compute the same thing. *Merged*: for each adapter version a copy of the adapted weight
matrices with the update added in, put in place by swapping ``Parameter.data`` (and a second copy of
those, as ``lean.Product`` wants them, of up to 50 million parameters). It halves the time
of a step of a small model, where LoRA's extra little products are mostly Python. *Unmerged*: PEFT's
own layers, for models too large to copy, or in half precision, where a merge rounds the update
away and sampling would no longer be the policy the trainer computes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import torch
from peft import (
    LoraModel,
    PeftConfig,
    PeftModel,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from agentrl_trainer.inference.llama_cpu import LeanDecoder, Product
from agentrl_trainer.models.loading import BaseModel, ModelError, evaluation_mode
from agentrl_trainer.models.lora import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from agentrl_trainer.models.lora_targets import no_false_warnings
from agentrl_trainer.models.moe import (
    ExpertStack,
    expert_stacks,
    keep_weights_unmerged,
    lora_scaling,
    split_by_expert,
    stacks_in_file,
)

MERGE_BELOW = 200_000_000
"""Parameters of the base model up to which adapters are merged (float32 only)."""

_serial = itertools.count()
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An adapter version read from disk, ready to be used on the engine's thread."""

    folder: Path
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Merged: module name to adapted weight. Unmerged: empty."""
    products: list[Product] | None = None
    """The same weights as the lean decoder uses them, if there is one."""
    key: str = field(default_factory=lambda: f"v{next(_serial)}")
    """What PEFT knows it by: unique, since two versions of an adapter live side by side."""


class AdapterWeights(Protocol):
    def prepare(self, folder: str | Path) -> Prepared:
        """Read and check an adapter folder. Any thread; does not touch the model."""
        ...

    def install(self, prepared: Prepared) -> None: ...

    def activate(self, prepared: Prepared | None) -> None:
        """Make the next forwards use this adapter; None is the base model."""
        ...

    def drop(self, prepared: Prepared) -> None: ...


def why_not_merged(base: BaseModel, merge_below: int = MERGE_BELOW) -> str | None:
    """Why adapters stay beside the weights; None: they are to be merged into copies of them."""
    if getattr(base.model, "is_quantized", False):
        return "its weights are quantized"
    if base.dtype != torch.float32:
        return f"its weights are {str(base.dtype).removeprefix('torch.')}"
    if (size := sum(p.numel() for p in base.model.parameters())) >= merge_below:
        return f"it has {size / 1e6:.0f} million parameters, {merge_below / 1e6:.0f} or more"
    return None


class MergedWeights:
    """``lean``: the decoder that computes with them, if the model's own modules do not."""

    def __init__(self, base: BaseModel, lean: LeanDecoder | None = None) -> None:
        self._lean = lean
        linears = {
            name: module
            for name, module in base.model.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D))
        }
        known = {id(cast(torch.nn.Module, base.model.get_input_embeddings()).weight)}
        for linear in linears.values():
            if id(linear.weight) in known:
                # A Parameter of its own, to the same storage: an adapter of a tied head is none of
                # the embeddings, and layers with a weight in common (Zamba's) have each their own.
                linear.weight = torch.nn.Parameter(linear.weight.data, linear.weight.requires_grad)
            known.add(id(linear.weight))
        self._stacks = expert_stacks(base.model)
        self._adapted: dict[str, torch.nn.Linear | Conv1D | ExpertStack] = {
            **linears,
            **self._stacks,
        }
        # The Parameters stay; only the storage they point at changes.
        self._original = {name: m.weight.data for name, m in self._adapted.items()}
        self._changed: set[str] = set()
        self._active: Prepared | None = None

    @torch.no_grad()
    def prepare(self, folder: str | Path) -> Prepared:
        folder = Path(folder)
        merged: dict[str, torch.Tensor] = {}
        for name, (a, b, scale) in read_lora(folder, self._stacks).items():
            weight = self._original.get(name)
            if weight is None:
                raise ModelError(f"adapter: {folder} adapts {name!r}: no linear layer here.")
            if isinstance(self._adapted[name], Conv1D):  # GPT-2's: its weight is [in, out]
                a, b = b.T, a.T
            if (*b.shape[:-1], a.shape[-1]) != tuple(weight.shape):
                raise ModelError(
                    f"adapter: {folder} was trained on another model: {name} is "
                    f"{tuple(weight.shape)} here, {(*b.shape[:-1], a.shape[-1])} there."
                )
            update = (b.to(weight.device).float() @ a.to(weight.device).float()) * scale
            merged[name] = (weight.float() + update).to(weight.dtype)
        products = self._lean.adapted(merged) if self._lean is not None else None
        return Prepared(folder, merged, products)

    def install(self, prepared: Prepared) -> None:
        pass

    def activate(self, prepared: Prepared | None) -> None:
        if prepared is self._active:
            return
        weights = prepared.weights if prepared else {}
        for name in self._changed - weights.keys():
            self._adapted[name].weight.data = self._original[name]
        for name, weight in weights.items():
            self._adapted[name].weight.data = weight
        if self._lean is not None:
            self._lean.products = (prepared and prepared.products) or self._lean.own
        self._changed = set(weights)
        self._active = prepared

    def drop(self, prepared: Prepared) -> None:
        if prepared is self._active:
            self.activate(None)


class PeftWeights:
    """PEFT injects its layers into the base model's own modules, which the engine goes on using."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._stacks = expert_stacks(base.model)
        self._peft: PeftModel | None = None
        self._active: Prepared | None = None

    def prepare(self, folder: str | Path) -> Prepared:
        read_lora(Path(folder), self._stacks)
        return Prepared(Path(folder))

    def install(self, prepared: Prepared) -> None:
        # Inference tensors made here could not be told from parameters later: leave the mode.
        with torch.inference_mode(False), torch.no_grad(), no_false_warnings():
            try:
                self._add(prepared)
            except BaseException:
                self._remove(prepared)
                raise

    def _add(self, prepared: Prepared) -> None:
        if self._peft is None:
            # Layers first and weights afterwards: if those are refused, the layers are still known.
            config = PeftConfig.from_pretrained(str(prepared.folder))
            config.inference_mode, config.base_model_name_or_path = True, None
            self._peft = cast(
                PeftModel, get_peft_model(self._base.model, config, adapter_name=prepared.key)
            )
        read_adapter(self._peft, prepared.key, prepared.folder)
        keep_weights_unmerged(self._peft)
        evaluation_mode(self._peft)
        self._use(prepared)

    def _remove(self, prepared: Prepared) -> None:
        """PEFT turns on what it adds, and what is left when an adapter is deleted."""
        if self._peft is None:
            return
        if prepared.key in self._peft.peft_config:
            self._peft.delete_adapter(prepared.key)
        if self._active is None:
            cast(LoraModel, self._peft.base_model).disable_adapter_layers()
        else:
            self._peft.set_adapter(self._active.key)

    def activate(self, prepared: Prepared | None) -> None:
        if prepared is self._active or self._peft is None:
            return
        if prepared is None:
            cast(LoraModel, self._peft.base_model).disable_adapter_layers()
            self._active = None
        else:
            self._use(prepared)

    def _use(self, prepared: Prepared) -> None:
        assert self._peft is not None
        if self._active is None:  # set_adapter() would not turn them on
            cast(LoraModel, self._peft.base_model).enable_adapter_layers()
        self._peft.set_adapter(prepared.key)
        self._active = prepared

    def drop(self, prepared: Prepared) -> None:
        if self._peft is None:
            return
        if prepared is self._active:
            self.activate(None)
        if prepared.key in self._peft.peft_config:
            self._peft.delete_adapter(prepared.key)


def read_lora(
    folder: Path, stacks: Mapping[str, ExpertStack]
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Weight to (A ``[rank, in]``, B ``[out, rank]``, scale) of a plain LoRA.

    A linear layer's weight goes by the layer's name. Those of experts, by their own: they are the
    model's ``stacks``, and have A and B for each expert, such that B A has the weight's shape.
    """
    for part in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / part).is_file():
            raise ModelError(f"adapter: {folder / part} is missing; is it a PEFT adapter folder?")
    config = json.loads((folder / CONFIG_FILE).read_text())
    if config.get("peft_type") != "LORA":
        raise ModelError(f"adapter: {folder} is {config.get('peft_type')}, not a LoRA.")
    unusual = [name for name in ("use_dora", "modules_to_save", "lora_bias") if config.get(name)]
    if config.get("bias", "none") != "none":
        unusual.append("bias")
    if unusual:
        raise ModelError(f"adapter: {folder} uses {', '.join(unusual)}, which is not supported.")
    tensors = load_file(str(folder / WEIGHTS_FILE))
    of_experts = stacks_in_file(config.get("target_parameters") or (), stacks)
    found: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        stem = key.removesuffix(".lora_A.weight")
        b = tensors.get(f"{stem}.lora_B.weight")
        if b is None:
            raise ModelError(f"adapter: {folder} has {key} but no {stem}.lora_B.weight.")
        name = stem.removeprefix(_PREFIX)
        if name in of_experts:
            name, stack = of_experts[name]
            rank = a.shape[0] // stack.weight.shape[0]
            a, b = split_by_expert(a, b, stack)
        else:
            rank = a.shape[0]
        found[name] = (a, b, lora_scaling(config, name, rank))
    if 2 * len(found) != len(tensors):
        odd = sorted(k for k in tensors if ".lora_A." not in k and ".lora_B." not in k)[:3]
        raise ModelError(f"adapter: {folder} has tensors which are no plain LoRA: {odd}.")
    return found
