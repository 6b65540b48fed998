"""What happens when vLLM dies.

Two processes notice. The one that started the server ends it as soon as its engine is gone
(``wait_for_engine_death``), and its supervisor starts a new server. The gateway's watch stops using
a server that does not answer, ends the requests under way so that agents retry, and uses the server
again once it is back with every adapter.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable

import httpx

from agentrl.samplers.vllm.adapters import LoadedAdapter, VllmAdapters
from agentrl.samplers.vllm.api import VllmError, read_metrics
from agentrl.samplers.vllm.client import VllmClient, silence
from agentrl_proxy.sampler import RefusedError

log = logging.getLogger("agentrl")

_POLL_S = 1.0
REQUEST_S = 10.0
"""Time limit of the watch's own requests."""
_FAILURES = 3
"""Failed health checks in a row after which a started server is ended."""
_LOST_ADAPTERS = "it has lost its adapters"
_NOT_LISTED = (
    "it does not list what it loaded: several processes seem to answer at this URL, each with "
    "adapters of its own; start vLLM with --api-server-count 1, and one server per URL"
)


class VllmWatch:
    """A thread that checks the server each second and recovers from its death.

    Args:
        learn: checks that a new server is fit, before it gets its adapters.
    """

    def __init__(
        self,
        client: VllmClient,
        adapters: VllmAdapters,
        learn: Callable[[httpx.Client], None],
    ) -> None:
        self._client = client
        self._adapters = adapters
        self._learn = learn
        self.recoveries = 0
        self.metrics: dict[str, float] = {}
        """The server's counters, at most a second old."""
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-watch", daemon=True)

    def start(self) -> None:
        self._client.mark_healthy()
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)  # it may be waiting for a server that hangs

    def _run(self) -> None:
        refused = 0
        with self._client.blocking() as server:
            while not self.stopping.wait(_POLL_S):
                try:
                    self._check(server)
                    refused = 0
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    refused += 1  # the first may be a kept connection that timed out
                    if refused >= 2:
                        self._lose("it does not answer")
                except httpx.TransportError:  # slow, which is tolerated for a minute
                    if not self._client.lost and not self._client.healthy:
                        self._lose(silence())
                except httpx.HTTPStatusError as error:
                    path, status = error.request.url.path, error.response.status_code
                    self._lose(f"{path} answers {status}")
                except (VllmError, RefusedError) as error:
                    self._lose(str(error))
                except Exception as error:  # the watch must go on, to see the server come back
                    log.debug("watching vLLM failed", exc_info=True)
                    self._lose(f"{type(error).__name__}: {error}")

    def _check(self, server: httpx.Client) -> None:
        server.get("/health", timeout=REQUEST_S).raise_for_status()
        gone = self._missing(server)
        if gone or self._client.lost:
            self._recover(server, gone)
        if not self.stopping.is_set():
            self._client.mark_healthy()
            self.metrics = read_metrics(server.get("/metrics", timeout=REQUEST_S).text)

    def _recover(self, server: httpx.Client, gone: dict[str, LoadedAdapter]) -> None:
        """Give a restarted server every adapter that the one before it had."""
        if gone and not self._client.lost:
            self._lose(_LOST_ADAPTERS)
        self._learn(server)
        for name, load in gone.items():
            if self.stopping.is_set():
                return
            self._adapters.restore(server, name, load)
        if self._missing(server):  # the next round tries again
            raise VllmError(_NOT_LISTED)
        self.recoveries += 1
        log.warning("vLLM is back; loaded again: %s", ", ".join(gone) or "nothing")

    def _missing(self, server: httpx.Client) -> dict[str, LoadedAdapter]:
        """Return the adapters that the server should have and does not list."""
        wanted = self._adapters.missing(set())
        models = server.get("/v1/models", timeout=REQUEST_S).raise_for_status().json()["data"]
        gone = self._adapters.missing({model["id"] for model in models})
        # A version that was replaced since the listing, or published after it, is not lost.
        return {name: load for name, load in gone.items() if wanted.get(name) is load}

    def _lose(self, why: str) -> None:
        if why != self._client.trouble:
            log.warning("vLLM is out of use: %s", why)
        self._client.mark_lost(why)


def wait_for_engine_death(path: str, ended: Callable[[], bool]) -> bool:
    """Wait until a server that was healthy is not any more; False: it ended before that.

    When its engine dies, vLLM closes its socket but may wait forever for the requests under way.
    """
    was_healthy, failures = False, 0
    while not ended():
        time.sleep(_POLL_S)
        try:
            healthy = _health(path) == 200
        except TimeoutError:
            continue  # busy
        except (OSError, http.client.HTTPException):
            healthy = False
        was_healthy |= healthy
        failures = 0 if healthy or not was_healthy else failures + 1
        if failures >= _FAILURES:
            return True
    return False


def _health(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(REQUEST_S)
        connected.connect(path)
        client = http.client.HTTPConnection("vllm")
        client.sock = connected
        client.request("GET", "/health", headers={"connection": "close"})
        return client.getresponse().status
