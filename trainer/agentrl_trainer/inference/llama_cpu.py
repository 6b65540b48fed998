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

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_trainer.inference.batched_forward import BatchedForward
from agentrl_trainer.inference.kv_cache import KVRows, Part
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
_PACK_FROM_ROWS, _PACK_FROM_PRODUCTS = 3, 1_500_000
"""With fewer rows, or multiplications, the plain product is quicker: oneDNN takes 10 µs to start,
MKL 2, and few rows are bound by reading the weights."""
_onednn = torch.ops.mkldnn
_DIGIT = 127
_SECOND = 2 * _DIGIT
"""What a first digit's step is divided by: its rounding error is at most half of it."""


class FusedLinear:
    """``x [rows, in] -> x Wᵀ + bias`` of one or more linear layers that read the same ``x``.

    MKL is quickest with the weights as [in, out]. On processors that are not Intel's it does not
    use AVX-512. There oneDNN takes half the time for many rows; it wants the weights in an order of
    its own (``packed``), so they are held twice from their first use on.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, *, packed: bool) -> None:
        self._transposed = torch.cat([w.t() for w in weights], 1).contiguous()
        self.parts = [part.t() for part in self._transposed.split([len(w) for w in weights], 1)]
        """The layers' weights [out, in], as views of the one tensor that is used here."""
        self.bias = bias
        least = max(_PACK_FROM_ROWS, _PACK_FROM_PRODUCTS // self._transposed.numel())
        self._packed_from = least if packed else math.inf

    @functools.cached_property
    def packed(self) -> Tensor:
        return _onednn._reorder_linear_weight(self._transposed.t().contiguous())

    def pack(self) -> None:
        """Make ``packed`` now, rather than at its first use, if it may be used."""
        if self._packed_from < math.inf:
            _ = self.packed

    def unpack(self) -> None:
        """Free ``packed`` until it is used again."""
        self.__dict__.pop("packed", None)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) >= self._packed_from:
            return _onednn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)

    def plus(self, x: Tensor, more: Tensor) -> Tensor:
        """Return ``self(x) + more`` by the cheaper of two orders of summation."""
        if len(x) >= self._packed_from:
            return _onednn._linear_pointwise.binary(x, more, self.packed, self.bias, "add")
        if self.bias is not None:
            more = more + self.bias
        return torch.addmm(more, x, self._transposed)


