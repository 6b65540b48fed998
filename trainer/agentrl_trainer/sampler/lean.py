"""The decoder of the Llama family (Llama, Qwen2, Qwen3, ...) in few operations, for one forward.

Knows: the modules such a model has, and a RowCache. Does not know: requests, adapters, families.

A step of a small model costs what its operations cost to *start*, and transformers needs about 60
for a layer. Here it is 20: projections that read the same input are one product, queries and keys
are normalised and rotated together, masks and angles are made once for all layers, and additions
ride on products. The numbers are the same but for the order of floating-point sums; ``Forward``
compares them with the model's own before it uses this.

Shapes: B rows, T new tokens, H query and G key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_trainer.sampler.cache import RowCache

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_STEP = 256
"""Angles are made for so many more positions whenever they do not suffice."""


class Joined:
    """The weights of linear layers which read the same input, as one matrix [sum of out, in].

    They become parts of one tensor, so nothing is held twice. Whoever replaces a layer's weight
    data (an adapter merged in) may give parts of one tensor again (``side_by_side``); if they are
    not, they are copied together here.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.linears = linears
        for linear, part in zip(linears, side_by_side([x.weight for x in linears]), strict=True):
            linear.weight.data = part
        self._parts: list[Tensor] = []
        self._places: list[int] = []
        self._weight = torch.empty(0)
        biases = [x.bias for x in linears]
        self.bias = None if biases[0] is None else torch.cat([cast(Tensor, b) for b in biases])

    def weight(self) -> Tensor:
        places = [linear.weight.data_ptr() for linear in self.linears]
        if places != self._places:
            # Held, so that their memory does not become another's at the same address.
            self._parts = parts = [x.weight.data for x in self.linears]
            self._places = places
            rows = sum(part.shape[0] for part in parts)
            if _adjacent(parts):
                self._weight = parts[0].as_strided((rows, parts[0].shape[1]), parts[0].stride())
            else:
                self._weight = torch.cat(parts)
        return self._weight


def side_by_side(weights: list[Tensor]) -> list[Tensor]:
    """The same matrices, as parts of one tensor."""
    return list(torch.cat([w.data for w in weights]).split([w.shape[0] for w in weights]))


def _adjacent(parts: list[Tensor]) -> bool:
    at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or not part.is_contiguous():
            return False
        at += part.nbytes
    return True


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Joined
    out: nn.Linear
    gate_up: Joined
    down: nn.Linear
    before_attention: Tensor
    before_mlp: Tensor
    head_norm: Tensor | None  # [H + G, D]


