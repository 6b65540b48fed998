"""The base of runner workers: claim rollouts, end attempts, listen to the pool.

Single-threaded, because workers fork. The pool speaks to its worker through a socket: a byte means
"retire after this attempt" (a newer pool has more modules preloaded), its end means "stop now".
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from agentrl.runner.agent_process.environment import storage_folder
from agentrl.runner.health_checks import GatewayProbe, QueueWatch
from agentrl.runner.protocol import AttemptEnding, AttemptJob, RunnerConfig
from agentrl_tracer.schemas import AttemptState, Call, CallState, Claim
from agentrl_tracer.store import Store

logger = logging.getLogger("agentrl.runner")

KILL_GRACE_S = 2.0  # between SIGTERM and SIGKILL
TICK_S = 0.25  # longest sleep: how late a stop, or a death without a closed pipe, may be noticed
_HEALTH_AGE_S = 1.0

T = TypeVar("T")


class Worker:
    """A worker process; subclasses implement ``run``."""

    def __init__(
        self, config: RunnerConfig, store: Store, index: int, control: socket.socket
    ) -> None:
        self.config = config
        self.store = store
        self.name = f"{socket.gethostname()}-{os.getpid()}-{index}"
        self.gateway = GatewayProbe(config.gateway)
        self._queue = QueueWatch(store.url)
        self._control = control
        self._stopping = False
        self._retiring = False
        self._next_expiry = 0.0

    def run(self) -> None:
        """Work until told to retire or to stop."""
        raise NotImplementedError

    def handle_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True  # seen within a tick; raising here could tear a transaction

    # ---- rollouts

    def claim(self) -> Claim | None:
        """Claim a rollout, if the queue may hold one and the gateway is healthy."""
        if not self._queue.due() or self.boot_id() is None:
            return None
        now = time.monotonic()
        if now >= self._next_expiry:
            self._next_expiry = now + self.config.lease_s / 2
            self.try_store(self.store.expire_leases)
        claim = self.try_store(
            lambda: self.store.claim(self.name, self.config.lease_s, self.config.run_id)
        )
        if claim is not None:
            self._queue.found()
            self.tell_pool({"claimed": claim.rollout_id})
        return claim

    def job(self, claim: Claim) -> AttemptJob:
        log = Path(self.config.logs) / f"{claim.rollout_id}-{claim.attempt_number}.log"
        return AttemptJob(claim, str(log))

    def boot_id(self) -> str | None:
        """Return the gateway's boot id, at most a second old."""
        return self.gateway.boot_id(_HEALTH_AGE_S)

    def heartbeat(self, claim: Claim) -> bool | None:
        """Extend a lease. False: it is lost; None: the store did not answer."""
        return self.try_store(lambda: self.store.heartbeat(claim.attempt_id, self.config.lease_s))

    def interruption(self) -> AttemptEnding:
        """Return the ending of an attempt that is stopped now: by its runner, or by its timeout."""
        if self._stopping:
            return AttemptEnding(AttemptState.INFRASTRUCTURE, "its runner was stopped")
        timeout = f"timeout: it was still running after {self.config.timeout_s:g} s"
        return AttemptEnding(AttemptState.TIMEOUT, timeout)

    def end(self, job: AttemptJob, ending: AttemptEnding, boot_id: str | None) -> None:
        """Write an attempt's end into the store.

        Args:
            boot_id: the gateway's, when the attempt began.
        """
        claim, log = job.claim, _keep_log(Path(job.log))
        if ending.error is not None:
            ending = self._blame(ending, claim, boot_id)
        deadline = time.monotonic() + self.config.lease_s
        while time.monotonic() < deadline:  # then the lease is lost, and the rollout runs again
            try:
                self.store.end_attempt(claim.attempt_id, ending.state, error=ending.error, log=log)
                return
            except (SQLAlchemyError, OSError) as error:
                logger.warning("ending attempt %s: %s", claim.attempt_id, error)
                time.sleep(TICK_S)

    def _blame(self, ending: AttemptEnding, claim: Claim, boot_id: str | None) -> AttemptEnding:
        """Make an ending INFRASTRUCTURE where the gateway, not the agent, is the cause."""
        if ending.state is AttemptState.INFRASTRUCTURE:
            return ending
        reason = None
        now = self.gateway.boot_id()
        if now is None:
            reason = "the gateway does not answer"
        elif now != boot_id:
            reason = "the gateway was restarted meanwhile"
        elif ending.incomplete:
            reason = "spans or rewards did not reach the gateway"
        elif ending.state is AttemptState.ERROR:
            calls = self.try_store(lambda: self.store.calls(attempt_ids=[claim.attempt_id])) or []
            failed = [c for c in calls if c.state == CallState.ERROR and not _refused_request(c)]
            if failed:
                reason = f"the model failed call {failed[-1].id} ({failed[-1].error})"
        if reason is None:
            return ending
        return AttemptEnding(AttemptState.INFRASTRUCTURE, f"{reason}; the agent: {ending.error}")

    @staticmethod
    def clear_storage(claim: Claim) -> None:
        storage = storage_folder(claim.attempt_id)
        if storage.exists():
            shutil.rmtree(storage, ignore_errors=True)

    # ---- pool and store

    @property
    def control_fd(self) -> int:
        """Descriptor of the socket to the pool, which agent processes must close."""
        return self._control.fileno()

    def listen(self, fds: list[int], timeout_s: float) -> None:
        """Sleep until one of ``fds`` is readable, the pool says something, or time is up."""
        watched = fds if self._stopping else [*fds, self._control.fileno()]
        readable, _, _ = select.select(watched, [], [], timeout_s)
        if self._control.fileno() in readable:
            with contextlib.suppress(ConnectionError):
                if self._control.recv(64):
                    self._retiring = True
                    return
            self._stopping = True

    def tell_pool(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # a dying pool: ``listen`` notices
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def try_store(self, action: Callable[[], T]) -> T | None:
        """Return None while the store is away (locked, restarting)."""
        try:
            return action()
        except (SQLAlchemyError, OSError) as error:
            logger.warning("the store failed: %s", error)
            return None


def _refused_request(call: Call) -> bool:
    """Tell whether another model's provider refused the agent's request itself."""
    status = call.params.get("provider_status", 0)
    return 400 <= status < 500 and status not in (408, 429)


def _keep_log(log: Path) -> str | None:
    """Return the path of a log that is not empty; remove an empty one."""
    with contextlib.suppress(OSError):
        if log.stat().st_size:
            return str(log)
        log.unlink()
    return None
