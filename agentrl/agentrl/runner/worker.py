"""A runner worker: claim rollouts, run each attempt in an agent process, record how it ended.

An agent process runs one attempt at a time (by default a fresh process for each), or with
``concurrency`` several attempts of an async agent. Each attempt has its own claim, lease, deadline
and log.

Single-threaded, because workers fork. The pool tells its worker through a socket to retire after
this attempt (a newer pool has more modules preloaded), or to stop, as the socket's end does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn, ParamSpec, TypeVar

from agentrl.runner import agent_folders
from agentrl.runner.agent_process.attempts import redirect_output, run_attempts
from agentrl.runner.agent_process.confinement import become_user
from agentrl.runner.agent_process.environment import shared_owner, storage_folder
from agentrl.runner.agent_process.external_python import become
from agentrl.runner.attempt_log import AttemptLog, open_log
from agentrl.runner.probes import GatewayProbe, QueueWatch
from agentrl.runner.processes import ForkedChild, adopt_orphans, kill_children
from agentrl.runner.protocol import GRACE_S, AttemptEnding, RunnerConfig, send
from agentrl.runner.store_process import StoreClient
from agentrl_tracer.schemas import AttemptState, CallState, Claim

logger = logging.getLogger("agentrl.runner")

_TICK_S = 0.25  # longest sleep: how late a stop, or a death without a closed pipe, may be noticed
_FLOODED_S = 0.02  # longest sleep while an agent prints more than its log may hold
_HEALTH_AGE_S = 1.0
_FORK_AGAIN_S = 5.0
_DIED = "its process died"  # how the error begins of an attempt that may have caused it, or not
_MOST_DEATHS = 3  # of one rollout; the last one, alone in its process, is the agent's failure

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _RunningAttempt:
    claim: Claim
    boot_id: str  # the gateway's, when the attempt began
    deadline: float  # when it is asked to end, or, once it was asked, killed
    log: AttemptLog
    alone: bool  # to run without others: its process died too often
    begun: bool = False
    cause: AttemptEnding | None = None  # why it was asked to end


class Worker:
    """Runs ``config.concurrency`` attempts at a time; to retire, it finishes what it has."""

    def __init__(
        self, config: RunnerConfig, store: StoreClient, index: int, control: socket.socket
    ) -> None:
        self._config = config
        self._store = store
        self._name = f"{config.pool}-{socket.gethostname()}-{os.getpid()}-{index}"
        self._gateway = GatewayProbe(config.gateway)
        self._queue = QueueWatch(config.store)
        self._control = control
        self._known_modules = len(sys.modules)
        self._running: dict[str, _RunningAttempt] = {}
        self._process: ForkedChild | None = None
        self._attempts_left = 0  # that the process may still run
        self._storages: list[str] = []  # owners of what frameworks store in the process
        self._busy_with = ""  # the attempt that a shared process last named as running
        self._shared_log: AttemptLog | None = None  # what is written below Python, by any attempt
        self._flooded = False
        self._stopping = False
        self._retiring = False
        self._next_heartbeat = 0.0
        self._start_after = 0.0  # the next attempt

    def run(self) -> None:
        """Work until told to retire or to stop."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while self._running or not (self._stopping or self._retiring):
            self._start_attempts()
            self._listen()
            self._take_reports()
            self._check_deadlines()
            self._trim_logs()
            self._keep_leases()
        self._end_process()

    def _on_sigterm(self, *_: object) -> None:
        self._stopping = True  # seen within a tick; raising here could tear a transaction

    def _start_attempts(self) -> None:
        config, lease_s = self._config, self._config.lease_s
        while len(self._running) < config.concurrency and not (self._stopping or self._retiring):
            if time.monotonic() < self._start_after:
                break
            if any(running.alone for running in self._running.values()):
                break
            # Cheap checks first: may the queue hold a rollout, and is the gateway well?
            if not self._queue.due() or (boot_id := self._gateway.boot_id(_HEALTH_AGE_S)) is None:
                break
            claim = self._try_store(self._store.claim, self._name, lease_s, config.run_id)
            if claim is None:
                break
            self._queue.found()
            place = claim.rollout_id, claim.attempt_number
            self._tell_pool({"claimed": claim.attempt_id, "of": place})
            log = AttemptLog(config.log_of(*place), config.log_bytes)
            often = config.concurrency > 1 and claim.attempt_number >= _MOST_DEATHS
            alone = often and self._deaths(claim.rollout_id) >= _MOST_DEATHS - 1
            running = _RunningAttempt(claim, boot_id, float("inf"), log, alone)
            self._running[claim.attempt_id] = running
            if not alone:
                self._begin(running)
        if len(self._running) == 1:
            [running] = self._running.values()
            if not running.begun:  # the others have ended
                self._end_process()
                self._begin(running)

    def _begin(self, running: _RunningAttempt) -> None:
        self._storages.append(running.claim.attempt_id)
        running.begun, running.deadline = True, time.monotonic() + self._config.timeout_s
        try:
            if self._process is None:
                self._process = self._fork()
            # Opened here: the agent may neither see nor reach the folder.
            log = open_log(running.log.path, self._config.user)
            try:
                self._process.send(asdict(running.claim), log)
            finally:
                os.close(log)
        except OSError as error:  # out of processes or descriptors
            self._start_after = time.monotonic() + _FORK_AGAIN_S
            ending = AttemptEnding(AttemptState.INFRASTRUCTURE, f"could not start: {error}")
            self._finish(running, ending)

    def _fork(self) -> ForkedChild:
        """Fork a process, in a group of its own, that runs the attempts whose claims it is sent."""
        config, known_modules = self._config, self._known_modules
        if length := self._gateway.context_length:
            os.environ["AGENTRL_CONTEXT_LENGTH"] = str(length)

        def run(theirs: socket.socket) -> NoReturn:
            if config.concurrency > 1:
                redirect_output(open_log(config.shared_log(os.getpid()), config.user))
            if config.user is not None:
                become_user(config.user)
            if config.python is not None:
                become(config, theirs.detach())
            run_attempts(config, theirs.detach(), known_modules)

        process = ForkedChild(run, [self._control, self._store.connection])
        self._attempts_left, self._busy_with = config.rollouts_per_process, ""
        if config.concurrency > 1:
            self._shared_log = AttemptLog(config.shared_log(process.pid), config.log_bytes)
        self._storages.append(shared_owner(config, process.pid))
        if config.python is not None:
            process.send(asdict(config))
        return process

    def _listen(self) -> None:
        """Sleep until the agent or the pool says something, or something else is due."""
        full = len(self._running) == self._config.concurrency
        tick_s = _TICK_S if full or self._stopping else self._queue.tick_s()
        tick_s = _FLOODED_S if self._flooded else tick_s
        soon = min((one.deadline for one in self._running.values()), default=float("inf"))
        timeout_s = min(tick_s, max(soon - time.monotonic(), 0.001))
        watched = [] if self._process is None else [self._process.socket]
        if not self._stopping:
            watched.append(self._control)
        readable, _, _ = select.select(watched, [], [], timeout_s)
        if self._control in readable:
            said = b""
            with contextlib.suppress(ConnectionError):
                said = self._control.recv(1024)
            self._retiring |= b"retire" in said
            self._stopping |= not said or b"stop" in said

    def _take_reports(self) -> None:
        process = self._process
        if process is None:
            return
        for report in process.messages():
            if "running" in report:
                self._busy_with = report["running"]
            elif running := self._running.get(report.pop("attempt")):
                report["state"] = AttemptState(report["state"])
                self._finish(running, running.cause or AttemptEnding(**report))
        if not process.alive and self._process is process:
            self._process_died()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            if self._stopping:
                self._cancel(running, AttemptState.INFRASTRUCTURE, "its runner was stopped")
            elif now >= running.deadline:
                timeout = f"it was still running after {self._config.timeout_s:g} s"
                self._cancel(running, AttemptState.TIMEOUT, timeout)
        overdue = [one for one in self._running.values() if one.cause and now >= one.deadline]
        if overdue:
            # An attempt that blocks the event loop keeps others from ending, too.
            culprit = self._running.get(self._busy_with, overdue[0])
            blocked = "it blocked the process that it shared"
            culprit.cause = culprit.cause or AttemptEnding(AttemptState.TIMEOUT, blocked)
            self._process_died(culprit)

    def _trim_logs(self) -> None:
        logs = [running.log for running in self._running.values()]
        if self._shared_log is not None:
            logs.append(self._shared_log)
        self._flooded = sum(log.trim() for log in logs) > 0  # not any(): each one is trimmed

    def _keep_leases(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + self._config.lease_s / 3
        self._try_store(self._store.expire_leases)
        for running in list(self._running.values()):
            attempt_id = running.claim.attempt_id
            beat = self._try_store(self._store.heartbeat, attempt_id, self._config.lease_s)
            if beat is False:
                # The gateway refuses what the attempt does until it ends.
                logger.info("attempt %s lost its lease or was canceled", attempt_id)
                self._cancel(running, AttemptState.CANCELLED, "its lease was lost")

    def _cancel(self, running: _RunningAttempt, state: AttemptState, error: str) -> None:
        """Ask an attempt to end, once; soon it is killed."""
        if not running.begun:
            self._finish(running, AttemptEnding(state, error))
            return
        if running.cause is not None or self._process is None:
            return
        running.cause = AttemptEnding(state, error)
        # The pool does not wait for long either when it stops its workers.
        grace_s = GRACE_S if self._stopping else self._config.grace_s
        running.deadline = time.monotonic() + grace_s
        if self._config.concurrency == 1:
            self._process.signal(signal.SIGTERM)
        else:
            with contextlib.suppress(OSError):  # dead: noticed at the next look
                self._process.send({"cancel": running.claim.attempt_id})

    def _process_died(self, culprit: _RunningAttempt | None = None) -> None:
        """End the process and its attempts: ``culprit``, if one made it be killed, and the rest."""
        said = _how_it_ended(self._end_process())
        begun = [running for running in self._running.values() if running.begun]
        for running in begun:
            if len(begun) == 1 or running is culprit:
                error = f"the agent's process {said}"
                ending = running.cause or AttemptEnding(AttemptState.ERROR, error)
            else:
                blocked = "another rollout blocked the process that they shared"
                error = blocked if culprit else f"{_DIED}: it {said}, and other rollouts shared it"
                ending = AttemptEnding(AttemptState.INFRASTRUCTURE, error)
            self._finish(running, ending)

    def end_orphans(self, orphans: Mapping[str, tuple[str, int]], code: int) -> None:
        """End the attempts of this worker's predecessor, which has died; see ``run_worker``."""
        for attempt_id, (rollout_id, number) in orphans.items():
            # A signal may have come from the agent; an exit code is a fault of the worker's own.
            said = f"its runner, which {_how_it_ended(code)}"
            error = f"{_DIED} with {said}" if code < 0 else f"it ended with {said}"
            blamed = code < 0 and len(orphans) == 1 and self._deaths(rollout_id) >= _MOST_DEATHS - 1
            state = AttemptState.ERROR if blamed else AttemptState.INFRASTRUCTURE
            log = AttemptLog(self._config.log_of(rollout_id, number), self._config.log_bytes)
            self._try_store(
                self._store.end_attempt, attempt_id, state, error=error, log=log.close()
            )

    def _deaths(self, rollout_id: str) -> int:
        """Count the attempts of a rollout that ended with their process or worker."""
        attempts = self._try_store(self._store.attempts, [rollout_id]) or []
        return sum((attempt.error or "").startswith(_DIED) for attempt in attempts)

    def _end_process(self) -> int:
        """End the process, if there is one, and return its exit code."""
        process, self._process = self._process, None
        code = process.kill() if process else 0
        kill_children()
        if self._shared_log is not None:
            self._shared_log.close()
            self._shared_log = None
        for owner in self._storages:
            agent_folders.remove(storage_folder(owner))
        self._storages.clear()
        return code

    def _finish(self, running: _RunningAttempt, ending: AttemptEnding) -> None:
        """Leave nothing of an attempt running, and write its end into the store."""
        claim = running.claim
        if self._process is not None and self._config.concurrency == 1:
            self._attempts_left -= 1
            if self._attempts_left and ending.error is None:
                kill_children(keep=[self._process.pid])
            else:  # everything was flushed before the report: SIGKILL loses nothing
                self._end_process()
        del self._running[claim.attempt_id]
        log_path = running.log.close()
        state, error = ending.state, ending.error
        if error is not None and (reason := self._fault_of_gateway(running, state)):
            state, error = AttemptState.INFRASTRUCTURE, f"{reason}; the agent: {error}"
        deadline = time.monotonic() + self._config.lease_s
        while time.monotonic() < deadline:  # then the lease is lost, and the rollout runs again
            try:
                self._store.end_attempt(claim.attempt_id, state, error=error, log=log_path)
                break
            except ConnectionError:  # of the store's process, which ends with the trainer
                break
            except OSError as failure:
                logger.warning("ending attempt %s: %s", claim.attempt_id, failure)
                time.sleep(_TICK_S)
        self._tell_pool({"ended": claim.attempt_id, "modules": ending.modules})

    def _fault_of_gateway(self, running: _RunningAttempt, state: AttemptState) -> str | None:
        """Return how the gateway, not the agent, made an attempt fail; None: it did not."""
        if state is AttemptState.INFRASTRUCTURE:
            return None  # it says more already
        boot_id = self._gateway.boot_id()
        if boot_id is None:
            return "the gateway does not answer"
        if boot_id != running.boot_id:
            return "the gateway was restarted meanwhile"
        if state is AttemptState.ERROR:
            ids = [running.claim.attempt_id]
            for call in reversed(self._try_store(self._store.calls, ids) or []):
                status = call.params.get("error_status", 0)
                # The agent's fault: the sampler, or another model's provider, refused the request.
                refused = 400 <= status < 500 and status not in (408, 429)
                if call.state == CallState.ERROR and not refused:
                    return f"the model failed call {call.id} ({call.error})"
        return None

    def _tell_pool(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # a dying pool: ``_listen`` notices
            send(self._control.fileno(), message)

    def _try_store(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return None while the store is away (locked, restarting)."""
        try:
            return action(*args, **kwargs)
        except OSError as error:
            logger.warning("the store failed: %s", error)
            return None


def _how_it_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def run_worker(
    config: RunnerConfig,
    index: int,
    orphans: Mapping[str, tuple[str, int]],
    code: int,
    store: socket.socket,
    control: socket.socket,
) -> NoReturn:
    """Run a just forked worker process to its end.

    Args:
        orphans: by attempt, the rollouts and the attempts' numbers of the worker that died in this
            one's place.
        code: how that worker ended.
        store: to the process that holds the store.
    """
    failed = 1
    try:
        gc.freeze()
        adopt_orphans()
        worker = Worker(config, StoreClient(store), index, control)
        worker.end_orphans(orphans, code)
        worker.run()
        failed = 0
    except BaseException:
        logger.exception("runner %d failed", index)
    finally:
        os._exit(failed)
