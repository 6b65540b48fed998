"""Products of a model's linear layers on a CPU, fused by common input.

Weights have 32, 16 or 8 bits. Knows tensors, not models.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl_trainer.inference.cpu import compiled
from agentrl_trainer.inference.cpu.compiled import address

_DIGIT = 127
_SECOND = 2 * _DIGIT
"""What a first digit's step is divided by: its rounding error is at most half of it."""
_MOST_INPUTS = 65_536
"""Whose sum of products of 8-bit numbers fits 32 bits."""


class Linear(ABC):
    """``x [rows, in] -> x Wᵀ + bias`` of one or more linear layers that read the same ``x``."""

    _lora: tuple[FusedLinear, FusedLinear] | None = None

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        self._sizes = [len(weight) for weight in weights]
        self.outputs, self.inputs = sum(self._sizes), weights[0].shape[1]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def plus(self, x: Tensor, more: Tensor) -> Tensor:
        """Return ``self(x) + more``."""
        return self.product(x, more if self.bias is None else more + self.bias)

    def product(self, x: Tensor, more: Tensor | None) -> Tensor:
        """Return ``x Wᵀ + more``, where ``more`` is a row for each one of x, or one for all."""
        if self._lora is not None:
            down, up = self._lora
            more = up.product(down(x), more)
        return self._product(x.contiguous(), None if more is None else more.contiguous())

    def adapted(self, loras: Sequence[tuple[Tensor, Tensor, float] | None]) -> Self:
        """Return the same weights with LoRAs beside them: A [rank, in], B [out, rank], scale.

        They are applied in float32: merged into rounded weights, they would be lost.
        """
        downs = [lora[0].float() for lora in loras if lora is not None]
        if not downs:
            return self
        ups = [
            torch.zeros(size, 0) if lora is None else lora[1].float() * lora[2]
            for size, lora in zip(self._sizes, loras, strict=True)
        ]
        made = copy.copy(self)
        made._lora = FusedLinear(downs, None), FusedLinear([torch.block_diag(*ups)], None)
        return made

    @abstractmethod
    def _product(self, x: Tensor, more: Tensor | None) -> Tensor: ...


class FusedLinear(Linear):
    """Weights in float32, or stored as bfloat16, which take half the memory.

    ``linear_products.c`` computes it where it can be compiled, else torch. Sums are in float32.
    """

    def __init__(
        self, weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(weights, bias)
        definitions = ["BFLOAT16"] if dtype == torch.bfloat16 else []
        self._library = _library("linear_products", *definitions)
        whole = _joined(weights).to(dtype)
        if self._library is None:
            self._weight = whole.t().contiguous()
        else:
            self._weight = _panels(whole, self._library.width(), 1)

    def _product(self, x: Tensor, more: Tensor | None) -> Tensor:
        if self._library is None:
            weight = self._weight.float()
            return torch.mm(x, weight) if more is None else torch.addmm(more, x, weight)
        y = x.new_empty(len(x), self.outputs)
        tensors = map(address, (x, self._weight, more, y))
        sizes = _stride(more), len(x), self.inputs, self.outputs
        self._library.product(*tensors, *map(ctypes.c_int64, sizes), torch.get_num_threads())
        return y


class Int8Linear(Linear):
    """8-bit weights: integers with one scale for each output.

    Inputs keep 15 bits: two 8-bit digits for each number, with one scale for each row, so a row's
    result does not depend on other rows. ``int8_products.c`` computes it on processors with AVX-512
    VNNI, else torch.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        super().__init__(weights, bias)
        whole = _joined(weights)
        scales = whole.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny).div_(_DIGIT)
        rounded = (whole / scales[:, None]).round_()
        self._library = _library("int8_products") if self.inputs <= _MOST_INPUTS else None
        if self._library is None:
            self._weight, self._scales = rounded.to(torch.int8).t(), scales
        else:
            width = self._library.width()
            self._weight = _panels(rounded.add_(128).to(torch.uint8), width, 4)
            self._scales = F.pad(scales, (0, -self.outputs % width))

    def _product(self, x: Tensor, more: Tensor | None) -> Tensor:
        if self._library is None:
            return self._by_torch(x, more)
        y = x.new_empty(len(x), self.outputs)
        filled = self.inputs + -self.inputs % 4
        digits = torch.empty(len(x), 2, filled, dtype=torch.int8)
        about = torch.empty(len(x), 3)
        tensors = map(address, (x, self._weight, self._scales, more, y, digits, about))
        sizes = _stride(more), len(x), self.inputs, filled, self.outputs
        self._library.product(*tensors, *map(ctypes.c_int64, sizes), torch.get_num_threads())
        return y

    def _by_torch(self, x: Tensor, more: Tensor | None) -> Tensor:
        scales = x.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny).div_(_DIGIT)
        first = (rest := x / scales).round()
        digits = torch.cat([first, rest.sub_(first).mul_(_SECOND)]).round_().to(torch.int8)
        high, low = torch.ops.aten._int_mm(digits, self._weight).split(len(x))
        y = low.mul(1 / _SECOND).add_(high).mul_(scales).mul_(self._scales)
        return y if more is None else y.add_(more)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _panels(weight: Tensor, width: int, block: int) -> Tensor:
    """``[out, in] -> [panels, in / block, width, block]``, filled up with zeros."""
    outputs, inputs = weight.shape
    filled = F.pad(weight, (0, -inputs % block, 0, -outputs % width))
    return filled.view(-1, width, filled.shape[1] // block, block).transpose(1, 2).contiguous()


def _stride(more: Tensor | None) -> int:
    """Return how far rows of ``more`` are apart, 0 for one that is added to all."""
    return more.shape[1] if more is not None and more.dim() > 1 else 0


@functools.cache
def _library(name: str, *definitions: str) -> ctypes.CDLL | None:
    try:
        return compiled.library(name, *definitions)
    except (OSError, RuntimeError):  # ``cpu_kernels`` says why
        return None
