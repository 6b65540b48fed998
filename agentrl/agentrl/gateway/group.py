"""The gateways of a run, and the vLLM servers that they sample from, as one.

Each gateway is a process with a sampler of its own: the embedded one, or one of the vLLM servers.
A runner asks one gateway only, so what a gateway remembers of an attempt is in one process. The
runners of a gateway that is not well claim no rollouts meanwhile; those of others do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.gateway.handle import GatewayHandle, Trouble
from agentrl.gateway.process import GatewayPlan
from agentrl.samplers.vllm.server import VllmServer
from agentrl_proxy.server.listening import bind


class Gateways:
    """The gateways of one run; their addresses are valid from the beginning.

    Args:
        plan: what all of them serve.
        count: of the gateways.
        logs: folder of their logs.
        port: of the first one; the others listen on the ports that follow. 0: any free ones.
        servers: the vLLM servers to start; empty: others run already, or none is asked.

    Raises:
        OSError: a port is taken.
    """

    def __init__(
        self, plan: GatewayPlan, count: int, logs: Path, host: str, port: int,
        servers: Sequence[VllmServer],
    ) -> None:  # fmt: skip
        self._servers = servers
        self._wanted: tuple[str, int, str] | None = None  # the version that is being published
        self._without: list[GatewayHandle] = []  # those that have not loaded it
        sources = [server.url for server in servers] or plan.sampler.vllm.url or [None]
        self._samplers = count if sources == [None] else len(sources)
        self._handles: list[GatewayHandle] = []
        for number in range(count):
            own = {"number": number, "gateways": count, "vllm_url": sources[number % len(sources)]}
            own |= {"vllm_wait": None} if servers else {}  # supervised: however long it takes
            log = logs / (f"gateway-{number}.log" if number else "gateway.log")
            listening = bind(host, port and port + number, operator_key=plan.operator_key)
            self._handles.append(GatewayHandle(plan.model_copy(update=own), log, listening))
        self.urls = [handle.url for handle in self._handles]
        self.urls_for_others = [handle.url_for_others for handle in self._handles]

    @property
    def restarts(self) -> list[int]:
        """How often each process was started again."""
        return [one.restarts for one in (*self._handles, *self._servers)]

    def start(self) -> None:
        """Start all processes, gateways as forks of this one where that is possible."""
        for handle in self._handles:
            handle.launch()
        for handle in self._handles:  # supervision starts a thread, after which no fork is safe
            handle.supervise()
        for server in self._servers:
            server.start()

    def wait_ready(self, on_wait: Callable[[str], object]) -> dict[str, Any]:
        """Wait until all are up, and return the health of the first that samples.

        One whose vLLM server did not come up in time takes it later, as long as another has one.

        Raises:
            RuntimeError: one cannot start, keeps dying or takes too long, quotes the end of its
                log; or no vLLM server came up.
        """
        for server in self._servers:
            server.wait(on_wait)
        healths = [handle.wait_ready(on_wait) for handle in self._handles]
        if not any(healths):
            raise RuntimeError(" ".join(dict.fromkeys(one.lacks_sampler for one in self._handles)))
        return next(filter(None, healths))

    def healths(self) -> list[dict[str, Any] | None]:
        """Return each one's answer of /healthz; None for one that is not up."""
        return [handle.health() for handle in self._handles]

    def sampler_healths(self) -> list[dict[str, Any] | None]:
        """Return the health of one gateway of each sampler."""
        return [handle.health() for handle in self._handles[: self._samplers]]

    def try_load_adapter(self, name: str, version: int, path: str) -> Trouble | None:
        """Have all gateways answer with an adapter version from now on.

        Returns None when they do, else why one does not. The next try asks only those that do not.
        ``deferred`` is true when all that have a sampler do; the others answer nothing until then.
        """
        if self._wanted != (name, version, path):
            self._wanted, self._without = (name, version, path), self._handles
        tried = [(one, one.try_load_adapter(name, version, path)) for one in self._without]
        self._without = [handle for handle, trouble in tried if trouble]
        troubles = [trouble for _, trouble in tried if trouble]
        if not troubles:
            self._wanted = None
            return None
        waits = all(trouble.deferred for trouble in troubles)
        done = waits and len(self._without) < len(self._handles)
        if done:
            self._wanted = None
        worst = min(troubles, key=lambda trouble: trouble.deferred)
        return worst._replace(deferred=done)

    def drop_prefixes(self) -> None:
        """Free memory of the samplers that no call needs until the next version; best effort."""
        for handle in self._handles:
            handle.drop_prefixes()

    def log_tail(self) -> str:
        """Return the end of the log of the one that died most often."""
        return max(self._handles, key=lambda handle: handle.deaths).log_tail()

    def let_end(self) -> None:
        """Do not start processes again when they end: the system may end all of ours at once."""
        for handle in self._handles:
            handle.let_end()

    def stop(self) -> None:
        """Stop all processes, gateways within their grace."""
        for one in (*self._servers, *self._handles):
            one.begin_stop()
        for one in (*self._handles, *self._servers):
            one.stop()
