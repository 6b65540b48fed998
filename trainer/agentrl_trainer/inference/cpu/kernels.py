"""What a Llama decoder computes between its products on a CPU: norms, rotation, attention, SiLU.

Knows tensors, not models, adapters or requests. ``kernels.c`` computes all of it where there is
a C compiler (and OpenMP), torch elsewhere, which is slower.

Shapes: N new tokens, H query and G key heads, D head size.
"""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl_trainer.inference.cpu import compiled
from agentrl_trainer.inference.cpu.compiled import address

log = logging.getLogger(__name__)

_LANES = 16


@dataclass(frozen=True)
class Heads:
    """Those of an attention layer."""

    queries: int
    keys: int
    dim: int
    scale: float
    """Of scores."""
    eps: float
    """Of norms."""


@dataclass(frozen=True)
class Places:
    """Where new tokens go: ``at[i]`` in row ``rows[i]`` of a rectangle of keys and values. Tokens
    of one row follow each other, and rows count from 0."""

    rows: Tensor  # [N]
    at: Tensor  # [N]
    cos: Tensor  # [N, D]
    sin: Tensor  # [N, D], the first half negative


Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class TorchKernels:
    """The same as ``CompiledKernels``, row by row."""

    takes_stems = False

    def __init__(self, heads: Heads) -> None:
        self.heads = heads

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (arXiv:1910.07467) over the last dimension."""
        return F.rms_norm(x, weight.shape[-1:], None, self.heads.eps) * weight

    def silu_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of gate and up ``[N, 2 * size]``."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def attend(
        self, x: Tensor, places: Places, rectangle: Pair, stem: Pair | None, norms: Pair | None
    ) -> Tensor:
        """Attend to the stem, to the tokens before in the row, and to the row's new ones.

        ``x`` [N, (H + 2G) * D]: queries, keys and values, which are overwritten. Keys and values go
        to ``rectangle``, both [rows, G, time, D]; a stem's are [G, P, D]. ``norms`` are weights of
        RMSNorms [D] of queries' and keys' heads. Returns [N, H * D].
        """
        assert stem is None
        heads, (keys, values) = self.heads, rectangle
        q, k, v = x.view(len(x), -1, heads.dim).split([heads.queries, heads.keys, heads.keys], 1)
        if norms is not None:
            q, k = (self.rms_norm(y, w) for y, w in zip((q, k), norms, strict=True))
        # Rolling by half is rotate_half but for the sign, which is in ``sin``.
        cos, sin = places.cos[:, None], places.sin[:, None]
        q, k = (torch.addcmul(y * cos, y.roll(heads.dim // 2, -1), sin) for y in (q, k))
        keys[places.rows, :, places.at] = k
        values[places.rows, :, places.at] = v
        rows, counts = places.rows.unique_consecutive(return_counts=True)
        if len(rows) == len(x):  # all decode: heads of a group stand in for query positions
            end = int(places.at.max()) + 1
            query = q.view(len(x), heads.keys, -1, heads.dim)
            seen = (torch.arange(end) <= places.at[:, None])[:, None, None]
            out = F.scaled_dot_product_attention(
                query, keys[: len(x), :, :end], values[: len(x), :, :end],
                seen.expand(-1, -1, query.shape[2], -1), scale=heads.scale,
            )  # fmt: skip
            return out.flatten(1)
        found: list[Tensor] = []
        sizes = counts.tolist()
        each = zip(rows.tolist(), q.split(sizes), places.at.split(sizes), strict=True)
        for row, query, at in each:
            end = int(at[-1]) + 1
            out = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], keys[None, row, :, :end], values[None, row, :, :end],
                torch.arange(end) <= at[:, None], scale=heads.scale, enable_gqa=True,
            )  # fmt: skip
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


class _Batch(ctypes.Structure):
    """``Batch`` of kernels.c."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_void_p), ("places", ctypes.c_void_p),
        ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p),
        ("key_heads", ctypes.c_int64), ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64), ("stem", ctypes.c_int64), ("stem_stride", ctypes.c_int64),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float), ("threads", ctypes.c_int),
    )  # fmt: skip


class CompiledKernels(TorchKernels):
    """The same by ``kernels.c``, compiled for these heads and this processor.

    Raises:
        OSError: there is no C compiler, or it cannot compile this; its text says why.
    """

    takes_stems = True

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads)
        group = heads.queries // heads.keys
        lanes = math.gcd(heads.dim, _LANES)
        self._library = compiled.library(
            "kernels", f"DIM={heads.dim}", f"GROUP={group}", f"LANES={lanes}"
        )

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y, size = torch.empty_like(x), x.shape[-1]
        self._library.rms_norm(
            address(x), address(weight), address(y), ctypes.c_int64(x.numel() // size), size,
            ctypes.c_float(self.heads.eps), torch.get_num_threads(),
        )  # fmt: skip
        return y

    def silu_mul(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), x.shape[1] // 2)
        rows, size = ctypes.c_int64(len(y)), y.shape[1]
        self._library.silu_mul(address(x), address(y), rows, size, torch.get_num_threads())
        return y

    def attend(
        self, x: Tensor, places: Places, rectangle: Pair, stem: Pair | None, norms: Pair | None
    ) -> Tensor:
        heads, keys = self.heads, rectangle[0]
        y = x.new_empty(len(x), heads.queries * heads.dim)
        batch = _Batch(
            len(x), places.rows.data_ptr(), places.at.data_ptr(),
            places.cos.data_ptr(), places.sin.data_ptr(),
            heads.keys, keys.stride(0), keys.stride(1),
            *((0, 0) if stem is None else (stem[0].shape[1], stem[0].stride(0))),
            heads.scale, heads.eps, torch.get_num_threads(),
        )  # fmt: skip
        pairs = (norms, rectangle, stem)
        pointers = [p for pair in pairs for p in (map(address, pair) if pair else (None, None))]
        self._library.attend(ctypes.byref(batch), address(x), *pointers, address(y))
        return y


def cpu_kernels(heads: Heads) -> TorchKernels:
    """Return the quickest kernels that can be had here."""
    try:
        return CompiledKernels(heads)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.warning("the embedded sampler is slower without its compiled kernels: %s", error)
        return TorchKernels(heads)
