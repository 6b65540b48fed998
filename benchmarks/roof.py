"""What the cores can do: the products and reads that a model's time is made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def product_gflops(rows: int = 512, width: int = 576, out: int = 1536) -> float:
    """GFLOP/s of a float32 product of SmolLM2-135M's shapes, on torch's threads."""
    x, weight = torch.randn(rows, width), torch.randn(width, out)
    result = torch.empty(rows, out)
    return 2e-9 * rows * width * out / quickest(lambda: torch.mm(x, weight, out=result))


def read_gigabytes(size: int = 2**29) -> float:
    """GB/s of reading memory that no cache holds, on torch's threads."""
    numbers = torch.ones(size // 4)
    return 1e-9 * size / quickest(numbers.sum, least=3)


def quickest(work: Callable[[], object], least: int = 50, seconds: float = 0.5) -> float:
    """Seconds of the quickest of at least ``least`` runs, and of as many as half a second holds."""
    work()
    best, runs, begun = float("inf"), 0, time.perf_counter()
    while runs < least or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        work()
        best, runs = min(best, time.perf_counter() - started), runs + 1
    return best
