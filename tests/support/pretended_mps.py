"""A device "mps" on any machine: CPU tensors that say they are there, and MPS's refusals.

Refused: float64, and operations on tensors of both devices. Numbers are the CPU's, so results can
be compared. What Metal's kernels compute, and which ones are missing, this cannot show.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # optimizers import it, and it must not see what is patched here
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

MPS = torch.device("mps", 0)
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_MIXED = {_aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default}
"""Copies are between devices; CPU tensors may index others."""
_NAMING = {torch.device, torch._C._nn._parse_to}
"""They take a device and make nothing there."""


class OnMps(torch.Tensor):
    """For torch's C++ it is on the CPU, because autograd asks a device's driver."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnMps:
        if held.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=_CPU,
        )  # fmt: skip
        made.held = held
        return made

    def _set_data(self, other: OnMps) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    device = property(lambda self: MPS)
    data = property(lambda self: self.detach(), _set_data)

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self) -> torch.Tensor:
        return self.held.clone()

    def __repr__(self, **_: Any) -> str:
        return f"OnMps({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchFunctionMode):
    """Creates tensors there and moves them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, spec = tree_flatten((args, kwargs))
        if func is torch.Tensor.to and isinstance(args[0], OnMps) and _CPU in given:
            return args[0].held.to(*args[1:], **kwargs).clone()
        if func in _NAMING or not any(map(_is_mps, given)):
            return func(*args, **kwargs)
        args, kwargs = tree_unflatten([_CPU if _is_mps(x) else x for x in given], spec)
        if args and isinstance(args[0], OnMps):  # x.to("mps"), perhaps to another dtype
            return func(*args, **kwargs)
        return OnMps(func(*args, **kwargs).detach())


def _is_mps(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "mps") or (isinstance(x, str) and x == "mps")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given, _ = tree_flatten((args, kwargs))
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if func not in _MIXED and any(x.dim() and not isinstance(x, OnMps) for x in tensors):
        raise RuntimeError(f"{func}: tensors are on mps and on cpu")
    held, more = tree_map(lambda x: x.held if isinstance(x, OnMps) else x, (args, kwargs))
    out = func(*held, **more)
    if func in _MIXED and not isinstance(args[0], OnMps):
        return out
    out = tree_map(lambda x: OnMps(x) if isinstance(x, torch.Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


@contextmanager
def pretended_mps() -> Iterator[torch.device]:
    """Make the device exist, also in threads that are started meanwhile."""
    run = threading.Thread.run

    def with_mode(self: threading.Thread) -> None:
        with _Mode():
            run(self)

    def alike(a: torch.Tensor, b: torch.Tensor) -> bool:  # else a module gets a new parameter
        return isinstance(a, OnMps) == isinstance(b, OnMps)

    with (
        patch.object(threading.Thread, "run", with_mode),
        patch.object(torch, "_has_compatible_shallow_copy_type", alike),
        _Mode(),
    ):
        yield MPS
