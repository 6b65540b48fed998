"""A worker whose process runs several attempts at a time: the worker's side of ``shared.py``.

Each attempt has its own claim, lease, deadline and log. A task can be cancelled alone; a process
that does not let itself be cancelled is killed, and then the others in it were unlucky: that is
infrastructure, and they run again.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.runner.attempt import Job, Report
from agentrl.runner.concurrent import iterate_lines, run_shared
from agentrl.runner.health_checks import QueueWatch
from agentrl.runner.process import fork_attempts
from agentrl.runner.subreaper import kill_children
from agentrl.runner.worker import KILL_GRACE_S, STOPPED, TICK_S, Ending, Worker, keep_log
from agentrl_tracer.schemas import AttemptState, Claim

_LISTEN_S = 0.02


@dataclass(slots=True)
class _Running:
    claim: Claim
    log: Path
    boot_id: str | None
    deadline: float
    cause: Ending | None = None  # why it was asked to end
    kill_at: float = float("inf")


class SharedWorker(Worker):
    """Works until it is told to retire (then it finishes what it has) or to stop."""

    def run(self) -> None:
        self.handle_signals()
        self._running: dict[str, _Running] = {}
        self._process: _SharedProcess | None = None
        self._beaten = time.monotonic()
        while self._running or not (self._stopping or self._retiring):
            self._take_up()
            self._listen_for_reports()
            self._look_at_clock()
        if self._process is not None:
            self._process.kill()
            kill_children()

    def _take_up(self) -> None:
        while not (self._stopping or self._retiring):
            if len(self._running) >= self.config.concurrency or not self._queue.due():
                return
            claim = self._claim()
            if claim is None:
                return
            self._queue.found()
            self._tell({"claimed": claim.rollout_id})
            self._start(claim)

    def _start(self, claim: Claim) -> None:
        log = Path(self.config.logs) / f"{claim.rollout_id}-{claim.attempt_number}.log"
        running = _Running(
            claim,
            log,
            self.gateway.boot_id(1.0),
            time.monotonic() + self.config.timeout_s,
        )
        self._running[claim.attempt_id] = running
        try:
            if self._process is None:
                self._process = _SharedProcess(self)
            self._process.send(Job(claim, str(log)).to_line())
        except OSError as error:
            self._over(running, Ending(AttemptState.INFRASTRUCTURE, f"could not start: {error}"))

    def _listen_for_reports(self) -> None:
        process = self._process
        busy = len(self._running) >= self.config.concurrency
        patience = TICK_S if busy else (_LISTEN_S if self._running else QueueWatch.TICK_S)
        self._listen([] if process is None else [process.report_fd], patience)
        if process is None:
            return
        alive = process.read()
        for line in iterate_lines(process.received):
            fields: dict[str, Any] = json.loads(line)
            if "running" in fields:
                process.last_running = fields["running"]
                process.heard_at = time.monotonic()
                continue
            running = self._running.get(fields.pop("attempt"))
            if running is not None:
                self._over(running, running.cause or _ending_of(Report(**fields)))
        if not alive:
            self._process_died(process)

    def _process_died(self, process: _SharedProcess) -> None:
        status = process.kill()
        self._process = None
        kill_children()
        alone = len(self._running) == 1
        told = f"killed by signal {-status}" if status < 0 else f"ended with code {status}"
        for running in list(self._running.values()):
            if alone:
                ending = Ending(AttemptState.ERROR, f"the agent's process was {told}")
            else:
                ending = Ending(
                    AttemptState.INFRASTRUCTURE,
                    f"the process that it shared with {len(self._running) - 1} others was {told}",
                )
            self._over(running, running.cause or ending)

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            if running.cause is None and (self._stopping or now >= running.deadline):
                timeout = f"timeout: it was still running after {self.config.timeout_s:g} s"
                self._ask_to_end(
                    running,
                    Ending(AttemptState.INFRASTRUCTURE, STOPPED)
                    if self._stopping
                    else Ending(AttemptState.TIMEOUT, timeout),
                )
        if any(now >= running.kill_at for running in self._running.values()):
            assert self._process is not None
            self._kill_blocked(self._process)
        if now - self._beaten >= self.config.lease_s / 3:
            self._beaten = now
            for running in list(self._running.values()):
                attempt_id, lease_s = running.claim.attempt_id, self.config.lease_s
                if self._try(lambda i=attempt_id, s=lease_s: self.store.heartbeat(i, s)) is False:
                    # Not ours any more; what it does till it ends is refused by the gateway.
                    self._ask_to_end(running, Ending(AttemptState.CANCELLED, "its lease was lost"))

    def _kill_blocked(self, process: _SharedProcess) -> None:
        """One attempt does not let the others run: it has timed out, and they begin again."""
        overdue = min(self._running.values(), key=lambda running: running.kill_at)
        # Heard of since that one was asked to end: nobody blocks the process, it just goes on.
        silent = process.heard_at <= overdue.kill_at - KILL_GRACE_S
        culprit = self._running.get(process.last_running or "", overdue) if silent else overdue
        for running in self._running.values():
            if running is not culprit and running.cause is not None:
                running.cause = Ending(
                    AttemptState.INFRASTRUCTURE, "a rollout that shared its process blocked it"
                )
        if culprit.cause is None:
            culprit.cause = Ending(AttemptState.TIMEOUT, "it blocked the process that it shared")
        self._process_died(process)

    def _ask_to_end(self, running: _Running, cause: Ending) -> None:
        running.cause = running.cause or cause
        running.kill_at = min(running.kill_at, time.monotonic() + KILL_GRACE_S)
        if self._process is not None:
            cancel = json.dumps({"cancel": running.claim.attempt_id}).encode() + b"\n"
            try:
                self._process.send(cancel)
            except OSError:
                return  # dead: noticed at the next look

    def _over(self, running: _Running, ending: Ending) -> None:
        claim = running.claim
        del self._running[claim.attempt_id]
        self.clear_storage(claim)
        if ending.error is not None:
            ending = self._blame(ending, claim, running.boot_id)
        self._end(claim, ending, keep_log(running.log))
        self._tell({"ended": claim.rollout_id})


class _SharedProcess:
    def __init__(self, worker: Worker) -> None:
        config = worker.config
        self.pid, self.report_fd, self._leash_fd = fork_attempts(
            config,
            config.to_json().encode() + b"\n",
            lambda report_fd, leash_fd: run_shared(config, report_fd, leash_fd),
            [worker.control_fd],
        )
        self.received = bytearray()
        self.heard_at = 0.0
        self.last_running: str | None = None  # the attempt whose task ran when it was last asked
        self._status: int | None = None

    def send(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._leash_fd, view) :]

    def read(self) -> bool:
        """Takes in what has come; False: the process is dead, and nothing more will."""
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
        """Ends it, if it is not dead; returns its exit code, negative for a signal."""
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


def _ending_of(report: Report) -> Ending:
    if report.ok and not report.incomplete:
        return Ending(AttemptState.SUCCEEDED, None)
    error = report.error or "its spans or rewards did not reach the gateway"
    state = AttemptState.INFRASTRUCTURE if report.ok else AttemptState.ERROR
    return Ending(state, error, report.incomplete)
