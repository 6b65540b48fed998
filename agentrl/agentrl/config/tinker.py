"""Refuse the settings that ``agentrl train`` cannot use over Tinker."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from agentrl.config.checks import changed

if TYPE_CHECKING:
    from agentrl.config.commands import TrainConfig

_LOCAL_ONLY: dict[str, str] = {
    "model.device": "the model runs on Tinker",
    "model.dtype": "the model runs on Tinker, in its own precision",
    "model.load_in_4bit": "the model runs on Tinker, in its own precision",
    "sampler.kind": "Tinker samples",
    "sampler.temperature": "Tinker's log-probs are those at temperature 1",
    "learning.micro_batch_tokens": "Tinker packs its own batches",
    "learning.gradient_checkpointing": "Tinker manages its own memory",
    "learning.alpha": "Tinker's alpha is 32",
    "algorithm.kl.reference": "over Tinker the reference is the base model",
}
"""Settings that must keep their defaults, and why."""


def check_backend(config: TrainConfig) -> None:
    """Check the settings against the backend.

    Raises:
        ValueError: names the setting and the fix.
    """
    if config.run.backend == "local":
        for name in changed(config.tinker):
            raise ValueError(f'tinker.{name}: has no effect without run.backend = "tinker"')
        return
    for name, why in _LOCAL_ONLY.items():
        *tables, key = name.split(".")
        table = config
        for part in tables:
            table = getattr(table, part)
        if key in changed(table):
            raise ValueError(f'{name}: not with run.backend = "tinker": {why}; leave it out')
    if config.algorithm.estimator == "gae":
        raise ValueError(
            'algorithm.estimator: gae needs a value function, which run.backend = "tinker" does '
            "not have; choose another"
        )
    if find_spec("tinker") is None:
        raise ValueError(
            "run.backend: \"tinker\" needs the official SDK: pip install 'tinker>=0.38,<1'"
        )
