"""Forward strategy for the Llama family (Llama, Qwen2, Qwen3, ...) on a CPU, in few operations.

Knows the modules that such a model has, and a KVRows; not requests, adapters or other families.

A step of a small model costs what its operations cost to *start*, and transformers needs about 60
a layer. Here it is 20: projections of the same input are one product, queries and keys are
normalized and rotated together, masks and angles are made once for all layers, and additions ride
on products. The numbers are the same but for the order of floating-point sums; ``choose_forward``
compares them with the model's own. With many rows, products go through oneDNN where it is faster.

Shapes: B rows, T new tokens, H query and G key heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_trainer.inference.batched_forward import BatchedForward
from agentrl_trainer.inference.kv_cache import KVRows, Part
from agentrl_trainer.inference.linear_products import FusedLinear, Int8Linear, can_pack
from agentrl_trainer.models import stem_attention
from agentrl_trainer.models.loading import BaseModel

BLOCK = 16
"""Rows that a decode step attends over together, as far as the longest of them."""
_WORTH = 1024
"""Padding tokens that must be saved for a block to be computed by itself."""

_PARTS = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "input_layernorm", "post_attention_layernorm",
}  # fmt: skip
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
_STEP = 256
"""Rotary angles are computed for this many more positions at a time."""


class RmsNorm:
    """RMSNorm (arXiv:1910.07467) over the last dimension, in four operations; torch's takes seven
    on a CPU."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        # x / sqrt(|x|²/n + eps) = x sqrt(n) / hypot(|x|, sqrt(n eps))
        self._weight = weight * math.sqrt(size)
        self._least = weight.new_tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(length, self._least)).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class _Work:
    """What attention needs of a part: its rows, B, T, its mask, and its blocks if T is 1."""

    rows: KVRows
    batch: int
    new: int
    mask: Tensor
    blocks: list[tuple[int, int, int]]


