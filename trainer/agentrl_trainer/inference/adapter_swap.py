"""LoRA adapters for sampling: read versions from disk, swap them in, retire the old ones.

Knows PEFT folders and the model's parameters, not requests or caches.

``AdapterVersions`` says which version new sequences get and when an old one goes. Its weights are
computed with in one of two ways. *Merged*: each version has a copy of the adapted weight matrices
with the update added, put in place by swapping ``Parameter.data`` (and for models of up to 50
million parameters a second copy in ``llama_cpu.FusedLinear``). It halves the time of a step of a
small model, where LoRA's extra products are mostly Python. *Unmerged*: PEFT's own layers, for
models too large to copy, or in half precision, where a merge rounds the update away and sampling
would no longer be the policy that the trainer computes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from peft import LoraModel, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from agentrl_trainer.inference.llama_cpu import FusedLinear, LlamaCpuDecoder
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

if TYPE_CHECKING:
    from agentrl_trainer.inference.kv_cache import PrefixStore
    from agentrl_trainer.inference.sequences import Lane

MERGE_BELOW = 200_000_000
"""Adapters are merged for base models of fewer parameters (float32 only)."""

_serial = itertools.count()
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """An adapter version read from disk, ready to be used on the engine's thread."""

    folder: Path
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Merged: adapted weight by module name. Unmerged: empty."""
    products: list[FusedLinear] | None = None
    """The same weights for the ``LlamaCpuDecoder``, if there is one."""
    key: str = field(default_factory=lambda: f"v{next(_serial)}")
    """PEFT's name for it: unique, since two versions of an adapter live side by side."""


class AdapterVersions:
    """The lane of each adapter's current version, and of older versions still in use.

    A running sequence keeps the version that it started with; a sequence admitted later gets the
    current one. All methods run on the engine's thread.
    """

    def __init__(
        self,
        weights: AdapterWeights,
        prefixes: PrefixStore,
        new_lane: Callable[[str | None, int | None, PreparedAdapter | None], Lane],
    ) -> None:
        self.weights = weights
        self._prefixes = prefixes
        self._new_lane = new_lane
        self.current: dict[str | None, Lane] = {None: new_lane(None, None, None)}
        """Adapter name to the lane that new sequences join; None is the base model."""
        self.lanes: list[Lane] = [self.current[None]]
        """The current lanes, and superseded ones that still have sequences."""

    def swap(self, name: str, version: int, prepared: PreparedAdapter) -> None:
        """Make a version the current one; the old one finishes what it has."""
        self.weights.install(prepared)
        self._supersede(name)
        self.current[name] = self._new_lane(name, version, prepared)
        self.lanes.append(self.current[name])
        self.retire()

    def unload(self, name: str) -> None:
        self._supersede(name)
        self.retire()

    def _supersede(self, name: str) -> None:
        old = self.current.pop(name, None)
        if old is not None:
            old.current = False
            self._prefixes.drop_owner(old)

    def retire(self) -> None:
        """Free superseded versions without sequences."""
        for lane in [x for x in self.lanes if not x.current and not x.users]:
            lane.clear()
            self.lanes.remove(lane)
            if lane.weights is not None:
                self.weights.drop(lane.weights)


class AdapterWeights(Protocol):
    """How the model computes with adapters."""

    def prepare(self, folder: str | Path) -> PreparedAdapter:
        """Read and check an adapter folder, on any thread, without touching the model.

        Raises:
            ModelError: the folder holds no plain LoRA of this model.
        """
        ...

    def install(self, prepared: PreparedAdapter) -> None: ...

    def activate(self, prepared: PreparedAdapter | None) -> None:
        """Make the next forwards use this adapter; None is the base model."""
        ...

    def drop(self, prepared: PreparedAdapter) -> None: ...


def why_not_merged(base: BaseModel, merge_below: int = MERGE_BELOW) -> str | None:
    """Say why adapters are not merged into copies of the weights; None if they are."""
    if getattr(base.model, "is_quantized", False):
        return "its weights are quantized"
    if base.dtype != torch.float32:
        return f"its weights are {str(base.dtype).removeprefix('torch.')}"
    if (size := sum(p.numel() for p in base.model.parameters())) >= merge_below:
        return f"it has {size / 1e6:.0f} million parameters, {merge_below / 1e6:.0f} or more"
    return None


