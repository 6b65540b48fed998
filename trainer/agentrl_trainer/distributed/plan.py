"""How a process becomes a rank of a learner: what the first one sends to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

JOIN = timedelta(seconds=45)
"""How long ranks that are ready wait for each other: one that dies now is not noticed earlier."""
_SLOWEST = timedelta(minutes=30)
"""How long ranks wait for the slowest one's share of a call."""
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method, its arguments and its options."""


SetupCall = tuple[str, tuple[Any, ...]]
"""A function, as ``module:name``, and its arguments."""


@dataclass(frozen=True, slots=True)
class FollowerPlan:
    """How to become a rank; pickled."""

    model: str
    model_options: Mapping[str, Any]
    """Of ``load_base``."""
    setup: Sequence[SetupCall] = ()
    """Called first, in this order."""
    learner_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    structure: Sequence[Call] = ()
    """Calls that the learner has had since it was made."""
    device: str = "cpu"
    """The type; on CUDA each rank has the GPU of its number."""
    threads: int = 1
    """Of torch, in each rank."""
    address: str = ""
    rank: int = 0
    size: int = 1

    def join(self) -> None:
        """Join the process group, which waits for all ranks.

        Raises:
            RuntimeError: one of them has not joined in time.
        """
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo", init_method=self.address,
            rank=self.rank, world_size=self.size, timeout=JOIN,
        )  # fmt: skip
        _set_pg_timeout(_SLOWEST)
