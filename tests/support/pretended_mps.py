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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

MPS = torch.device("mps", 0)
_aten = torch.ops.aten
_CPU = torch.device("cpu")
_INTO = {_aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default}
_MIXED = {_aten._to_copy.default, *_INTO}
"""Copies are between devices; CPU tensors may index others."""


class OnMps(torch.Tensor):
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnMps:
        if held.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=MPS,
        )  # fmt: skip
        made.held = held
        return made

    def _set_data(self, other: OnMps) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    data = property(lambda self: self.detach(), _set_data)

    def __repr__(self, **_: Any) -> str:
        return f"OnMps({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchFunctionMode):
    """Creates tensors there, and moves them, where torch would ask for the device itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, spec = tree_flatten((args, kwargs or {}))
        if func is torch.device or not any(_is_mps(x) for x in given):
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_unflatten([_CPU if _is_mps(x) else x for x in given], spec)
        if args and isinstance(args[0], OnMps):  # x.to("mps"), perhaps to another dtype
            args = (args[0].held, *args[1:])
        return OnMps(func(*args, **kwargs).detach())


def _is_mps(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "mps") or (isinstance(x, str) and x == "mps")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given, _ = tree_flatten((args, kwargs))
    strangers = any(
        isinstance(x, torch.Tensor) and not isinstance(x, OnMps) and x.dim() for x in given
    )
    if strangers and func not in _MIXED:
        raise RuntimeError(f"{func}: tensors are on mps and on cpu")
    target = args[0] if func in _INTO else kwargs.get("device", MPS)
    plain = {**kwargs, "device": _CPU} if "device" in kwargs else kwargs
    held_args, held_kwargs = tree_map(
        lambda x: x.held if isinstance(x, OnMps) else x, (args, plain)
    )
    out = func(*held_args, **held_kwargs)
    if target is not None and not _is_mps(getattr(target, "device", target)):
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

    with patch.object(threading.Thread, "run", with_mode), _Mode():
        yield MPS
