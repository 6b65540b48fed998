"""Forward strategy for the Llama family (Llama, Qwen2, Qwen3, ...) on a CPU, in few operations.

Knows the modules that such a model has, and a KVRows; not requests, adapters or other families.

A step of a small model costs what its operations cost to *start*, and transformers needs about 60
a layer. Here it is 8: projections of the same input are one product, additions ride on products,
and ``cpu.kernels`` computes what is between them. Nothing is padded: the new tokens of all rows
follow each other. The numbers are the same but for the order of floating-point sums;
``choose_forward`` compares them with the model's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_trainer.inference.batched_forward import BatchedForward
from agentrl_trainer.inference.cpu.kernels import Heads, Places, cpu_kernels
from agentrl_trainer.inference.cpu.linear_products import FusedLinear, Int8Linear, Linear
from agentrl_trainer.inference.kv_cache import KVRows, Part
from agentrl_trainer.models.loading import BaseModel

_PARTS = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "input_layernorm", "post_attention_layernorm",
}  # fmt: skip
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
_STEP = 256
"""Rotary angles are computed for this many more positions at a time."""


class LlamaCpuForward(BatchedForward):
    """Applies on a CPU to float32 models made of the Llama family's parts.

    Nothing but the weights of their linear layers may change.

    Raises:
        ValueError: the model has a part that is not known here, or is elsewhere.
    """

    ragged = True

    def __init__(self, base: BaseModel, options: dict[str, Any]) -> None:
        if base.device.type != "cpu":
            raise ValueError(f"it is on {base.device}")
        super().__init__(base, options)
        decoder = cast(Any, base.model.get_decoder())
        require_known_parts(base.model, decoder)
        first = decoder.layers[0].self_attn
        self._heads = Heads(
            queries=first.q_proj.out_features // first.head_dim,
            keys=first.k_proj.out_features // first.head_dim,
            dim=first.head_dim,
            scale=first.scaling,
            eps=base.model.config.get_text_config().rms_norm_eps,
        )
        if {self._shape.key_dim, self._shape.value_dim} != {self._heads.dim}:
            raise ValueError("its keys and values differ in size")
        self._kernels = cpu_kernels(self._heads)
        self.takes_stems = self._kernels.takes_stems
        self._embedding: Tensor = decoder.embed_tokens.weight.data
        self._rotary = decoder.rotary_emb
        self._angles = (torch.empty(0), torch.empty(0))
        """Cosines and signed sines [positions, D]."""
        self._last_norm: Tensor = decoder.norm.weight.data
        self._norms: list[tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]] = []
        """Weights before attention, of queries' and keys' heads, and before the MLP."""
        groups: list[list[nn.Linear]] = []
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projected = [x.out_features for x in (attention.q_proj, attention.k_proj)]
            if projected != [self._heads.dim * n for n in (self._heads.queries, self._heads.keys)]:
                raise ValueError("its layers differ in their heads")
            of_heads = None
            if hasattr(attention, "q_norm"):
                of_heads = attention.q_norm.weight.data, attention.k_norm.weight.data
            before = layer.input_layernorm, layer.post_attention_layernorm
            around = [norm.weight.data for norm in before]
            self._norms.append((around[0], of_heads, around[1]))
            groups += [
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [attention.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            ]
        groups.append([cast(nn.Linear, base.model.get_output_embeddings())])
        names = {module: name for name, module in base.model.named_modules()}
        self._groups = [[names[linear] for linear in group] for group in groups]
        self._weights = [[linear.weight.data for linear in group] for group in groups]
        biases = [
            [cast(Tensor, x.bias.data) for x in group if x.bias is not None] for group in groups
        ]
        self._biases = [torch.cat(found) if found else None for found in biases]
        self._made: dict[int, FusedLinear] = {}
        """The base model's products so far: four a layer, by common input, and the head."""
        self.rounded_products: list[Linear] = []
        self.products: Sequence[Linear] | None = None
        """Those in use; None: the base model's, which are made at their first use."""

    def free_base(self) -> None:
        """Free the base model's products until they are used again."""
        self._made.clear()

    def _base_product(self, index: int) -> FusedLinear:
        made = self._made.get(index)
        if made is None:  # another thread may free or make it meanwhile, which does no harm
            made = FusedLinear(self._weights[index], self._biases[index])
            self._made[index] = made
        return made

    def adapted(self, names: Container[str], weight: Callable[[str], Tensor]) -> list[FusedLinear]:
        """Return products in which these modules have other weights than the base model's."""
        products: list[FusedLinear] = []
        for index, group in enumerate(self._groups):
            if not any(name in names for name in group):
                products.append(self._base_product(index))
                continue
            own = zip(group, self._weights[index], strict=True)
            parts = [weight(name) if name in names else part for name, part in own]
            products.append(FusedLinear(parts, self._biases[index]))
        return products

    def round_weights(self, to: Literal["bfloat16", "int8"]) -> None:
        """Compute with rounded weights from now on; the linear layers' own are freed."""
        kind = Int8Linear if to == "int8" else partial(FusedLinear, dtype=torch.bfloat16)
        own = zip(self._weights, self._biases, strict=True)
        self.products = self.rounded_products = [kind(*one) for one in own]
        self._weights.clear()
        self._made.clear()
        for name, module in self._base.model.named_modules():
            if any(name in group for group in self._groups):
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def with_loras(self, loras: dict[str, tuple[Tensor, Tensor, float]]) -> list[Linear]:
        """Return the products of rounded weights with LoRAs by module name."""
        pairs = zip(self._groups, self.rounded_products, strict=True)
        return [product.adapted([loras.get(name) for name in names]) for names, product in pairs]

    def __call__(self, parts: Sequence[Part]) -> list[Tensor]:
        tokens = [token for part in parts for chunk in part.chunks for token in chunk]
        sizes = [sum(map(len, part.chunks)) for part in parts]
        ends: list[list[int]] = []
        """Of the wanted chunks of each part, among all tokens."""
        for part, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
            own = [start + n for n in itertools.accumulate(map(len, part.chunks))]
            ends.append(own if part.wanted is None else [own[row] for row in part.wanted])
        last = torch.tensor([*itertools.chain(*ends)], dtype=torch.int64) - 1
        hidden = F.embedding(torch.tensor(tokens), self._embedding)
        places = [self._places(part) for part in parts]
        products = self.products or [self._base_product(i) for i in range(len(self._groups))]
        for layer, (before_attention, of_heads, before_mlp) in enumerate(self._norms):
            qkv, out, gate_up, down = products[4 * layer : 4 * layer + 4]
            x = qkv(self._kernels.rms_norm(hidden, before_attention)).split(sizes)
            each = zip(parts, x, places, strict=True)
            attended = _joined([self._attend(layer, of_heads, *one) for one in each])
            if layer == len(self._norms) - 1:  # the others were needed for their keys and values
                attended, hidden = (x.index_select(0, last) for x in (attended, hidden))
            hidden = out.plus(attended, hidden)
            gates = gate_up(self._kernels.rms_norm(hidden, before_mlp))
            hidden = down.plus(self._kernels.silu_mul(gates), hidden)
        logits = products[-1](self._kernels.rms_norm(hidden, self._last_norm))
        return list(logits.split([*map(len, ends)]))

    def _places(self, part: Part) -> Places:
        starts = zip(part.starts, map(len, part.chunks), strict=True)
        spans = [range(start, start + length) for start, length in starts]
        rows = [row for row, span in enumerate(spans) for _ in span]
        positions = torch.tensor([at for span in spans for at in span])
        end = max(span.stop for span in spans)
        # What is compiled would write anywhere.
        assert part.rows.first <= min(part.starts)
        assert end <= part.rows.first + part.rows.time
        assert len(spans) <= part.rows.rows
        if end > len(self._angles[0]):
            at = torch.arange(-(-end // _STEP) * _STEP)
            cos, sin = (x[0] for x in self._rotary(self._embedding, at[None]))
            half = self._heads.dim // 2
            if cos.shape[1] != self._heads.dim:
                raise ValueError("it rotates a part of each head")
            self._angles = cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], -1)
        cos, sin = (x.index_select(0, positions) for x in self._angles)
        return Places(torch.tensor(rows), positions - part.rows.first, cos, sin)

    def _attend(
        self, layer: int, norms: tuple[Tensor, Tensor] | None, part: Part, x: Tensor, to: Places
    ) -> Tensor:
        rows = cast(KVRows, part.rows)
        stem = None
        if rows.stem is not None:
            stem = rows.stem.keys[layer, :, : rows.first], rows.stem.values[layer, :, : rows.first]
        return self._kernels.attend(x, to, rows.of_layer(layer), stem, norms)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def require_known_parts(model: PreTrainedModel, decoder: Any) -> None:
    """Refuse what the forward does not know and a trial over few tokens might not show."""
    outer = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if decoder is None or {name for name, _ in decoder.named_children()} != outer:
        raise ValueError("its decoder has other parts")
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError("its rotary embedding depends on the length")
    if rope.get("llama_4_scaling_beta"):
        raise ValueError("its queries are scaled by their positions")
    for layer in decoder.layers:
        own = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        if own not in (_PARTS, _PARTS | _HEAD_NORMS):
            raise ValueError("its layers have other parts")
