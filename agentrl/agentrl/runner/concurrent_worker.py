"""A worker whose agent process runs several attempts of an async agent at a time.

Each attempt has its own claim, lease, deadline and log. A task can be canceled alone. A process
that does not let itself be canceled is killed; its other attempts are infrastructure failures, and
run again.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from agentrl.runner.agent_process.concurrent import run_concurrent_attempts
from agentrl.runner.attempt_process import fork_agent_process
from agentrl.runner.base import KILL_GRACE_S, TICK_S, Worker
from agentrl.runner.health_checks import QueueWatch
from agentrl.runner.protocol import AttemptEnding, AttemptJob, AttemptReport, take_lines
from agentrl.runner.subreaper import kill_children
from agentrl_tracer.schemas import AttemptState, Claim

_LISTEN_S = 0.02


@dataclass(slots=True)
class _RunningAttempt:
    job: AttemptJob
    boot_id: str | None
    deadline: float
    cause: AttemptEnding | None = None  # why it was asked to end
    kill_at: float = float("inf")

    @property
    def claim(self) -> Claim:
        return self.job.claim


class ConcurrentWorker(Worker):
    """Runs ``config.concurrency`` attempts at a time; to retire, it finishes what it has."""

    def run(self) -> None:
        self.handle_signals()
        self._running: dict[str, _RunningAttempt] = {}
        self._process: _ConcurrentProcess | None = None
        self._beaten = time.monotonic()
        while self._running or not (self._stopping or self._retiring):
            self._start_attempts()
            self._take_reports()
            self._check_deadlines()
            self._keep_leases()
        if self._process is not None:
            self._process.kill()
            kill_children()

    @property
    def _full(self) -> bool:
        return len(self._running) >= self.config.concurrency

    def _start_attempts(self) -> None:
        while not (self._stopping or self._retiring or self._full):
            claim = self.claim()
            if claim is None:
                return
            self._start(claim)

    def _start(self, claim: Claim) -> None:
        deadline = time.monotonic() + self.config.timeout_s
        running = _RunningAttempt(self.job(claim), self.boot_id(), deadline)
        self._running[claim.attempt_id] = running
        try:
            if self._process is None:
                self._process = _ConcurrentProcess(self)
            self._process.send(running.job.to_line())
        except OSError as error:
            ending = AttemptEnding(AttemptState.INFRASTRUCTURE, f"could not start: {error}")
            self._finish(running, ending)

    def _take_reports(self) -> None:
        process = self._process
        idle_s = _LISTEN_S if self._running else QueueWatch.TICK_S
        self.listen(
            [] if process is None else [process.report_fd], TICK_S if self._full else idle_s
        )
        if process is None:
            return
        alive = process.read()
        for line in take_lines(process.received):
            fields: dict[str, Any] = json.loads(line)
            if "running" in fields:
                process.last_running = fields["running"]
                process.heard_at = time.monotonic()
                continue
            running = self._running.get(fields.pop("attempt"))
            if running is not None:
                self._finish(running, running.cause or AttemptReport(**fields).ending())
        if not alive:
            self._process_died(process)

    def _process_died(self, process: _ConcurrentProcess) -> None:
        status = process.kill()
        self._process = None
        kill_children()
        said = f"killed by signal {-status}" if status < 0 else f"ended with code {status}"
        others = len(self._running) - 1
        if others:
            ending = AttemptEnding(
                AttemptState.INFRASTRUCTURE,
                f"the process that it shared with {others} others was {said}",
            )
        else:
            ending = AttemptEnding(AttemptState.ERROR, f"the agent's process was {said}")
        for running in list(self._running.values()):
            self._finish(running, running.cause or ending)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            if running.cause is None and (self._stopping or now >= running.deadline):
                self._cancel(running, self.interruption())
        if any(now >= running.kill_at for running in self._running.values()):
            assert self._process is not None
            self._kill_blocked(self._process)

    def _keep_leases(self) -> None:
        now = time.monotonic()
        if now - self._beaten < self.config.lease_s / 3:
            return
        self._beaten = now
        for running in list(self._running.values()):
            if self.heartbeat(running.claim) is False:
                # The gateway refuses what the attempt does until it ends.
                lost = AttemptEnding(AttemptState.CANCELLED, "its lease was lost")
                self._cancel(running, lost)

    def _kill_blocked(self, process: _ConcurrentProcess) -> None:
        """Kill a process in which a canceled attempt does not end, and blame one attempt."""
        overdue = min(self._running.values(), key=lambda running: running.kill_at)
        # Heard of since that one was canceled: nothing blocks the loop, it just goes on.
        silent = process.heard_at <= overdue.kill_at - KILL_GRACE_S
        culprit = self._running.get(process.last_running or "", overdue) if silent else overdue
        for running in self._running.values():
            if running is not culprit and running.cause is not None:
                running.cause = AttemptEnding(
                    AttemptState.INFRASTRUCTURE, "a rollout that shared its process blocked it"
                )
        if culprit.cause is None:
            blocked = "it blocked the process that it shared"
            culprit.cause = AttemptEnding(AttemptState.TIMEOUT, blocked)
        self._process_died(process)

    def _cancel(self, running: _RunningAttempt, cause: AttemptEnding) -> None:
        running.cause = running.cause or cause
        running.kill_at = min(running.kill_at, time.monotonic() + KILL_GRACE_S)
        if self._process is not None:
            cancel = json.dumps({"cancel": running.claim.attempt_id}).encode() + b"\n"
            try:
                self._process.send(cancel)
            except OSError:
                return  # dead: noticed at the next look

    def _finish(self, running: _RunningAttempt, ending: AttemptEnding) -> None:
        claim = running.claim
        del self._running[claim.attempt_id]
        self.clear_storage(claim)
        self.end(running.job, ending, running.boot_id)
        self.tell_pool({"ended": claim.rollout_id})


class _ConcurrentProcess:
    """The worker's side of the agent process."""

    def __init__(self, worker: Worker) -> None:
        config = worker.config
        self.pid, self.report_fd, self._leash_fd = fork_agent_process(
            config,
            config.to_json().encode() + b"\n",
            lambda report_fd, leash_fd: run_concurrent_attempts(config, report_fd, leash_fd),
            [worker.control_fd],
        )
        self.received = bytearray()
        self.heard_at = 0.0
        self.last_running: str | None = None  # the attempt that had the event loop
        self._status: int | None = None

    def send(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._leash_fd, view) :]

    def read(self) -> bool:
        """Receive what has come; False: the process is dead, and everything was received."""
        try:
            while chunk := os.read(self.report_fd, 65536):
                self.received += chunk
        except BlockingIOError:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = status
            return self._status is None
        return False

    def kill(self) -> int:
        """Kill and reap the process; return its exit code, negative for a signal."""
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
                break
            except (ProcessLookupError, PermissionError):
                continue
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        os.close(self.report_fd)
        os.close(self._leash_fd)
        return os.waitstatus_to_exitcode(self._status)
