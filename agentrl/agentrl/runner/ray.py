"""Runners on a Ray cluster: ``--runners ray:16``.

Ray (https://docs.ray.io) places and revives actors; each actor is one runner, asks for one CPU, and
starts the usual pool inside. Imported only when asked for: Ray is an optional dependency.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.runner.agent_process.environment import check_environment
from agentrl.runner.agent_spec import validate_agent
from agentrl.runner.protocol import RunnerConfig

logger = logging.getLogger("agentrl.runner")

_LOOK_S = 2.0  # between looks at the actors: each is a round trip per actor
_ANSWER_S = 5.0  # longest wait for an actor's answer
_PLACED_S = 30.0  # after which runners without a place are worth a warning
_REACH_S = 10.0
_START_TRIES = 3
_REPLACE_S = 10.0  # before an actor that is dead for good gets a successor


class _RayRunner:
    """The actor: a pool of one runner."""

    def __init__(self, config_json: str, search: list[str]) -> None:
        sys.path[:0] = [folder for folder in search if folder not in sys.path]
        path = [*search, os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        from agentrl.runner.pool_client import start_pool
        from agentrl.runner.ray import check_reach

        config = RunnerConfig.from_json(config_json)
        check_reach(config)
        self._pool = start_pool(config)

    def alive(self) -> bool:
        if not self._pool.alive():
            self._pool.restart()
        return True

    def log_tail(self, lines: int) -> str:
        return self._pool.log_tail(lines)

    def stop(self) -> None:
        self._pool.stop()


@dataclass(slots=True)
class _Place:
    """A runner's place, whichever actor has it.

    Attributes:
        answer: to whether the actor is alive; None: it died, and has no successor yet.
        heard: Ray has found a machine for it.
        died: it has not worked since its last death.
    """

    actor: Any
    answer: Any
    heard: bool = False
    died: bool = False
    replace_at: float = 0.0


class RayPool:
    """``config.runners`` actors, on the cluster of ``RAY_ADDRESS``, else on one started here.

    Args:
        gateway_host: the address that the gateway listens on; None: the command cannot change it.

    Raises:
        ValueError: Ray is not installed or does not start, or other nodes cannot reach the store or
            the gateway.
    """

    def __init__(self, config: RunnerConfig, gateway_host: str | None = None) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("runners: ray is not installed; pip install ray") from None
        check_environment()
        validate_agent(config.agent, other_python=True)
        self.restarts = 0
        self._ray: Any = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            _join_or_start(ray, config.runners)
        try:
            self._config = _within_reach(ray, config, gateway_host)
        except ValueError:
            if self._started_ray:
                ray.shutdown()
            raise
        self._start()

    def _start(self) -> None:
        self._places = [_Place(*self._new_actor()) for _ in range(self._config.runners)]
        self._some_alive = True
        self._next_look = 0.0
        self._warn_at = time.monotonic() + _PLACED_S
        self._reported: set[str] = set()

    def _new_actor(self) -> tuple[Any, Any]:
        """Return an actor, and its future answer."""
        search = [folder for folder in sys.path if folder]
        # Ray revives an actor that dies; what its runner had under way loses its lease.
        kind = self._ray.remote(max_restarts=-1, num_cpus=1)(_RayRunner)
        actor = kind.remote(replace(self._config, runners=1).to_json(), search)
        return actor, actor.alive.remote()

    def alive(self) -> bool:
        """Tell whether some runner works, or still waits for Ray to place it."""
        now = time.monotonic()
        if now < self._next_look:
            return self._some_alive
        self._next_look = now + _LOOK_S
        asked = [place.answer for place in self._places if place.answer is not None]
        answered = set(self._ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else ())
        works = False
        waiting: list[_Place] = []
        for place in self._places:
            if place.answer in answered:
                works |= self._hear(place, now)
            elif place.answer is None and now > place.replace_at:
                place.actor, place.answer = self._new_actor()
            elif place.answer is not None and not place.died:
                waiting.append(place)
        unplaced = sum(not place.heard for place in waiting)
        if unplaced and now > self._warn_at:
            self._warn_at = float("inf")
            cpus = self._ray.cluster_resources().get("CPU", 0)
            logger.warning(
                "%d of %d runners wait for a place: the Ray cluster has %g CPUs, and a runner "
                "asks for one", unplaced, len(self._places), cpus,
            )  # fmt: skip
        self._some_alive = works or bool(waiting)
        return self._some_alive

    def _hear(self, place: _Place, now: float) -> bool:
        """Take the actor's answer and ask again; return whether the runner works."""
        try:
            self._ray.get(place.answer)
        except self._ray.exceptions.RayError as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[-1]
            if why not in self._reported:  # once, not every two seconds
                self._reported.add(why)
                logger.warning("a runner on Ray: %s", why)
            if isinstance(error, self._ray.exceptions.ActorDiedError):
                place.died = True
                place.answer, place.replace_at = None, now + _REPLACE_S
            else:  # Ray is reviving it
                place.answer = place.actor.alive.remote()
            return False
        place.heard, place.died = True, False
        place.answer = place.actor.alive.remote()
        return True

    def restart(self) -> None:
        self.restarts += 1
        self._kill()
        self._start()

    def begin_stop(self) -> None:
        for place in self._places:
            place.actor.stop.remote()

    def stop(self) -> None:
        self._answers("stop")
        self._kill()
        if self._started_ray:
            self._ray.shutdown()

    def log_tail(self, lines: int = 20) -> str:
        with contextlib.suppress(self._ray.exceptions.RayError):
            return "\n".join(self._ray.get(self._answers("log_tail", lines)))
        return ""

    def _answers(self, method: str, *args: object) -> list[Any]:
        """Call a method of every actor; return the answers that come in time."""
        asked = [getattr(place.actor, method).remote(*args) for place in self._places]
        return self._ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)[0]

    def _kill(self) -> None:
        for place in self._places:
            self._ray.kill(place.actor)


