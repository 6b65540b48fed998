"""How processes become the ranks of one learner: what each of them is told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from agentrl_trainer.distributed.heartbeats import beat
from agentrl_trainer.distributed.options import check_shards
from agentrl_trainer.models.loading import BaseModel, load_base, load_facts

JOIN = timedelta(seconds=45)
"""How long ranks that are ready wait for each other: one that dies now is not noticed earlier."""
_SLOWEST = timedelta(minutes=30)
"""How long ranks wait for the slowest one's share of a call, or its base model."""
SetupCall = tuple[str, tuple[Any, ...]]
"""A function, as ``module:name``, and its arguments."""


class RankError(RuntimeError):
    """A rank could not start, or ended, and with it what all ranks were computing."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How to become a rank; pickled.

    Raises:
        ValueError: the base model cannot be spread, see ``options.check_shards``.
    """

    model: str
    model_options: Mapping[str, Any]
    """Of ``load_base``."""
    size: int
    """How many ranks there are."""
    setup: Sequence[SetupCall] = ()
    """What ranks other than the first call before anything else, in this order."""
    shard: bool = False
    """Each rank holds a part of the base model, not all of it."""
    launch: Literal["here", "ray"] = "here"
    """Where the other ranks run: as processes of this machine, or as actors on a Ray cluster."""
    device: str = "cpu"
    """The type; on CUDA each rank has a GPU of its own."""
    host: str = ""
    """Where the first rank listens."""
    port: int = 0
    rank: int = 0
    replicas: int = 1
    """How many whole base models the parts of all ranks make."""

    def __post_init__(self) -> None:
        in_4bit = bool(self.model_options.get("load_in_4bit"))
        check_shards(shard=self.shard, load_in_4bit=in_4bit)

    def join(self) -> None:
        """Join the process group, which waits for all ranks.

        Raises:
            RuntimeError: one of them has not joined in time.
        """
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo",
            init_method=f"tcp://{self.host}:{self.port}",
            rank=self.rank, world_size=self.size, timeout=JOIN,
        )  # fmt: skip
        _set_pg_timeout(_SLOWEST)
        _get_default_store().set_timeout(_SLOWEST)
        if self.rank:
            beat(self.host, self.port, self.rank)

    def load(self) -> BaseModel:
        """Load this rank's base model, or its part of it.

        Raises:
            ModelError: as ``load_base`` does.
            RuntimeError: another rank cannot load it.
        """
        options = dict(self.model_options)
        gpu = self.rank if self.launch == "here" else 0  # Ray shows each actor one GPU
        if self.device == "cuda":
            options["device"] = f"cuda:{gpu}"
        if not self.shard:
            return load_base(self.model, **options)
        told = {name: options[name] for name in options.keys() & {"trust_remote_code"}}
        load_facts(self.model, **told, chat_template=options.get("chat_template"))
        dist.all_gather_object([None] * self.size, None)  # a rank without the model is gone now
        sizes = {"dp_replicate_size": self.replicas, "fsdp_size": self.size // self.replicas}
        os.environ["LOCAL_RANK"] = str(gpu)  # where transformers reads it
        try:
            return load_base(self.model, **options, distributed=sizes)
        finally:
            del os.environ["LOCAL_RANK"]
