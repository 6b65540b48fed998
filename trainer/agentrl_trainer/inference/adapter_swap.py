"""LoRA adapters for sampling: read versions from disk and swap them in.

Knows PEFT folders and the model's parameters, not requests or caches.

The model computes with an adapter in one of three ways. *Merged*: each version has a copy of the
adapted weight matrices with the update added: products of ``LlamaCpuForward``, or tensors put in
place by swapping ``Parameter.data``. It halves the time of a step of a small model, where LoRA's
extra products are mostly Python. *Unmerged*: PEFT's
own layers, for models too large to copy, or in half precision, where a merge rounds the update
away and sampling would no longer be the policy that the trainer computes. *Beside rounded weights*:
see ``cpu.linear_products``.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from peft import LoraModel, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from agentrl_trainer.inference.cpu.linear_products import Linear
from agentrl_trainer.inference.llama_cpu import LlamaCpuForward
from agentrl_trainer.models.loading import BaseModel, evaluation_mode
from agentrl_trainer.models.lora import read_adapter
from agentrl_trainer.models.lora_targets import no_false_warnings
from agentrl_trainer.models.moe import expert_count, keep_weights_unmerged, lora_scaling
from agentrl_trainer.models.saved_lora import CONFIG_FILE, WEIGHTS_FILE
from agentrl_trainer.models.sources import ModelError

MERGE_BELOW = 200_000_000
"""Adapters are merged for base models of fewer parameters (float32 only)."""

_serial = itertools.count()


@dataclass(slots=True, eq=False)
class PreparedAdapter:
    """An adapter version read from disk, ready to be used on the engine's thread."""

    folder: Path
    loras: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)
    """What ``read_lora`` returns, where weights are merged."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Adapted weight by module name, where the modules compute with merged ones; else empty."""
    products: Sequence[Linear] | None = None
    """The same weights for ``LlamaCpuForward``, if that runs the model; made again at need."""
    key: str = field(default_factory=lambda: f"v{next(_serial)}")
    """PEFT's name for it: unique, since two versions of an adapter live side by side."""


class AdapterWeights(ABC):
    """How the model computes with adapters. Only ``prepare`` is for any thread."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._active: PreparedAdapter | None = None

    @abstractmethod
    def prepare(self, folder: Path) -> PreparedAdapter:
        """Read and check an adapter folder without touching the model.

        Raises:
            ModelError: the folder holds no plain LoRA of this model.
        """

    def install(self, prepared: PreparedAdapter) -> None:
        """Make an adapter known to the model."""
        return

    def activate(self, prepared: PreparedAdapter | None) -> None:
        """Make the next forwards use this adapter; None is the base model."""
        if prepared is not self._active:
            self._use(prepared)
            self._active = prepared

    def activate_modules(self, prepared: PreparedAdapter | None) -> None:
        """Make the model's own modules compute with it, too: they score given tokens."""
        self.activate(prepared)

    def drop(self, prepared: PreparedAdapter) -> None:
        if prepared is self._active:
            self.activate(None)

    def rest(self, adapters: Iterable[PreparedAdapter]) -> None:
        """Free what the next use of these adapters, or of the base model, makes again."""
        return

    @abstractmethod
    def _use(self, prepared: PreparedAdapter | None) -> None: ...


def why_not_merged(base: BaseModel, merge_below: float = MERGE_BELOW) -> str | None:
    """Say why adapters are not merged into copies of the weights; None if they are."""
    if expert_count(base.model.config):
        return "it is a mixture of experts"
    if getattr(base.model, "is_quantized", False):
        return "its weights are quantized"
    if base.dtype != torch.float32:
        return f"its weights are {str(base.dtype).removeprefix('torch.')}"
    if (size := sum(p.numel() for p in base.model.parameters())) >= merge_below:
        return f"it has {size / 1e6:.0f} million parameters, {merge_below / 1e6:.0f} or more"
    return None


