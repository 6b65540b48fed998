"""agentrl: reinforcement learning for the agent you already have.

In an agent only ``emit_reward`` is needed::

    from agentrl import emit_reward

Importing this package is cheap and safe in any process: everything else is loaded when it is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.cli.train import train
    from agentrl.training.loop import Trainer
    from agentrl_tracer.emit import emit, emit_reward
    from agentrl_tracer.store import Store
    from agentrl_trainer.client import (
        AdamParams,
        Datum,
        ModelInput,
        SamplingClient,
        SamplingParams,
        ServiceClient,
        TrainingClient,
    )

__version__ = "0.1.0"
__all__ = [
    "AdamParams",
    "Datum",
    "ModelInput",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "Store",
    "Trainer",
    "TrainingClient",
    "__version__",
    "emit",
    "emit_reward",
    "train",
]

_HOMES = {
    "emit": "agentrl_tracer.emit",
    "emit_reward": "agentrl_tracer.emit",
    "Store": "agentrl_tracer.store",
    "Trainer": "agentrl.training.loop",
    "train": "agentrl.cli.train",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "agentrl_trainer.client")), name)
