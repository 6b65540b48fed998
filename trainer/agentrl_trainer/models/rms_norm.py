"""Compute RMSNorm in few passes over memory, and its output again for the backward.

Knows autograd and transformers' norms, not adapters. Several linear layers read a norm's output,
and the gradients of their adapters need it. Each layer would keep it. Two products make it again of
the tensors that the norm keeps anyway.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def same_code(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether a module's forward is that of ``known`` word by word: transformers copies a class
    into over a hundred families."""
    own, theirs = getattr(type(module).forward, "__code__", None), known.forward.__code__
    return own is not None and (own.co_code, own.co_names) == (theirs.co_code, theirs.co_names)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is the RMSNorm of the Llama family, by whatever name."""
    return same_code(module, LlamaRMSNorm)


def join_norm(norm: nn.Module) -> None:
    """Compute a plain norm by ``RmsNorm`` where its weight is frozen and all is float32."""
    norm.forward = MethodType(_forward, norm)


def _forward(self: Any, x: Tensor) -> Tensor:
    same = x.dtype == self.weight.dtype == torch.float32 and not self.weight.requires_grad
    if not same or not torch.is_grad_enabled():
        return cast(Tensor, type(self).forward(self, x))
    made, inverse = RmsNorm.apply(x, self.weight, self.variance_epsilon)
    made.agentrl_normed = Normed(_Maker(self.weight, made), x.detach(), inverse)
    return made


class RmsNorm(torch.autograd.Function):
    """``x [..., n] -> x * inverse * weight``, with ``inverse [..., 1] = 1 / sqrt(mean(x²) + eps)``
    (arXiv:1910.07467), which it also returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.mark_non_differentiable(inverse)
        return (x * inverse).mul_(weight), inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        slope = grads[0] * weight
        along = (slope * x).mean(-1, keepdim=True).mul_(inverse).mul_(inverse)
        return slope.addcmul_(x, along, value=-1).mul_(inverse), None, None


class Normed(NamedTuple):
    """How to make a norm's output again: ``maker(x, inverse)``."""

    maker: _Maker
    x: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, made: Tensor) -> Normed | None:
        """Return how to make a layer's input again, if it is the output of a norm, unchanged.

        The layer shall call the maker once, in its backward.
        """
        found: Normed | None = getattr(made, "agentrl_normed", None)
        return found if found is not None and found.maker.counts(made) else None


class _Maker:
    """Makes a norm's output once for the backward of all layers that read it."""

    def __init__(self, weight: Tensor, made: Tensor) -> None:
        self._weight, self._version = weight, made._version
        self._readers = 0
        self._made: Tensor | None = None

    def counts(self, made: Tensor) -> bool:
        """Count a reader, unless the output was changed in place."""
        same = made._version == self._version
        self._readers += same
        return same

    def __call__(self, x: Tensor, inverse: Tensor) -> Tensor:
        made = (x * inverse).mul_(self._weight) if self._made is None else self._made
        self._readers -= 1
        self._made = made if self._readers > 0 else None
        return made
