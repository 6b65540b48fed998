"""A learner whose base model is spread over all ranks, by torch's FSDP2 (``fully_shard``).

A rank gathers the weights of a layer when it computes the layer, and drops them again. So all ranks
make the same passes over the model at the same time, though their rows differ: a rank without rows
makes idle passes until all ranks are done. Adapters and heads are whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from peft.tuners import tuners_utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from agentrl_trainer.data.packing import MicroBatch, pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.stems import OpenStems
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.sources import ModelError


class ShardedLearner(Learner):
    """Over a base model that was loaded as ``distributed``; see ``Learner``.

    Long prefixes are computed in each micro-batch, not once: gradients would enter a stem in the
    middle of a layer, whose weights are not there.
    """

    def __init__(self, base: BaseModel, **options: Any) -> None:
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ModelError("shard_base: needs a newer torch; 2.13 can do it")
        spread = {name: m for name, m in base.model.named_modules() if isinstance(m, FSDPModule)}
        layers = {name for name in spread if any(part.isdigit() for part in name.split("."))}
        if not layers:
            kind = base.model.config.model_type
            raise ModelError(f"shard_base: transformers has no plan to spread {kind}'s layers")
        # PEFT 0.21 takes a part's shape for the layer's where nodes hold whole bases each.
        tuners_utils._torch_supports_distributed = False
        # Backwards reach the first layer on every rank, whatever layers its adapter changes.
        base.model.enable_input_require_grads()
        super().__init__(base, **options)
        # Trials of the model take any error for its own, also that of a rank which is gone.
        ways: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ways, (self._logprobs.why_all_logits, self._logprobs.why_padded))
        if len({*ways}) > 1:
            raise RuntimeError(f"the ranks compute the model in different ways: {ways}")
        # All but the layers (embeddings, the last norm) are gathered for a whole call.
        self._kept = [module for name, module in spread.items() if name not in layers]
        for module in self._kept:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        self._root.reset_iter_state()

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self.base.model)

    @contextlib.contextmanager
    def in_step(self, *, backward: bool) -> Iterator[None]:
        """Keep the passes of all ranks in step; they enter and leave together.

        Args:
            backward: whether each pass has a backward.
        """
        for module in self._kept:
            module.unshard()
        yield
        idle = TrainingRow([1, 2], [False, True], [0.0] * 2, [0.0] * 2, self.adapters[0])
        [batch] = self._pack([idle])
        while self._any_rank_has_pass(False):
            with torch.set_grad_enabled(backward), self.model.disable_adapter():
                logprobs = self._logprobs(batch.to(self.base.device))
                if backward:
                    logprobs.sum().backward()
        # Not by ``reshard``, which does nothing where modules of a group ran unequally often.
        self._root.reset_iter_state()

    def _ready(self, stems: OpenStems) -> Iterator[MicroBatch]:
        for batch in super()._ready(stems):
            self._any_rank_has_pass(True)
            yield batch

    def _backward(self, value: Tensor, adapter: str, scale: float = 1.0) -> bool:
        if not (finite := super()._backward(value, adapter, scale)):
            (value * scale).backward()  # for nothing, as ranks whose losses are finite make one
        return finite

    def _pack(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        share = self.why_not_shared is None
        return pack(
            rows, token_budget=self.token_budget, enough=self._enough, share=share, stems=False
        )

    def _any_rank_has_pass(self, own: bool) -> bool:
        """Tell the other ranks whether this one has a pass to make; return whether any has."""
        any_has = torch.tensor(int(own))
        dist.all_reduce(any_has, dist.ReduceOp.MAX)
        return bool(any_has)


def learner_of(shard: bool) -> type[Learner]:
    return ShardedLearner if shard else Learner