class MergedWeights:
    """Swaps ``Parameter.data``, and the products of ``decoder`` if that runs the model."""

    def __init__(self, base: BaseModel, decoder: LlamaCpuDecoder | None = None) -> None:
        self._decoder = decoder
        linears = {
            name: module
            for name, module in base.model.named_modules()
            if isinstance(module, (torch.nn.Linear, Conv1D))
        }
        known = {id(cast(torch.nn.Module, base.model.get_input_embeddings()).weight)}
        for linear in linears.values():
            if id(linear.weight) in known:
                # Untie: a Parameter of its own over the same storage, because an adapter of a tied
                # head must not change the embeddings, nor other layers with this weight (Zamba's).
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
        self._active: PreparedAdapter | None = None

    @torch.no_grad()
    def prepare(self, folder: str | Path) -> PreparedAdapter:
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
        products = self._decoder.adapted(merged) if self._decoder is not None else None
        return PreparedAdapter(folder, merged, products)

    def install(self, prepared: PreparedAdapter) -> None:
        pass

    def activate(self, prepared: PreparedAdapter | None) -> None:
        if prepared is self._active:
            return
        weights = prepared.weights if prepared else {}
        for name in self._changed - weights.keys():
            self._adapted[name].weight.data = self._original[name]
        for name, weight in weights.items():
            self._adapted[name].weight.data = weight
        if self._decoder is not None:
            products = prepared and prepared.products
            self._decoder.products = products or self._decoder.base_products
        self._changed = set(weights)
        self._active = prepared

    def drop(self, prepared: PreparedAdapter) -> None:
        if prepared is self._active:
            self.activate(None)


class PeftWeights:
    """PEFT injects its layers into the base model's modules, which the engine goes on using."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._stacks = expert_stacks(base.model)
        self._peft: PeftModel | None = None
        self._active: PreparedAdapter | None = None

    def prepare(self, folder: str | Path) -> PreparedAdapter:
        read_lora(Path(folder), self._stacks)
        return PreparedAdapter(Path(folder))

    def install(self, prepared: PreparedAdapter) -> None:
        # Leave inference mode: inference tensors created here could never become parameters.
        with torch.inference_mode(False), torch.no_grad(), no_false_warnings():
            try:
                self._add(prepared)
            except BaseException:
                self._remove(prepared)
                raise

    def _add(self, prepared: PreparedAdapter) -> None:
        if self._peft is None:
            # Inject layers before reading weights: if those are refused, the layers are known.
            config = PeftConfig.from_pretrained(str(prepared.folder))
            config.inference_mode, config.base_model_name_or_path = True, None
            self._peft = cast(
                PeftModel, get_peft_model(self._base.model, config, adapter_name=prepared.key)
            )
        read_adapter(self._peft, prepared.key, prepared.folder)
        keep_weights_unmerged(self._peft)
        evaluation_mode(self._peft)
        self._use(prepared)

    def _remove(self, prepared: PreparedAdapter) -> None:
        """Delete an adapter; PEFT turns on what it adds, and what is left after a deletion."""
        if self._peft is None:
            return
        if prepared.key in self._peft.peft_config:
            self._peft.delete_adapter(prepared.key)
        if self._active is None:
            cast(LoraModel, self._peft.base_model).disable_adapter_layers()
        else:
            self._peft.set_adapter(self._active.key)

    def activate(self, prepared: PreparedAdapter | None) -> None:
        if prepared is self._active or self._peft is None:
            return
        if prepared is None:
            cast(LoraModel, self._peft.base_model).disable_adapter_layers()
            self._active = None
        else:
            self._use(prepared)

    def _use(self, prepared: PreparedAdapter) -> None:
        assert self._peft is not None
        if self._active is None:  # set_adapter() would not turn them on
            cast(LoraModel, self._peft.base_model).enable_adapter_layers()
        self._peft.set_adapter(prepared.key)
        self._active = prepared

    def drop(self, prepared: PreparedAdapter) -> None:
        if prepared is self._active:
            self.activate(None)
        if self._peft is not None and prepared.key in self._peft.peft_config:
            self._peft.delete_adapter(prepared.key)


def read_lora(
    folder: Path, stacks: Mapping[str, ExpertStack]
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Read a plain LoRA: weight name to (A ``[rank, in]``, B ``[out, rank]``, scale).

    A linear layer's weight goes by the layer's name. Weights of experts are the model's ``stacks``
    and go by their own names; A and B have a leading expert dimension, such that B A has the
    weight's shape.

    Raises:
        ModelError: a file is missing, or the folder holds anything but a plain LoRA.
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
        name, rank = stem.removeprefix(_PREFIX), a.shape[0]
        if name in of_experts:
            name, stack = of_experts[name]
            rank //= stack.weight.shape[0]
            a, b = split_by_expert(a, b, stack)
        found[name] = (a, b, lora_scaling(config, name, rank))
    if 2 * len(found) != len(tensors):
        odd = sorted(k for k in tensors if ".lora_A." not in k and ".lora_B." not in k)[:3]
        raise ModelError(f"adapter: {folder} has tensors which are no plain LoRA: {odd}.")
    return found
