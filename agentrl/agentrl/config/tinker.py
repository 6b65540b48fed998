"""What ``agentrl train --backend tinker`` takes, and what it cannot do: each refused by its name.

Knows settings; no torch and no SDK here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.settings import TrainSettings

_OURS = ("tinker_base_url", "tinker_tokenizer")
_LOCAL: dict[str, str] = {
    "device": "the model runs on Tinker",
    "dtype": "the model runs on Tinker, in its own precision",
    "load_in_4bit": "the model runs on Tinker, in its own precision",
    "sampler": "Tinker samples",
    "micro_batch_tokens": "Tinker packs its batches itself",
    "gradient_checkpointing": "Tinker sees to its own memory",
    "alpha": "Tinker's is 32",
    "kl_reference": "over Tinker the reference is the base model",
}
"""Settings that must be left at their defaults, and why."""


def check_backend(config: TrainSettings) -> None:
    """Raises ValueError, naming the setting and the fix."""
    if config.backend == "local":
        for name in _OURS:
            if getattr(config, name) is not None:
                raise ValueError(f'{name}: has no effect without backend = "tinker"')
        return
    for name, why in _LOCAL.items():
        if getattr(config, name) != _default(config, name):
            raise ValueError(f'{name}: does not go with backend = "tinker": {why}; leave it out')
    if config.estimator == "gae":
        raise ValueError(
            'estimator: gae does not go with backend = "tinker", which has no value function; '
            "choose another"
        )
    if config.temperature != 1.0:
        raise ValueError(
            f'temperature: {config.temperature} does not go with backend = "tinker", whose '
            "log-probs are those at temperature 1; leave it out"
        )
    if find_spec("tinker") is None:
        raise ValueError(
            "backend: \"tinker\" needs the official SDK: pip install 'agentrl[tinker]'"
        )


def _default(config: TrainSettings, name: str) -> Any:
    return type(config).model_fields[name].default
