"""Products of a model's linear layers on a CPU, fused by common input: MKL, oneDNN, 8-bit weights.

Knows tensors and processors, not models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

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


def can_pack() -> bool:
    """Whether oneDNN's products are used too; without AVX-512, and on Intel's processors, they are
    no faster.

    Its operations are private to torch and may disappear; the decoder works without them.
    """
    return (
        not on_intel()
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
