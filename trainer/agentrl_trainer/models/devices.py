"""What torch's devices differ in: which one ``auto`` is, their free memory, copies to them.

docs/devices.md lists these branches and those elsewhere, each with its test.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from agentrl_trainer.models.host_memory import free_on_host
from agentrl_trainer.models.sources import ModelError

P = ParamSpec("P")
T = TypeVar("T")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_LARGE_PER_TOKEN, _LEAST_LARGE, _LARGE = 2**9, 2**17, 2**21
"""Bytes of a large tensor: for each token of a micro-batch, at least, and at most."""
_returns_large = False


def default_device() -> torch.device:
    """Return what ``auto`` is: the first CUDA GPU, else the GPU of a Mac (MPS), else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_device(name: str) -> torch.device:
    """Return the device of this name, or of ``auto``.

    Raises:
        ModelError: this machine, or its build of torch, does not have it.
    """
    if name == "auto":
        return default_device()
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # what torch without CUDA raises
        raise ModelError(
            f"device: {name!r} cannot be used: {error}. Use auto or cpu, or install the build of "
            "torch for this device."
        ) from error
    return found


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take on a device; a container's limit counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":  # the machine's own memory; Metal recommends how much of it
        return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)
    return free_on_host()


def return_large_tensors(device: torch.device, token_budget: int) -> None:
    """On a CPU, have glibc give large tensors back to the system when they are freed.

    Else it keeps them in pieces, of which the next tensors cannot use much: an update of
    SmolLM2-135M with rows of 640 tokens takes 3.2 GB beside the model, instead of 1.8. Large are 2
    MiB, or 512 bytes for each token of ``token_budget`` where that is less: with micro-batches of
    640 tokens an update takes 0.6 GB beside the model, instead of 1.2.
    """
    global _returns_large
    if device.type == "cpu":
        _returns_large = True
        large = max(_LARGE_PER_TOKEN * token_budget, _LEAST_LARGE)
        _set_malloc(_MMAP_THRESHOLD, min(large, _LARGE))


def keep_freed_tensors(device: torch.device) -> None:
    """On a CPU, have glibc keep up to 256 MiB of freed tensors of less than 32 MiB for the next.

    Else each step of a sampler takes its memory anew, page by page: 1 of 42 s of a long run. Does
    nothing in a process that returns large ones.
    """
    if device.type == "cpu" and not _returns_large:
        _set_malloc(_MMAP_THRESHOLD, 2**25)
        _set_malloc(_TRIM_THRESHOLD, 2**28)


def _set_malloc(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL("libc.so.6").mallopt(option, value)


def return_freed_memory() -> None:
    """Have glibc give back to the system what is free between smaller tensors, too.

    For the end of an update, or of sampling: then the other one needs it. After an update of
    SmolLM2-135M with 8 rows of 640 tokens it is 0.4 GB.
    """
    with contextlib.suppress(OSError, AttributeError):  # of another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device, on CUDA without waiting for it.

    On MPS such a copy may read memory that was freed (github.com/pytorch/pytorch/issues/189690).
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def on_own_thread(compute: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call ``compute`` on a thread that ends with it, as do the OpenMP threads that it starts.

    Each thread that computes has OpenMP threads of its own. GNU's library counts all of them, idle
    ones too: when they are more than the cores, a thread that waits for others sleeps at once, and
    a decode step of 32 rows takes 1.4 times as long (SmolLM2-135M on two cores).
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compute, *args, **named).result()
