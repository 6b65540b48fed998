"""Ranks beside the first, as actors on the Ray cluster that this process has joined.

Ray (https://docs.ray.io) places the actors, and ends them with this process. Imported only when
asked for: Ray is an optional dependency.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util import (  # pyright: ignore[reportMissingImports]
    get_node_ip_address,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from agentrl_trainer.distributed.plan import RankError, SetupCall

_PLACE_S = 60
_LAST_WORDS_S = 2.0


class _Actor:
    def __init__(self, search: Sequence[str], setup: Sequence[SetupCall]) -> None:
        sys.path[:0] = [folder for folder in search if folder not in sys.path]
        from agentrl_trainer.distributed.follower import Follower

        self._follower = Follower(setup)
        self._failed: BaseException | None = None

    def node(self) -> str:
        return own_node()

    def do(self, pickled: bytes) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            self._follower.do(pickled)
        except BaseException as error:
            self._failed = error
            # The others wait for this rank as long as its process lives.
            threading.Timer(_LAST_WORDS_S, os._exit, [1]).start()
            raise


class FollowerActor:
    """A ``Follower`` in an actor, as the first rank sees it: see ``FollowerProcess``."""

    def __init__(self, actor: Any, group: Any) -> None:
        self._actor, self._group = actor, group
        self._last = self._node = actor.node.remote()

    @property
    def node(self) -> str:
        return ray.get(self._node)

    def send(self, pickled: bytes) -> None:
        self._last = self._actor.do.remote(pickled)

    def why_ended(self, timeout_s: float | None) -> str | None:
        done, _ = ray.wait([self._last], timeout=timeout_s)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            return said_of(error)
        return None

    def kill(self) -> None:
        ray.kill(self._actor)

    def end(self) -> None:
        self.kill()
        remove_placement_group(self._group)  # of all of them, which end together


def placed(count: int, place: Mapping[str, float], *, nodes: int | None = None) -> list[Any]:
    """Reserve places for trainers.

    Args:
        place: what each of them needs.
        nodes: in so many equal parts, each of them on one node; by default wherever there is room.

    Returns:
        Ray's placement group of each part; a single one without ``nodes``.

    Raises:
        RankError: the cluster has no room for them, or this process is in none.
    """
    if not ray.is_initialized():
        raise RankError("join a Ray cluster first, by ray.init()")
    parts, strategy = nodes or 1, "STRICT_PACK" if nodes else "PACK"
    groups = [placement_group([dict(place)] * (count // parts), strategy) for _ in range(parts)]
    ready, _ = ray.wait([one.ready() for one in groups], num_returns=parts, timeout=_PLACE_S)
    if len(ready) == parts:
        return groups
    for one in groups:
        remove_placement_group(one)
    together = f", {count // parts} of them on one node (verl.nodes)" if nodes else ""
    raise RankError(
        f"the Ray cluster has no place for {count} trainers{together}, each with "
        f"{' and '.join(f'1 {kind}' for kind in place)}; free are {ray.available_resources()}. "
        "Add nodes, or ask for fewer trainers or runners"
    )


def said_of(error: Any) -> str:
    """Return what an error of Ray, or one that it brings from an actor, says in a line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if not isinstance(error, ray.exceptions.RayError):
        return f"{type(error).__name__}: {error}"
    said = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return said.partition(" Some common causes")[0]


def start_actors(count: int, setup: Sequence[SetupCall], *, gpu: bool) -> list[FollowerActor]:
    """Start so many followers.

    Raises:
        RankError: the cluster has no place for them, or this process is in none.
    """
    [group] = placed(count, {"CPU": 1, **({"GPU": 1} if gpu else {})})
    where = PlacementGroupSchedulingStrategy(group)
    kind = ray.remote(num_cpus=1, num_gpus=int(gpu), scheduling_strategy=where)(_Actor)
    search = [folder for folder in sys.path if folder]
    return [FollowerActor(kind.remote(search, setup), group) for _ in range(count)]


def own_node() -> str:
    return ray.get_runtime_context().get_node_id()


def own_address() -> str:
    """Return the address by which the other nodes reach this one."""
    return get_node_ip_address()
