"""What happens when vLLM dies.

Two processes notice. The one that started the server ends it as soon as its engine is gone
(``wait_for_engine_death``), and its supervisor starts a new server. The gateway's watch stops using
a server that does not answer, ends the requests in progress so that agents retry, and uses the
server again once it is back with every adapter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx

from agentrl.samplers.vllm.adapters import LoadedAdapter, VllmAdapters
from agentrl.samplers.vllm.api import VllmClient, VllmError, read_metrics
from agentrl_proxy.sampler import RefusedError

log = logging.getLogger("agentrl")

_POLL_S = 1.0
REQUEST_S = 10.0
"""Time limit of the watch's own requests."""
_FAILURES = 3
"""Failed health checks in a row after which a started server is ended."""


class VllmWatch(threading.Thread):
    """A thread that checks the server each second and recovers from its death.

    ``learn`` checks that a new server is fit, before it gets its adapters.
    """

    def __init__(
        self, client: VllmClient, adapters: VllmAdapters, learn: Callable[[], None]
    ) -> None:
        super().__init__(name="vllm-watch", daemon=True)
        self._client, self._adapters, self._learn = client, adapters, learn
        self.recoveries = 0
        self.metrics: dict[str, float] = {}
        """The server's counters, at most a second old."""
        self.stopping = threading.Event()

    def stop(self) -> None:
        self.stopping.set()
        if self.ident is not None:
            self.join(timeout=2.0)  # it may be waiting for a server that hangs

    def run(self) -> None:
        failures = 0
        while not self.stopping.wait(_POLL_S):
            try:
                self._check()
                failures = 0
            except httpx.TimeoutException:  # busy, which is tolerated for a minute
                if not self._client.trouble and not self._client.healthy:
                    self._lose("it has not answered for a minute")
            except httpx.TransportError:
                failures += 1  # the first may be a kept connection that timed out
                if failures >= 2:
                    self._lose("it does not answer")
            except (VllmError, RefusedError) as error:
                self._lose(str(error))
            except Exception as error:  # the watch must go on, to see the server come back
                log.debug("watching vLLM failed", exc_info=True)
                self._lose(f"{type(error).__name__}: {error}")

    def _check(self) -> None:
        self._get("/health")
        if self._client.trouble or self._missing():
            self._recover()
        if not self.stopping.is_set():
            self._client.mark_healthy()
            self.metrics = read_metrics(self._get("/metrics").text)

    def _recover(self) -> None:
        """Give a restarted server every adapter that the one before it had."""
        if not self._client.trouble:
            self._lose("it has lost its adapters")
        self._learn()
        loaded: dict[str, str] = {}  # adapters by the server's names for them
        while gone := self._missing():  # at first, and what was published meanwhile
            if any(load.lora in loaded for load in gone.values()):  # the next round tries again
                raise VllmError(
                    "it does not list what it loaded: several processes seem to answer at this "
                    "URL, each with adapters of its own; start vLLM with --api-server-count 1, and "
                    "one server per URL"
                )
            for name, load in gone.items():
                if self.stopping.is_set():
                    return
                loaded[self._adapters.restore(name, load)] = name
        self.recoveries += 1
        again = ", ".join(dict.fromkeys(loaded.values())) or "nothing"
        log.warning("vLLM is back; loaded again: %s", again)

    def _missing(self) -> dict[str, LoadedAdapter]:
        """Return the adapters that the server should have and does not list."""
        wanted = self._adapters.current  # before the listing: what is loaded after it is no loss
        listed = {model["id"] for model in self._get("/v1/models").json()["data"]}
        return {name: load for name, load in wanted.items() if load.lora not in listed}

    def _get(self, path: str) -> httpx.Response:
        answer = self._client.blocking.get(path, timeout=REQUEST_S)
        if answer.status_code != 200:
            raise VllmError(f"{path} answers {answer.status_code}")
        return answer

    def _lose(self, why: str) -> None:
        if why != self._client.trouble:
            log.warning("vLLM is out of use: %s", why)
        self._client.mark_lost(why)


def wait_for_engine_death(path: str, ended: Callable[[], bool]) -> bool:
    """Wait until a server that was healthy is not any more; False: it ended before that.

    When its engine dies, vLLM closes its socket but may wait forever for the requests in progress.
    """
    was_healthy, failures = False, 0
    server = VllmClient(f"unix:{path}", None).blocking
    while failures < _FAILURES:
        if ended():
            return False
        time.sleep(_POLL_S)
        try:
            healthy = server.get("/health", timeout=REQUEST_S).status_code == 200
        except httpx.TimeoutException:
            continue  # busy
        except httpx.TransportError:
            healthy = False
        was_healthy |= healthy
        failures = 0 if healthy or not was_healthy else failures + 1
    return True
