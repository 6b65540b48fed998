"""Join a Ray cluster, or start one on this machine."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.config.commands import TrainConfig


def places_of(config: TrainConfig) -> int:
    """Count the places that a run wants on a Ray cluster: of runners, and of trainers."""
    runners = config.rollouts.runners if config.rollouts.runners_on == "ray" else 0
    if config.run.backend == "verl":
        return runners + config.learning.trainers
    return runners + (config.learning.trainers - 1) * (config.learning.trainers_on == "ray")


def join_or_start(setting: str, places: int) -> bool:
    """Join the cluster of ``RAY_ADDRESS`` or of this machine, else start one on this machine.

    Args:
        setting: the one that asks for Ray, for messages.
        places: how many runners and trainers a cluster that is started here can hold.

    Returns:
        Whether this call connected the process to a cluster.

    Raises:
        ValueError: Ray is not installed, or does not start.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"{setting}: ray is not installed; pip install ray") from None
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        ray.init(address="auto", **options)
        return True
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ValueError(
                f"{setting}: no Ray cluster answers at RAY_ADDRESS {address}: {error} Start it, or "
                "unset RAY_ADDRESS to have one started here"
            ) from error
    cpus = max(places, os.cpu_count() or 1)
    try:
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, **options)
        return True
    except Exception as error:  # Ray raises nothing narrower
        ray.shutdown()
        raise ValueError(  # a usual cause is ray-project/ray#65983
            f"{setting}: Ray did not start: {error} On a busy machine Ray's helper process may "
            "take longer than the 15 seconds that Ray allows it: try again, or join a cluster that "
            "`ray start --head` has started. Ray's own logs are in /tmp/ray/session_latest/logs"
        ) from error
