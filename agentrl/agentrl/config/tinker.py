"""What ``agentrl train --backend tinker`` takes, and what it cannot do: each refused by its name.

Knows settings; no torch and no SDK here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from agentrl.config.checks import changed

if TYPE_CHECKING:
    from agentrl.config.commands import TrainConfig

_LOCAL: dict[str, str] = {
    "model.device": "the model runs on Tinker",
    "model.dtype": "the model runs on Tinker, in its own precision",
    "model.load_in_4bit": "the model runs on Tinker, in its own precision",
    "sampler.kind": "Tinker samples",
    "learning.micro_batch_tokens": "Tinker packs its batches itself",
    "learning.gradient_checkpointing": "Tinker sees to its own memory",
    "learning.alpha": "Tinker's is 32",
    "algorithm.kl.reference": "over Tinker the reference is the base model",
}
"""Settings that must be left at their defaults, and why."""


def check_backend(config: TrainConfig) -> None:
    """Raises ValueError, naming the setting and the fix."""
    if config.run.backend == "local":
        for name in changed(config.tinker):
            raise ValueError(f'tinker.{name}: has no effect without run.backend = "tinker"')
        return
    for name, why in _LOCAL.items():
        *tables, key = name.split(".")
        table = config
        for part in tables:
            table = getattr(table, part)
        if key in changed(table):
            raise ValueError(
                f'{name}: does not go with run.backend = "tinker": {why}; leave it out'
            )
    if config.algorithm.estimator == "gae":
        raise ValueError(
            'algorithm.estimator: gae does not go with run.backend = "tinker", which has no value '
            "function; choose another"
        )
    if config.sampler.temperature != 1.0:
        raise ValueError(
            f"sampler.temperature: {config.sampler.temperature} does not go with run.backend = "
            '"tinker", whose log-probs are those at temperature 1; leave it out'
        )
    if find_spec("tinker") is None:
        raise ValueError(
            "run.backend: \"tinker\" needs the official SDK: pip install 'agentrl[tinker]'"
        )
