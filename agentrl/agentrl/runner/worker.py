"""A runner worker: claim a rollout, run it in a fresh process, say how it ended, again.

Knows the store's queue, the gateway's health and the clock. Single-threaded, because it forks.
Its pool speaks to it through a socket: a byte means "retire after this attempt" (a newer pool has
more modules warm), its end means "stop now".
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from agentrl.runner.attempt import Job
from agentrl.runner.config import RunnerConfig
from agentrl.runner.environment import storage_folder
from agentrl.runner.health_checks import GatewayProbe, QueueWatch
from agentrl.runner.process import AttemptProcess
from agentrl.runner.subreaper import adopt, kill_children
from agentrl_tracer.schemas import AttemptState, Call, CallState, Claim
from agentrl_tracer.store import Store

logger = logging.getLogger("agentrl.runner")

KILL_GRACE_S = 2.0  # between SIGTERM and SIGKILL
TICK_S = 0.25  # how late a stop or a death without a closed pipe may be noticed
_HEALTH_AGE_S = 1.0
STOPPED = "its runner was stopped"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, before infrastructure is considered."""

    state: AttemptState
    error: str | None
    incomplete: bool = False


class Worker:
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
        self._known_modules = frozenset(sys.modules)
        self._next_expiry = 0.0
        self._kept: AttemptProcess | None = None

    def run(self) -> None:
        """Works until it is told to retire or to stop."""
        self.handle_signals()
        while not (self._stopping or self._retiring):
            claim = self._claim() if self._queue.due() else None
            if claim is None:
                self._listen([], QueueWatch.TICK_S)
            else:
                self._queue.found()
                self._tell({"claimed": claim.rollout_id})
                modules = self._execute(claim)
                self._tell({"ended": claim.rollout_id, "modules": modules})
                self._listen([], 0.0)
        if self._kept is not None:
            self._kept.kill()

    def handle_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def control_fd(self) -> int:
        """Of the socket to the pool, which attempts must not keep open."""
        return self._control.fileno()

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True  # seen within a tick; raising here could tear a transaction

    def _claim(self) -> Claim | None:
        if self.gateway.boot_id(_HEALTH_AGE_S) is None:
            return None
        now = time.monotonic()
        if now >= self._next_expiry:
            self._next_expiry = now + self.config.lease_s / 2
            self._try(self.store.expire_leases)
        return self._try(
            lambda: self.store.claim(self.name, self.config.lease_s, self.config.run_id)
        )

    def _execute(self, claim: Claim) -> list[str]:
        """Runs one attempt; returns the modules that it found missing here."""
        boot_id = self.gateway.boot_id(_HEALTH_AGE_S)
        log = Path(self.config.logs) / f"{claim.rollout_id}-{claim.attempt_number}.log"
        modules: list[str] = []
        try:
            process = self._process_for(Job(claim, str(log)))
        except OSError as error:  # out of processes or descriptors
            ending = Ending(AttemptState.INFRASTRUCTURE, f"could not fork: {error}")
        else:
            try:
                ending = self._attend(process, claim)
            finally:
                if process.reusable:
                    self._kept = process
                else:
                    process.kill()
            if process.report is not None:
                modules = process.report.third_party_modules
        kill_children(keep=() if self._kept is None else (self._kept.pid,))
        self.clear_storage(claim)
        if ending is None:
            logger.info("attempt %s lost its lease or was cancelled", claim.attempt_id)
        else:
            if ending.error is not None:
                ending = self._blame(ending, claim, boot_id)
            self._end(claim, ending, keep_log(log))
        return modules

    @staticmethod
    def clear_storage(claim: Claim) -> None:
        storage = storage_folder(claim.attempt_id)
        if storage.exists():
            shutil.rmtree(storage, ignore_errors=True)

    def _end(self, claim: Claim, ending: Ending, log: str | None) -> None:
        deadline = time.monotonic() + self.config.lease_s
        while time.monotonic() < deadline:  # after that the lease is lost and it runs again anyway
            try:
                self.store.end_attempt(claim.attempt_id, ending.state, error=ending.error, log=log)
                return
            except (SQLAlchemyError, OSError) as error:
                logger.warning("ending attempt %s: %s", claim.attempt_id, error)
                time.sleep(TICK_S)

    def _process_for(self, job: Job) -> AttemptProcess:
        """The process kept from the attempt before, if there is one, else a fresh one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            try:
                kept.run_next(job)
            except OSError:
                kept.kill()
            else:
                return kept
        return AttemptProcess(self.config, job, self._known_modules, [self._control.fileno()])

    def _attend(self, process: AttemptProcess, claim: Claim) -> Ending | None:
        """Waits for the attempt's end, keeping its lease; None: it is no longer ours."""
        lease_s = self.config.lease_s
        start = beaten = time.monotonic()
        deadline, kill_at = start + self.config.timeout_s, float("inf")
        cause: Ending | None = None
        while not process.poll():
            now = time.monotonic()
            if now >= kill_at:
                process.signal(signal.SIGKILL)
            elif cause is None and (now >= deadline or self._stopping):
                timeout = f"timeout: it was still running after {self.config.timeout_s:g} s"
                cause = (
                    Ending(AttemptState.INFRASTRUCTURE, STOPPED)
                    if self._stopping
                    else Ending(AttemptState.TIMEOUT, timeout)
                )
                kill_at = now + KILL_GRACE_S
                process.signal(signal.SIGTERM)
            if now - beaten >= lease_s / 3:
                alive = self._try(lambda: self.store.heartbeat(claim.attempt_id, lease_s))
                if alive is False or (alive is None and now - beaten > lease_s):
                    return None
                beaten = now if alive else beaten
            soon = min(deadline, kill_at, beaten + lease_s / 3) - time.monotonic()
            self._listen([process.report_fd], min(max(soon, 0.001), TICK_S))
        return cause or _ending(process)

    def _blame(self, ending: Ending, claim: Claim, boot_id: str | None) -> Ending:
        """Makes an ending INFRASTRUCTURE where the gateway, not the agent, is the cause."""
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
            calls = self._try(lambda: self.store.calls(attempt_ids=[claim.attempt_id])) or []
            failed = [c for c in calls if c.state == CallState.ERROR and not _agents_fault(c)]
            if failed:
                reason = f"the model failed call {failed[-1].id} ({failed[-1].error})"
        if reason is None:
            return ending
        return Ending(AttemptState.INFRASTRUCTURE, f"{reason}; the agent: {ending.error}")

    def _listen(self, fds: list[int], timeout_s: float) -> None:
        """Sleeps until one of ``fds`` is readable, the pool says something, or time is up."""
        watched = fds if self._stopping else [*fds, self._control.fileno()]
        readable, _, _ = select.select(watched, [], [], timeout_s)
        if self._control.fileno() in readable:
            with contextlib.suppress(ConnectionError):
                if self._control.recv(64):
                    self._retiring = True
                    return
            self._stopping = True

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # a dying pool: ``_listen`` notices
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _try(self, action: Callable[[], T]) -> T | None:
        """A store that is briefly away (locked, restarting) costs patience, not the worker."""
        try:
            return action()
        except (SQLAlchemyError, OSError) as error:
            logger.warning("the store failed: %s", error)
            return None