@dataclass(frozen=True, eq=False)
class Int8Linear:
    """The same with 8-bit weights, for processors that multiply 8-bit integers (AVX-512 VNNI, AMX).

    Weights are integers with one scale for each output. Inputs keep 15 bits: two 8-bit digits for
    each number, with one scale for each row, so a row's result does not depend on other rows. An
    adapter is applied beside the product in float32, because rounding merged weights would lose it.
    Decoding few rows is bound by reading the weights, which are a quarter of float32's.
    """

    transposed: Tensor  # [in, out] int8
    scales: Tensor  # [out] float32
    sizes: tuple[int, ...]  # outputs of each layer
    bias: Tensor | None
    adapters: tuple[tuple[slice, Tensor, Tensor], ...] = ()
    """For each adapted layer: its outputs, Aᵀ [in, rank] and Bᵀ [rank, out], scaled."""

    @classmethod
    def of(cls, weights: Sequence[Tensor], bias: Tensor | None) -> Int8Linear:
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        scales = whole.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny).div_(_DIGIT)
        rounded = (whole / scales[:, None]).round_().to(torch.int8)
        return cls(rounded.t(), scales, tuple(len(w) for w in weights), bias)

    def adapted(self, loras: Sequence[tuple[Tensor, Tensor, float] | None]) -> Int8Linear:
        """Return the same weights with LoRAs beside them: A [rank, in], B [out, rank], scale."""
        found: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        for size, lora in zip(self.sizes, loras, strict=True):
            if lora is not None:
                a, b, scale = lora
                part = slice(start, start + size)
                found.append((part, a.float().t().contiguous(), b.float().t() * scale))
            start += size
        return replace(self, adapters=tuple(found))

    def __call__(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(_DIGIT)
        first = (rest := x / scales).round()
        digits = torch.cat([first, rest.sub_(first).mul_(_SECOND)]).round_().to(torch.int8)
        high, low = torch.ops.aten._int_mm(digits, self.transposed).split(len(x))
        y = low.mul(1 / _SECOND).add_(high).mul_(scales).mul_(self.scales)
        if self.bias is not None:
            y += self.bias
        for part, a, b in self.adapters:
            y[:, part].addmm_(x @ a, b)
        return y

    def plus(self, x: Tensor, more: Tensor) -> Tensor:
        """Return ``self(x) + more``."""
        return self(x).add_(more)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether oneDNN's products are used too; without AVX-512, and on Intel's processors, they are
    no faster.

    Its operations are private to torch and may disappear; the decoder works without them.
    """
    return (
        model.device.type == "cpu"
        and not on_intel()
        and torch.backends.mkldnn.is_available()
        and hasattr(_onednn, "_reorder_linear_weight")
        and hasattr(_onednn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


@functools.cache
def on_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # macOS
        return False


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

    Raises:
        ValueError: the model has a part that is not known here.
    """

    def __init__(self, base: BaseModel, options: dict[str, Any]) -> None:
        super().__init__(base, options)
        self._adds_mask = True
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
        self.int8_products: list[Int8Linear] = []
        self.base_products = [self._fuse(group) for group in groups]
        """The base model's: four a layer, by common input, and the head."""
        self.products: Sequence[FusedLinear | Int8Linear] = self.base_products
        """Those in use."""

    def adapted(self, weights: dict[str, Tensor]) -> list[FusedLinear]:
        """Return products with these weights, by module name, in place of the base model's.

        The tensors in ``weights`` are replaced by views of the products', so nothing is held twice.
        """
        products: list[FusedLinear] = []
        for names, own in zip(self._groups, self.base_products, strict=True):
            if weights.keys().isdisjoint(names):
                products.append(own)
                continue
            parts = [weights.get(n, part) for n, part in zip(names, own.parts, strict=True)]
            products.append(FusedLinear(parts, own.bias, packed=self._packed))
            products[-1].pack()  # the thread that samples shall not wait for it
            weights.update(zip(names, products[-1].parts, strict=True))
        return products

    def quantize(self) -> None:
        """Compute with 8-bit weights from now on; the linear layers' own are freed."""
        self.int8_products = [Int8Linear.of(p.parts, p.bias) for p in self.base_products]
        self.products, self.base_products = self.int8_products, []
        for name, module in self._base.model.named_modules():
            if any(name in group for group in self._groups):
                module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def with_loras(self, loras: dict[str, tuple[Tensor, Tensor, float]]) -> list[Int8Linear]:
        """Return the 8-bit products with LoRAs by module name."""
        pairs = zip(self._groups, self.int8_products, strict=True)
        return [product.adapted([loras.get(name) for name in names]) for names, product in pairs]

    def _fuse(self, linears: list[nn.Linear]) -> FusedLinear:
        biases = [cast(Tensor, x.bias.data) for x in linears if x.bias is not None]
        bias = torch.cat(biases) if biases else None
        product = FusedLinear([x.weight.data for x in linears], bias, packed=self._packed)
        for linear, part in zip(linears, product.parts, strict=True):
            if linear.weight.data_ptr() != self._embedding.data_ptr():
                linear.weight.data = part  # else it is looked up by rows, too
        return product

    def __call__(self, parts: Sequence[Part]) -> list[Tensor]:
        works: list[_Work] = []
        tokens: list[Tensor] = []
        places: list[Tensor] = []
        for part in parts:
            ids, positions = self._prepare(part)
            rows, (batch, new) = cast(KVRows, part.rows), ids.shape
            blocks = split_blocks(part.starts, rows.view) if new == 1 else []
            works.append(_Work(rows, batch, new, self._mask(positions, rows.view), blocks))
            tokens.append(ids.flatten())
            places.append(positions.flatten())
        sizes = [work.batch * work.new for work in works]
        cos, sin = self._rotation(_joined(places), max(work.rows.view for work in works))
        hidden = F.embedding(_joined(tokens), self._embedding)
        for index, (before_attention, of_heads, before_mlp) in enumerate(self._norms):
            qkv, out, gate_up, down = self.products[4 * index : 4 * index + 4]
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
        logits = self.products[-1](self._last_norm(last))
        return list(logits.split([work.batch for work in works]))

    def _attend(self, work: _Work, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """[B * T, H * D], of queries and keys [B * T, H + G, D] and values [B * T, G, D]."""
        q, k = qk[:, : self._queries], qk[:, self._queries :]
        shape = work.batch, work.new
        keys, values = work.rows.write(layer, k.unflatten(0, shape), v.unflatten(0, shape))
        mask = work.mask
        if work.blocks:
            return _joined(
                [
                    self._attend_one(q[a:b], keys[a:b, :, :view], values[a:b, :, :view], mask[a:b])
                    for a, b, view in work.blocks
                ]
            )
        q = q.view(*shape, self._queries, self._dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, keys, values, mask, scale=self._scaling, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _attend_one(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The same for one new token per row.

        The heads of a group stand in for query positions, so nothing is repeated. SDPA's CPU kernel
        takes a third longer for so few of them.
        """
        batch, groups, view, _ = keys.shape
        q = q.reshape(batch * groups, -1, self._dim)
        mask = mask[..., :view].expand(batch, groups, 1, view).flatten(0, 1)
        scores = torch.baddbmm(mask, q, keys.flatten(0, 1).transpose(1, 2), alpha=self._scaling)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(batch, -1)

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
    for layer in decoder.layers:
        own = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        if own not in (_PARTS, _PARTS | _HEAD_NORMS):
            raise ValueError("its layers have other parts")