class LlamaCpuForward(BatchedForward):
    """Applies to float32 models made of the Llama family's parts, as long as nothing but the
    weights of their linear layers changes.

    ``keep_weights``: the layers keep their weights, from which versions are merged; processes
    share them where they are mapped from a file. Else they become views of the base model's
    products, which are never freed, so that nothing is held twice.

    Raises:
        ValueError: the model has a part that is not known here.
    """

    def __init__(
        self, base: BaseModel, options: dict[str, Any], *, keep_weights: bool = True
    ) -> None:
        super().__init__(base, options)
        self._adds_mask = True
        self.takes_stems = stem_attention.available and base.device.type == "cpu"
        decoder = cast(Any, base.model.get_decoder())
        require_known_parts(base.model, decoder)
        first = decoder.layers[0].self_attn
        self._dim: int = first.head_dim
        self._queries = first.q_proj.out_features // self._dim
        self._keys = first.k_proj.out_features // self._dim
        self._eps: float = base.model.config.get_text_config().rms_norm_eps
        self._scaling: float = first.scaling
        self._embedding: Tensor = decoder.embed_tokens.weight.data
        self._rotary = decoder.rotary_emb
        self._angles = (torch.empty(0), torch.empty(0))
        self._last_norm = RmsNorm(decoder.norm.weight.data, self._eps)
        self._norms: list[tuple[RmsNorm, RmsNorm | None, RmsNorm]] = []
        groups: list[list[nn.Linear]] = []
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            around = (layer.input_layernorm, layer.post_attention_layernorm)
            before_attention, before_mlp = (RmsNorm(n.weight.data, self._eps) for n in around)
            of_heads = None
            if hasattr(attention, "q_norm"):  # of queries and keys together, weights [H + G, D]
                own = (attention.q_norm, self._queries), (attention.k_norm, self._keys)
                weights = [norm.weight.data.expand(count, self._dim) for norm, count in own]
                of_heads = RmsNorm(torch.cat(weights), self._eps)
            self._norms.append((before_attention, of_heads, before_mlp))
            groups += [
                [attention.q_proj, attention.k_proj, attention.v_proj],
                [attention.o_proj],
                [mlp.gate_proj, mlp.up_proj],
                [mlp.down_proj],
            ]
        groups.append([cast(nn.Linear, base.model.get_output_embeddings())])
        names = {module: name for name, module in base.model.named_modules()}
        self._groups = [[names[linear] for linear in group] for group in groups]
        self._packed = can_pack(base.model)
        self._weights = [[linear.weight.data for linear in group] for group in groups]
        biases = [
            [cast(Tensor, x.bias.data) for x in group if x.bias is not None] for group in groups
        ]
        self._biases = [torch.cat(found) if found else None for found in biases]
        self._made: dict[int, FusedLinear] = {}
        """The base model's products so far: four a layer, by common input, and the head."""
        self.int8_products: list[Int8Linear] = []
        self.products: Sequence[FusedLinear | Int8Linear] | None = None
        """Those in use; None: the base model's, which are made at their first use."""
        for index, group in enumerate([] if keep_weights else groups):
            self._weights[index] = self._base_product(index).parts
            for linear, part in zip(group, self._weights[index], strict=True):
                if linear.weight.data_ptr() != self._embedding.data_ptr():
                    linear.weight.data = part  # else it is looked up by rows, too

    def free_base(self) -> None:
        """Free the base model's products until they are used again."""
        self._made.clear()

    def _base_product(self, index: int) -> FusedLinear:
        made = self._made.get(index)
        if made is None:  # another thread may free or make it meanwhile, which does no harm
            own = self._weights[index], self._biases[index]
            made = self._made[index] = FusedLinear(*own, packed=self._packed)
        return made

    def adapted(self, weights: dict[str, Tensor]) -> list[FusedLinear]:
        """Return products with these weights, by module name, in place of the base model's.

        The tensors in ``weights`` are replaced by views of the products', so nothing is held twice.
        """
        products: list[FusedLinear] = []
        for index, names in enumerate(self._groups):
            if weights.keys().isdisjoint(names):
                products.append(self._base_product(index))
                continue
            own = zip(names, self._weights[index], strict=True)
            parts = [weights.get(name, part) for name, part in own]
            products.append(FusedLinear(parts, self._biases[index], packed=self._packed))
            products[-1].pack()  # the thread that samples shall not wait for it
            weights.update(zip(names, products[-1].parts, strict=True))
        return products

    def quantize(self) -> None:
        """Compute with 8-bit weights from now on; the linear layers' own are freed."""
        own = zip(self._weights, self._biases, strict=True)
        self.products = self.int8_products = [Int8Linear.of(*one) for one in own]
        self._weights.clear()
        self._made.clear()
        for name, module in self._base.model.named_modules():
            if any(name in group for group in self._groups):
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def with_loras(self, loras: dict[str, tuple[Tensor, Tensor, float]]) -> list[Int8Linear]:
        """Return the 8-bit products with LoRAs by module name."""
        pairs = zip(self._groups, self.int8_products, strict=True)
        return [product.adapted([loras.get(name) for name in names]) for names, product in pairs]

    def __call__(self, parts: Sequence[Part]) -> list[Tensor]:
        works: list[_Work] = []
        tokens: list[Tensor] = []
        places: list[Tensor] = []
        for part in parts:
            ids, positions = self._prepare(part)
            rows, (batch, new) = cast(KVRows, part.rows), ids.shape
            own, starts = positions - rows.first, [at - rows.first for at in part.starts]
            blocks = split_blocks(starts, rows.view) if new == 1 else []
            works.append(_Work(rows, batch, new, self._mask(own, rows.view), blocks))
            tokens.append(ids.flatten())
            places.append(positions.flatten())
        sizes = [work.batch * work.new for work in works]
        cos, sin = self._rotation(
            _joined(places), max(work.rows.first + work.rows.view for work in works)
        )
        products = self.products or [self._base_product(i) for i in range(len(self._groups))]
        hidden = F.embedding(_joined(tokens), self._embedding)
        for index, (before_attention, of_heads, before_mlp) in enumerate(self._norms):
            qkv, out, gate_up, down = products[4 * index : 4 * index + 4]
            x = qkv(before_attention(hidden)).view(len(hidden), -1, self._dim)
            qk, v = x[:, : self._queries + self._keys], x[:, self._queries + self._keys :]
            if of_heads is not None:
                qk = of_heads(qk)
            # Rolling by half is rotate_half but for the sign, which is in ``sin``.
            qk = torch.addcmul(qk * cos, qk.roll(self._dim // 2, -1), sin)
            of_parts = zip(works, qk.split(sizes), v.split(sizes), strict=True)
            attended = _joined([self._attend(work, index, qk, v) for work, qk, v in of_parts])
            hidden = out.plus(attended, hidden)
            gate, up = gate_up(before_mlp(hidden)).chunk(2, -1)
            hidden = down.plus(F.silu(gate).mul_(up), hidden)
        of_parts = zip(works, hidden.split(sizes), strict=True)
        last = _joined([own.view(work.batch, work.new, -1)[:, -1] for work, own in of_parts])
        logits = products[-1](self._last_norm(last))
        return list(logits.split([work.batch for work in works]))

    def _attend(self, work: _Work, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """[B * T, H * D], of queries and keys [B * T, H + G, D] and values [B * T, G, D]."""
        q, k = qk[:, : self._queries], qk[:, self._queries :]
        shape = work.batch, work.new
        keys, values = work.rows.write(layer, k.unflatten(0, shape), v.unflatten(0, shape))
        stem, new = work.rows.stem, work.new
        found = [
            self._attend_own(
                q[a * new : b * new], keys[a:b, :, :view], values[a:b, :, :view],
                work.mask[a:b, ..., :view], mass=stem is not None,
            )
            for a, b, view in work.blocks or [(0, work.batch, work.rows.view)]
        ]  # fmt: skip
        out, *masses = map(_joined, zip(*found, strict=True))
        if stem is None:
            return out.flatten(1)
        before = (x[layer, :, : work.rows.first] for x in (stem.keys, stem.values))
        seen, mass = stem_attention.over_stem(q, *before, scale=self._scaling)
        return out.lerp(seen, torch.sigmoid(mass - masses[0])[..., None]).flatten(1)

    def _attend_own(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, mass: bool
    ) -> list[Tensor]:
        """[B * T, H, D], and with ``mass`` the logarithms of the weights' sums [B * T, H]."""
        batch, groups, new = len(keys), keys.shape[1], mask.shape[2]
        if new == 1:  # heads of a group stand in for query positions: keys are read once for them
            q = q.view(batch, groups, -1, self._dim)
            mask = mask.expand(-1, -1, q.shape[2], -1)
        else:
            q = q.view(batch, new, -1, self._dim).transpose(1, 2)
        if mass:
            found = stem_attention.flash(q, keys, values, attn_mask=mask, scale=self._scaling)
        else:
            attention = F.scaled_dot_product_attention
            found = [attention(q, keys, values, mask, scale=self._scaling, enable_gqa=True)]
        by_head = (x.reshape(batch, -1, new, *x.shape[3:]) for x in found)
        return [x.transpose(1, 2).flatten(0, 1) for x in by_head]

    def _rotation(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, each [B * T, 1, D], at positions below ``end``."""
        if end > len(self._angles[0]):
            at = torch.arange(-(-end // _STEP) * _STEP, device=positions.device)
            cos, sin = (x[0] for x in self._rotary(self._embedding, at[None]))
            half = self._dim // 2
            signed = torch.cat([-sin[:, :half], sin[:, half:]], -1)
            self._angles = (cos[:, None].contiguous(), signed[:, None])
        cos, sin = self._angles
        return cos.index_select(0, positions), sin.index_select(0, positions)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split_blocks(lengths: Sequence[int], view: int) -> list[tuple[int, int, int]]:
    """Return (first row, end, tokens to attend to) of blocks of rows, longer from one to the next.

    ``lengths``: tokens of each row before the new one; every ``BLOCK`` rows are at most as long as
    the next ones.
    """
    found: list[tuple[int, int, int]] = []
    end, reach = len(lengths), view
    for start in range((end - 1) // BLOCK * BLOCK, 0, -BLOCK):
        before = max(lengths[:start]) + 1
        if (reach - before) * start >= _WORTH:
            found.append((start, end, reach))
            end, reach = start, before
    return [(0, end, reach), *reversed(found)]


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
