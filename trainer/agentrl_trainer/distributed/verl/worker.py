"""verl's worker, whose adapter and gradients go in and out. Runs in an actor of Ray.

verl trains one adapter and keeps its optimizer; here it computes log-probs and gradients of
whichever adapter it is given, and the learner keeps the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from verl.single_controller.base.decorator import (  # pyright: ignore[reportMissingImports]
    Dispatch,
    register,
)
from verl.workers.engine_workers_tinker import (  # pyright: ignore[reportMissingImports]
    TinkerTrainingWorker,
)

from agentrl_trainer.distributed.plan import SetupCall
from agentrl_trainer.models.lora import adapter_parameters


class VerlWorker(TinkerTrainingWorker):
    """One of the workers. Its methods are called on all of them together."""

    def __init__(self, config: Any, setup: Sequence[SetupCall]) -> None:
        for name, arguments in setup:
            resolve_name(name)(*arguments)
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Load the model. It stays in evaluation mode, without dropout, when verl trains."""
        self.engine.initialize()
        module, again = self.engine.module, self.model_config.enable_gradient_checkpointing
        module.train = partial(_train, module, again)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights from now on; the names are those of ``adapter_parameters``.

        Raises:
            ValueError: verl's adapter has other tensors.
        """
        with self.engine.train_mode(zero_grad_on_exit=True), torch.no_grad():
            own = self._adapter()
            if odd := sorted(own.keys() ^ weights.keys()):
                raise ValueError(f"verl adapts other layers: {len(odd)} differ, {odd[:3]} ...")
            for key, parameter in own.items():
                whole: Tensor = weights[key].to(parameter.device, parameter.dtype)
                if isinstance(parameter, DTensor):
                    how = parameter.device_mesh, parameter.placements
                    whole = distribute_tensor(whole, *how, src_data_rank=None)
                parameter.copy_(whole)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_gradients(self) -> dict[str, Tensor]:
        """Return the adapter's gradients of all rows, in float32, and forget them. Rank 0 returns
        them; other ranks return nothing."""
        found: dict[str, Tensor] = {}
        with self.engine.train_mode(zero_grad_on_exit=True):
            for key, parameter in self._adapter().items():
                if (whole := parameter.grad) is not None:
                    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                    if self.rank == 0:
                        found[key] = whole.float().cpu()
        return found

    def _adapter(self) -> dict[str, nn.Parameter]:
        for module in self.engine.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else its parameters may be copies
        return adapter_parameters(self.engine.module, "default")


def _train(module: nn.Module, again: bool, mode: bool = True) -> nn.Module:
    """Keep evaluation mode. With ``again``, put layers alone into training mode, where the backward
    computes them again."""
    nn.Module.train(module, False)
    for layer in module.modules():
        if again and isinstance(layer, GradientCheckpointingLayer):
            layer.training = mode
    return module