class MergedWeights(AdapterWeights):
    """Swaps the products of ``lean`` if that runs the model, else ``Parameter.data``."""

    def __init__(self, base: BaseModel, lean: LlamaCpuForward | None) -> None:
        super().__init__(base)
        self._lean = lean
        self._adapted: dict[str, torch.nn.Linear | Conv1D] = {
            name: module
            for name, module in base.model.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D))
        }
        known = {id(cast(torch.nn.Module, base.model.get_input_embeddings()).weight)}
        for linear in self._adapted.values():
            if id(linear.weight) in known:
                # Untie: a Parameter of its own over the same storage, because an adapter of a tied
                # head must not change the embeddings, nor other layers with this weight (Zamba's).
                linear.weight = torch.nn.Parameter(linear.weight.data, linear.weight.requires_grad)
            known.add(id(linear.weight))
        # The Parameters stay; only the storage they point at changes.
        self._original = {name: m.weight.data for name, m in self._adapted.items()}
        self._replaced: set[str] = set()

    def prepare(self, folder: Path) -> PreparedAdapter:
        loras = read_lora(folder)
        for name, (a, b, scale) in loras.items():
            if isinstance(self._adapted.get(name), Conv1D):  # GPT-2's: its weight is [in, out]
                a, b = b.T, a.T
            shape = tuple(self._original[name].shape) if name in self._original else None
            check_fits(folder, name, shape, (b.shape[0], a.shape[1]))
            loras[name] = a, b, scale
        self._make(prepared := PreparedAdapter(folder, loras))
        return prepared

    def rest(self, adapters: Iterable[PreparedAdapter]) -> None:
        self.activate(None)
        for prepared in adapters:
            prepared.weights, prepared.products = {}, None
        if self._lean is not None:
            self._lean.free_base()

    def activate_modules(self, prepared: PreparedAdapter | None) -> None:
        self.activate(prepared)
        if prepared:
            prepared.weights = prepared.weights or self._merged(prepared)
            self._replace(prepared.weights)

    def _use(self, prepared: PreparedAdapter | None) -> None:
        if prepared and not (prepared.weights or prepared.products):
            self._make(prepared)
        if self._lean is not None:
            self._lean.products = prepared and prepared.products
        self._replace(prepared.weights if prepared else {})

    def _make(self, prepared: PreparedAdapter) -> None:
        if self._lean is None:
            prepared.weights = self._merged(prepared)
        else:
            merge = partial(self._merge, prepared)
            prepared.products = self._lean.adapted(prepared.loras, merge)

    def _merged(self, prepared: PreparedAdapter) -> dict[str, torch.Tensor]:
        return {name: self._merge(prepared, name) for name in prepared.loras}

    @torch.inference_mode(False)  # no Parameter takes the data of a tensor of that mode
    @torch.no_grad()
    def _merge(self, prepared: PreparedAdapter, name: str) -> torch.Tensor:
        a, b, scale = prepared.loras[name]
        weight = self._original[name]
        update = (b.to(weight.device).float() @ a.to(weight.device).float()) * scale
        return (weight.float() + update).to(weight.dtype)

    def _replace(self, weights: dict[str, torch.Tensor]) -> None:
        for name in self._replaced | weights.keys():
            self._adapted[name].weight.data = weights.get(name, self._original[name])
        self._replaced = set(weights)