def _join_or_start(ray: Any, runners: int) -> None:
    """Join the running cluster, else start one with a place for every runner.

    Ray's raylet gives its own helper process 15 seconds to import what it needs, and aborts if a
    busy machine takes longer (ray-project/ray#65983), so a start is tried several times.
    """
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        ray.init(address="auto", **settings)
        return
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ValueError(
                f"runners: no Ray cluster answers at RAY_ADDRESS {address}: {error} Start it, or "
                "unset RAY_ADDRESS to have one started here"
            ) from error
    cpus = max(runners, os.cpu_count() or 1)
    for left in reversed(range(_START_TRIES)):
        try:
            ray.init(address="local", include_dashboard=False, num_cpus=cpus, **settings)
            return
        except Exception as error:  # Ray raises nothing narrower
            ray.shutdown()
            if not left:
                raise ValueError(
                    f"runners: Ray did not start in {_START_TRIES} tries: {error} A machine that "
                    "is too busy is a usual cause (docs/ray.md); Ray's own logs are in "
                    "/tmp/ray/session_latest/logs. A cluster that `ray start --head` has started "
                    "is joined"
                ) from error


def _within_reach(ray: Any, config: RunnerConfig, gateway_host: str | None) -> RunnerConfig:
    """Return the configuration as every node of the cluster can use it.

    Raises:
        ValueError: there are other nodes, and they cannot reach the store or the gateway.
    """
    count = sum(node["Alive"] for node in ray.nodes())
    if count == 1:
        return config
    if gateway_host is None:
        raise ValueError(
            f"runners: the Ray cluster has {count} nodes, and only `agentrl train` can put its "
            "store and gateway within their reach; leave out --runners ray"
        )
    if config.store.startswith("sqlite"):
        raise ValueError(
            f"store: the Ray cluster has {count} nodes, which cannot share an SQLite file; give a "
            "PostgreSQL URL with --store"
        )
    if _is_loopback(gateway_host):
        raise ValueError(
            f"gateway_host: {gateway_host} is out of reach of the Ray cluster's other nodes (it "
            f"has {count}); set --gateway-host 0.0.0.0, or this machine's address in their network"
        )
    parts = urlsplit(config.gateway)
    if not _is_loopback(parts.hostname or ""):
        return config
    # It listens everywhere; other nodes need this machine's address.
    address = ray.util.get_node_ip_address()
    host = f"[{address}]" if ":" in address else address
    return replace(config, gateway=parts._replace(netloc=f"{host}:{parts.port}").geturl())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(config: RunnerConfig) -> None:
    """Refuse a node, which may have joined late, that cannot reach the gateway or the store.

    Raises:
        RuntimeError: names what cannot be reached from this machine.
    """
    parts, here = urlsplit(config.gateway), socket.gethostname()
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), _REACH_S).close()
    except OSError as error:
        raise RuntimeError(
            f"gateway_host: {here} cannot reach {config.gateway} ({error}); see --gateway-host"
        ) from error
    file = config.store.partition("sqlite:///")[2]
    if file and not Path(file).exists():
        raise RuntimeError(f"store: {here} has no {file}; other machines need a PostgreSQL store")
