"""Runners on a Ray cluster: ``--runners ray:16``.

Ray (https://docs.ray.io) places and revives them; we only start our usual pool inside each of its
actors. An actor is one runner and asks for one CPU. Knows Ray's actors and ``PoolHandle``; imported
only when asked for, since Ray is no dependency of ours.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import replace
from typing import Any

from agentrl.runner.agent import validate_agent
from agentrl.runner.config import RunnerConfig, check_environment

_LOOK_S = 5.0  # longest wait for an actor's answer


class _RayRunner:
    """The actor: a pool of one runner, for as long as the actor lives."""

    def __init__(self, config_json: str, search: list[str]) -> None:
        sys.path[:0] = [folder for folder in search if folder not in sys.path]
        import os

        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [*search, os.environ.get("PYTHONPATH")])
        )
        from agentrl.runner.handle import start_pool

        self._pool = start_pool(RunnerConfig.from_json(config_json))

    def alive(self) -> bool:
        if not self._pool.alive():
            self._pool.restart()
        return True

    def log_tail(self, lines: int) -> str:
        return self._pool.log_tail(lines)

    def stop(self) -> None:
        self._pool.stop()


class RayPool:
    """``config.runners`` actors, on the cluster of ``RAY_ADDRESS``, else on one started here.

    Raises:
        ValueError: Ray is not installed, or the store or gateway is out of the other nodes' reach.
    """

    def __init__(self, config: RunnerConfig) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("runners: ray is not installed; pip install 'ray'") from None
        check_environment()
        validate_agent(config.agent, config.python_path, elsewhere=True)
        self.restarts = 0
        self._config = config
        self._ray: Any = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) > 1 and config.store.startswith("sqlite"):
            raise ValueError(
                f"store: the Ray cluster has {len(nodes)} nodes, which cannot share an SQLite "
                "file; give a PostgreSQL URL with --store (and --gateway-host 0.0.0.0)"
            )
        self._actors = self._start()

    def _start(self) -> list[Any]:
        search = [folder for folder in sys.path if folder]
        # Ray revives an actor that dies; what its runner had under way loses its lease.
        actor = self._ray.remote(max_restarts=-1, num_cpus=1)(_RayRunner)
        one = replace(self._config, runners=1).to_json()
        return [actor.remote(one, search) for _ in range(self._config.runners)]

    def alive(self) -> bool:
        """Whether some runner works; those that Ray has not placed yet need no look."""
        answers = [actor.alive.remote() for actor in self._actors]
        ready, waiting = self._ray.wait(answers, num_returns=len(answers), timeout=_LOOK_S)
        for answer in ready:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(answer)
                return True
        return bool(waiting)

    def restart(self) -> None:
        self.restarts += 1
        self._kill()
        self._actors = self._start()

    def begin_stop(self) -> None:
        for actor in self._actors:
            actor.stop.remote()

    def stop(self) -> None:
        self._ray.wait(
            [actor.stop.remote() for actor in self._actors],
            num_returns=len(self._actors),
            timeout=_LOOK_S,
        )
        self._kill()
        if self._started_ray:
            self._ray.shutdown()

    def log_tail(self, lines: int = 20) -> str:
        ready, _ = self._ray.wait(
            [actor.log_tail.remote(lines) for actor in self._actors],
            num_returns=len(self._actors),
            timeout=_LOOK_S,
        )
        with contextlib.suppress(self._ray.exceptions.RayError):
            return "\n".join(self._ray.get(ready))
        return ""

    def _kill(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