class RoundedWeights(AdapterWeights):
    """Swaps the products of ``lean`` with rounded weights, which have adapters beside them."""

    def __init__(self, base: BaseModel, lean: LlamaCpuForward) -> None:
        super().__init__(base)
        self._shapes = {
            name: (module.out_features, module.in_features)
            for name, module in base.model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self._lean = lean

    def prepare(self, folder: Path) -> PreparedAdapter:
        loras = read_lora(folder)
        for name, (a, b, _) in loras.items():
            check_fits(folder, name, self._shapes.get(name), (b.shape[0], a.shape[1]))
        return PreparedAdapter(folder, products=self._lean.with_loras(loras))

    def _use(self, prepared: PreparedAdapter | None) -> None:
        self._lean.products = (prepared and prepared.products) or self._lean.rounded_products


class PeftWeights(AdapterWeights):
    """PEFT injects its layers into the base model's modules, which the engine goes on using."""

    _peft: PeftModel | None = None

    def prepare(self, folder: Path) -> PreparedAdapter:
        read_lora(folder)
        return PreparedAdapter(folder)

    def install(self, prepared: PreparedAdapter) -> None:
        # Leave inference mode: inference tensors created here could never become parameters.
        with torch.inference_mode(False), torch.no_grad(), no_false_warnings():
            try:
                if self._peft is None:
                    # Inject layers before reading weights: if those are refused, they are known.
                    config = PeftConfig.from_pretrained(str(prepared.folder))
                    config.inference_mode, config.base_model_name_or_path = True, None
                    injected = get_peft_model(self._base.model, config, adapter_name=prepared.key)
                    self._peft = cast(PeftModel, injected)
                read_adapter(self._peft, prepared.key, prepared.folder)
                keep_weights_unmerged(self._peft)
                evaluation_mode(self._peft)
                self.activate(prepared)
            except BaseException:
                self._delete(prepared)
                raise

    def drop(self, prepared: PreparedAdapter) -> None:
        super().drop(prepared)
        self._delete(prepared)

    def _delete(self, prepared: PreparedAdapter) -> None:
        if self._peft is not None:
            if prepared.key in self._peft.peft_config:
                self._peft.delete_adapter(prepared.key)
            self._use(self._active)  # PEFT turns on what it adds, and what is left

    def _use(self, prepared: PreparedAdapter | None) -> None:
        if self._peft is None:
            return
        layers = cast(LoraModel, self._peft.base_model)
        if prepared is None:
            layers.disable_adapter_layers()
        else:
            if self._active is None:  # set_adapter() would not turn them on
                layers.enable_adapter_layers()
            self._peft.set_adapter(prepared.key)


def check_fits(
    folder: Path, name: str, here: tuple[int, ...] | None, there: tuple[int, int]
) -> None:
    """Refuse an adapter of a layer that the model does not have, or has in another shape."""
    if here is None:
        raise ModelError(f"adapter: {folder} adapts {name!r}: no linear layer here.")
    if here != there:
        raise ModelError(
            f"adapter: {folder} was trained on another model: {name} is {here} here, {there} there."
        )


def read_lora(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Read a plain LoRA: layer name to (A ``[rank, in]``, B ``[out, rank]``, scale).

    Raises:
        ModelError: a file is missing, or the folder holds anything but a plain LoRA.
    """
    for part in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / part).is_file():
            raise ModelError(f"adapter: {folder / part} is missing; is it a PEFT adapter folder?")
    config = json.loads((folder / CONFIG_FILE).read_text())
    if config.get("peft_type") != "LORA":
        raise ModelError(f"adapter: {folder} is {config.get('peft_type')}, not a LoRA.")
    extras = ("use_dora", "modules_to_save", "lora_bias", "bias")
    if unusual := [name for name in extras if config.get(name) not in (None, False, [], "none")]:
        raise ModelError(f"adapter: {folder} uses {', '.join(unusual)}, which is not supported.")
    tensors = load_file(str(folder / WEIGHTS_FILE))
    found: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    odd = set(tensors)
    for key, a in tensors.items():
        stem = key.removesuffix(".lora_A.weight")
        b = tensors.get(f"{stem}.lora_B.weight")
        if b is not None and stem != key:
            odd -= {key, f"{stem}.lora_B.weight"}
            name = stem.removeprefix("base_model.model.")
            found[name] = (a, b, lora_scaling(config, name, a.shape[0]))
    if odd:
        raise ModelError(f"adapter: {folder} has tensors which are no LoRA: {sorted(odd)[:3]}.")
    return found