def _agents_fault(call: Call) -> bool:
    """Whether another model's provider refused the request itself: asking again changes nothing."""
    status = call.params.get("provider_status", 0)
    return 400 <= status < 500 and status not in (408, 429)


def _ending(process: AttemptProcess) -> Ending:
    report, status = process.report, process.status
    if report is None:
        if status is not None and status < 0:
            return Ending(AttemptState.ERROR, f"killed by signal {-status}")
        return Ending(AttemptState.ERROR, f"the agent's process exited with code {status}")
    if report.ok and not report.incomplete:
        return Ending(AttemptState.SUCCEEDED, None)
    error = report.error or "its spans or rewards did not reach the gateway"
    state = AttemptState.INFRASTRUCTURE if report.ok else AttemptState.ERROR
    return Ending(state, error, report.incomplete)


def keep_log(log: Path) -> str | None:
    """The path of a log with something in it; an empty one is removed."""
    try:
        if log.stat().st_size:
            return str(log)
        log.unlink()
    except OSError:
        return None
    return None


def run_worker(config: RunnerConfig, index: int, control: socket.socket) -> NoReturn:
    """The whole life of a just forked worker process."""
    code = 1
    try:
        gc.freeze()
        adopt()
        # A store of its own, opened after the fork. Attempts inherit its connection in turn, but
        # never use it, and end without closing it.
        kind = Worker
        if config.concurrency > 1:
            from agentrl.runner.concurrent_worker import SharedWorker

            kind = SharedWorker
        kind(config, Store(config.store), index, control).run()
        code = 0
    except BaseException:
        logger.exception("runner %d failed", index)
    finally:
        os._exit(code)
