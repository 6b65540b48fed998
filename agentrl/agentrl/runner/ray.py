"""Runners on a Ray cluster: ``--runners ray:16``.

Ray (https://docs.ray.io) places and revives actors; each actor is one runner, asks for one CPU, and
starts the usual pool inside. Imported only when asked for: Ray is an optional dependency.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.ray_cluster import join_or_start
from agentrl.runner.agent_process.environment import check_environment
from agentrl.runner.agent_spec import validate_agent
from agentrl.runner.protocol import RunnerConfig
from agentrl_proxy.server.listening import http_url

logger = logging.getLogger("agentrl.runner")

_LOOK_S = 2.0  # between looks at the actors: each is a round trip per actor
_ANSWER_S = 5.0  # longest wait for an actor's answer
_REACH_S = 10.0
_LOOPBACK = ("127.", "localhost", "::1")
_REPLACE_S = 10.0  # before an actor that reaches no gateway or store gets a successor


class _RayRunner:
    """The actor: a pool of one runner."""

    def __init__(self, config_json: str, search: list[str]) -> None:
        sys.path[:0] = [folder for folder in search if folder not in sys.path]
        path = [*search, os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        from agentrl.runner.pool_client import start_pool
        from agentrl.runner.ray import check_reach

        config = RunnerConfig.from_json(config_json)
        try:
            check_reach(config)
        except RuntimeError:
            time.sleep(_REPLACE_S)  # its successor may be placed here, too
            raise
        self._pool = start_pool(config).supervise()

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        self._pool.stop()


class RayPool:
    """``config.runners`` actors, on the cluster of ``RAY_ADDRESS``, else on one started here.

    Args:
        gateway_host: the address that the gateway listens on; None: the command cannot change it.
        places: for all that asks for Ray; None: for the runners.

    Raises:
        ValueError: Ray is not installed or does not start, or other nodes cannot reach the store or
            the gateway.
    """

    def __init__(
        self, config: RunnerConfig, gateway_host: str | None = None, places: int | None = None
    ) -> None:
        check_environment()
        validate_agent(config.agent, other_python=True)
        self._started_ray = join_or_start("runners", places or config.runners)
        import ray  # pyright: ignore[reportMissingImports]

        self._ray: Any = ray
        self._config = _within_reach(ray, config, gateway_host)
        cpus = ray.cluster_resources().get("CPU", 0)
        if cpus < config.runners:
            logger.warning(
                "%d runners ask for a CPU each, and the Ray cluster has %g: the others wait for a "
                "place", config.runners, cpus,
            )  # fmt: skip
        self._actors = [self._new_actor(place) for place in range(config.runners)]
        self._deaths = [0] * config.runners  # of the actors of each place
        self._reported: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervise-ray", daemon=True)

    @property
    def restarts(self) -> int:
        """How often the actors of every place have died for good."""
        return min(self._deaths)

    def supervise(self) -> None:
        """Replace actors that die for good, and log why."""
        self._thread.start()

    def begin_stop(self) -> list[Any]:
        """Ask the runners to end, without waiting; return what their answers will be."""
        self._stopping.set()
        return [actor.stop.remote() for actor in self._actors]

    def stop(self) -> None:
        """Stop the runners, their agents, and Ray if it was started here."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        answers = self.begin_stop()
        self._ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_S)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()

    def log_tail(self, lines: int = 20) -> str:
        """Return why runners died. Their logs are on the nodes, in the run's folder of logs."""
        return "\n".join(self._reported[-lines:])

    def _new_actor(self, place: int) -> Any:
        search = [folder for folder in sys.path if folder]
        # Ray revives an actor whose process dies; what its runner had under way loses its lease.
        kind = self._ray.remote(max_restarts=-1, num_cpus=1)(_RayRunner)
        return kind.remote(replace(self._config.of_worker(place), runners=1).to_json(), search)

    def _watch(self) -> None:
        asked = {actor.alive.remote(): place for place, actor in enumerate(self._actors)}
        while not self._stopping.wait(_LOOK_S):
            answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
            for answer in answered:
                place = asked.pop(answer)
                try:
                    self._ray.get(answer)
                except self._ray.exceptions.RayError as error:
                    why = (str(error).strip() or type(error).__name__).splitlines()[-1]
                    if why not in self._reported:  # once, not every two seconds
                        self._reported.append(why)
                        logger.warning("a runner on Ray: %s", why)
                    if isinstance(error, self._ray.exceptions.ActorDiedError):
                        self._deaths[place] += 1
                        self._actors[place] = self._new_actor(place)
                asked[self._actors[place].alive.remote()] = place


def _within_reach(ray: Any, config: RunnerConfig, gateway_host: str | None) -> RunnerConfig:
    """Return the configuration as every node can use it; raise ValueError if it cannot be."""
    count = sum(node["Alive"] for node in ray.nodes())
    if gateway_host is None:
        if count == 1:
            return config
        raise ValueError(
            f"runners: the Ray cluster has {count} nodes, and only `agentrl train` can put its "
            "store and gateway within their reach; leave out --runners ray"
        )
    if count > 1 and config.store.startswith("sqlite"):
        raise ValueError(
            f"run.store: the Ray cluster has {count} nodes, which cannot share an SQLite file; "
            "give a PostgreSQL URL with --run.store"
        )
    if gateway_host.startswith(_LOOPBACK):
        if count == 1:
            return config
        raise ValueError(
            f"gateway.host: {gateway_host} is out of reach of the Ray cluster's other nodes (it "
            f"has {count}); set --gateway.host 0.0.0.0, or this machine's address in their network"
        )
    gateways = [urlsplit(url) for url in config.gateways]
    if not (gateways[0].hostname or "").startswith(_LOOPBACK):
        return config
    # They listen everywhere; other nodes, which may join later, need this machine's address.
    address = ray.util.get_node_ip_address()
    return replace(config, gateways=[http_url(address, one.port or 80) for one in gateways])


def check_reach(config: RunnerConfig) -> None:
    """Raise RuntimeError on a node, which may have joined late, without gateway or store."""
    parts, here = urlsplit(config.gateway), socket.gethostname()
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), _REACH_S).close()
    except OSError as error:
        raise RuntimeError(
            f"gateway.host: {here} cannot reach {config.gateway} ({error}); see --gateway.host"
        ) from error
    file = config.store.partition("sqlite:///")[2]
    if file and not Path(file).exists():
        raise RuntimeError(
            f"run.store: {here} has no {file}; other machines need a PostgreSQL store"
        )
