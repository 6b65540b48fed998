"""Products of a model's linear layers on a CPU, fused by common input, also with 8-bit weights.

Knows tensors, not models.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl_trainer.inference.cpu import compiled
from agentrl_trainer.inference.cpu.compiled import address

_DIGIT = 127
_SECOND = 2 * _DIGIT
"""What a first digit's step is divided by: its rounding error is at most half of it."""


class FusedLinear:
    """``x [rows, in] -> x Wᵀ + bias`` of one or more linear layers that read the same ``x``.

    ``linear_products.c`` computes it where it can be compiled, with the weights in an order of its
    own, else torch.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.outputs, self.inputs = whole.shape
        self.bias = bias
        self._library = _library()
        if self._library is None:
            self._weight = whole.t().contiguous()
        else:
            width = self._library.width()
            filled = F.pad(whole, (0, 0, 0, -self.outputs % width))
            self._weight = filled.view(-1, width, self.inputs).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.bias)

    def plus(self, x: Tensor, more: Tensor) -> Tensor:
        """Return ``self(x) + more``."""
        return self._product(x, more if self.bias is None else more + self.bias)

    def _product(self, x: Tensor, more: Tensor | None) -> Tensor:
        """``more`` is a row for each one of x, or one for all."""
        if self._library is None:
            return torch.mm(x, self._weight) if more is None else torch.addmm(more, x, self._weight)
        x, more = x.contiguous(), None if more is None else more.contiguous()
        y = x.new_empty(len(x), self.outputs)
        tensors = map(address, (x, self._weight, more, y))
        stride = self.outputs if more is not None and more.dim() > 1 else 0
        numbers = map(ctypes.c_int64, (stride, len(x), self.inputs, self.outputs))
        self._library.product(*tensors, *numbers, torch.get_num_threads())
        return y


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


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return compiled.library("linear_products")
    except (OSError, RuntimeError):  # ``cpu_kernels`` says why
        return None