class LeanDecoder:
    """``(rows, ids, positions, mask) -> logits [B, vocabulary]`` after each row's last column.

    Raises ValueError if the model has anything which this does not know.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = cast(Any, model.get_decoder())
        head = cast(Any, model.get_output_embeddings())
        if why := _why_not(model, decoder, head):
            raise ValueError(why)
        config = model.config.get_text_config()
        first = decoder.layers[0].self_attn
        self.embedding: Tensor = decoder.embed_tokens.weight
        self.head: nn.Linear = head
        self.last_norm: Tensor = decoder.norm.weight
        self.eps: float = config.rms_norm_eps
        self.dim: int = first.head_dim
        self.queries = first.q_proj.out_features // self.dim
        self.keys = first.k_proj.out_features // self.dim
        self.scaling: float = first.scaling
        self.rotary = decoder.rotary_emb
        self.layers = [self._layer(layer) for layer in decoder.layers]
        self._angles = (torch.empty(0), torch.empty(0))

    def joined(self) -> list[list[nn.Linear]]:
        """Layers whose weights want to be parts of one tensor."""
        return [x.linears for layer in self.layers for x in (layer.qkv, layer.gate_up)]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norm = None
        if hasattr(attention, "q_norm"):
            norm = torch.cat(
                [
                    attention.q_norm.weight.data.expand(self.queries, self.dim),
                    attention.k_norm.weight.data.expand(self.keys, self.dim),
                ]
            )
        return _Layer(
            qkv=Joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=attention.o_proj,
            gate_up=Joined([mlp.gate_proj, mlp.up_proj]),
            down=mlp.down_proj,
            before_attention=layer.input_layernorm.weight,
            before_mlp=layer.post_attention_layernorm.weight,
            head_norm=norm,
        )

    def __call__(
        self, rows: RowCache, ids: Tensor, positions: Tensor, mask: Tensor, end: int
    ) -> Tensor:
        """``ids`` and ``positions`` [B, T], these less than ``end``; ``mask`` [B, 1, T, view] is
        added to the scores."""
        batch, new = ids.shape
        cos, sin = self._rotation(positions, end)
        hidden = F.embedding(ids.flatten(), self.embedding)
        for index, layer in enumerate(self.layers):
            attended = self._attend(rows, index, layer, hidden, cos, sin, mask, batch, new)
            hidden = _plus(hidden, layer.out, attended)
            inner = self._norm(hidden, layer.before_mlp)
            gate, up = F.linear(inner, layer.gate_up.weight(), layer.gate_up.bias).chunk(2, -1)
            hidden = _plus(hidden, layer.down, F.silu(gate).mul_(up))
        last = hidden.view(batch, new, -1)[:, -1]
        return self.head(self._norm(last, self.last_norm))

    def _attend(
        self,
        rows: RowCache,
        index: int,
        layer: _Layer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        batch: int,
        new: int,
    ) -> Tensor:
        """[B * T, H * D]"""
        inner = self._norm(hidden, layer.before_attention)
        qkv = F.linear(inner, layer.qkv.weight(), layer.qkv.bias)
        qkv = qkv.view(batch * new, -1, self.dim)
        turned = self.queries + self.keys
        qk = qkv[:, :turned]
        if layer.head_norm is not None:
            qk = F.rms_norm(qk, (self.dim,), None, self.eps).mul_(layer.head_norm)
        # Rolling by half is what rotate_half does, but for the sign, which is in ``sin``.
        qk = torch.addcmul(qk * cos, qk.roll(self.dim // 2, -1), sin)
        q = qk[:, : self.queries]
        keys, values = rows.write(index, qk[:, self.queries :], qkv[:, turned:])
        if new == 1:
            # The heads of a group stand in for query positions: nothing is repeated.
            q = q.reshape(batch, self.keys, -1, self.dim)
            out = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scaling)
            return out.reshape(batch, -1)
        q = q.view(batch, new, self.queries, self.dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, keys, values, mask, scale=self.scaling, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(batch * new, -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _rotation(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Two times [B * T, 1, D]"""
        flat = positions.flatten()
        if end > len(self._angles[0]):
            at = torch.arange(-(-end // _STEP) * _STEP, device=positions.device)
            cos, sin = (x[0] for x in self.rotary(self.embedding, at[None]))
            half = self.dim // 2
            signed = torch.cat([-sin[:, :half], sin[:, half:]], -1)
            self._angles = (cos[:, None].contiguous(), signed[:, None])
        cos, sin = self._angles
        return cos.index_select(0, flat), sin.index_select(0, flat)


def _plus(residual: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    if linear.bias is not None:
        return residual + linear(x)
    return torch.addmm(residual, x, linear.weight.t())


def _why_not(model: PreTrainedModel, decoder: Any, head: Any) -> str | None:
    """What the model has or lacks, that this decoder does not know; None: nothing."""
    config = model.config.get_text_config()
    if model.dtype != torch.float32:
        return "norms in half precision are computed in float32 by the model"
    outer = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if decoder is None or {name for name, _ in decoder.named_children()} != outer:
        return "its decoder has other parts"
    if type(head) is not nn.Linear or head.bias is not None:
        return "its output embedding is not a plain linear layer"
    if getattr(config, "hidden_act", None) != "silu" or not hasattr(config, "rms_norm_eps"):
        return "it has another activation or normalisation"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return "its rotary embedding depends on the length"
    for layer in decoder.layers:
        modules = dict(layer.named_modules())
        known = {*_PROJECTIONS, *_NORMS}
        if _HEAD_NORMS[0] in modules:
            known |= {*_HEAD_NORMS}
        own = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        if own != known or any(type(modules[name]) is not nn.Linear for name in _PROJECTIONS):
            return "its layers have other parts"
        if getattr(layer.self_attn, "scaling", None) is None:
            return "its attention does not tell its scale"
    return None
