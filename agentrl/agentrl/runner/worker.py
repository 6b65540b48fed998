"""A runner worker: claim a rollout, run it in a fresh process, record how it ended, again."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import NoReturn

from agentrl.runner.attempt_process import AttemptProcess
from agentrl.runner.base import KILL_GRACE_S, TICK_S, Worker
from agentrl.runner.health_checks import QueueWatch
from agentrl.runner.protocol import AttemptEnding, AttemptJob, AttemptReport, RunnerConfig
from agentrl.runner.subreaper import adopt_orphans, kill_children
from agentrl_tracer.schemas import AttemptState, Claim
from agentrl_tracer.store import Store

logger = logging.getLogger("agentrl.runner")


class ForkingWorker(Worker):
    """Runs one attempt at a time."""

    def __init__(
        self, config: RunnerConfig, store: Store, index: int, control: socket.socket
    ) -> None:
        super().__init__(config, store, index, control)
        self._known_modules = frozenset(sys.modules)
        self._kept: AttemptProcess | None = None  # for the next attempt

    def run(self) -> None:
        self.handle_signals()
        while not (self._stopping or self._retiring):
            claim = self.claim()
            if claim is None:
                self.listen([], QueueWatch.TICK_S)
            else:
                modules = self._execute(claim)
                self.tell_pool({"ended": claim.rollout_id, "modules": modules})
                self.listen([], 0.0)
        if self._kept is not None:
            self._kept.kill()

    def _execute(self, claim: Claim) -> list[str]:
        """Run one attempt; return the modules that it imported and this process lacks."""
        boot_id, job = self.boot_id(), self.job(claim)
        report: AttemptReport | None = None
        try:
            process = self._process_for(job)
        except OSError as error:  # out of processes or descriptors
            ending = AttemptEnding(AttemptState.INFRASTRUCTURE, f"could not fork: {error}")
        else:
            try:
                ending = self._attend(process, claim)
            finally:
                if process.reusable:
                    self._kept = process
                else:
                    process.kill()
            report = process.report
        kill_children(keep=() if self._kept is None else (self._kept.pid,))
        self.clear_storage(claim)
        if ending is None:
            logger.info("attempt %s lost its lease or was canceled", claim.attempt_id)
        else:
            self.end(job, ending, boot_id)
        return [] if report is None else report.third_party_modules

    def _process_for(self, job: AttemptJob) -> AttemptProcess:
        """Hand the job to the process of the attempt before, or to a fresh one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            try:
                kept.run_next(job)
            except OSError:
                kept.kill()
            else:
                return kept
        return AttemptProcess(self.config, job, self._known_modules, [self.control_fd])

    def _attend(self, process: AttemptProcess, claim: Claim) -> AttemptEnding | None:
        """Wait for the attempt's end while keeping its lease; None: the lease is lost."""
        lease_s = self.config.lease_s
        start = beaten = time.monotonic()
        deadline, kill_at = start + self.config.timeout_s, float("inf")
        cause: AttemptEnding | None = None
        while not process.poll():
            now = time.monotonic()
            if now >= kill_at:
                process.signal(signal.SIGKILL)
            elif cause is None and (now >= deadline or self._stopping):
                cause, kill_at = self.interruption(), now + KILL_GRACE_S
                process.signal(signal.SIGTERM)
            if now - beaten >= lease_s / 3:
                alive = self.heartbeat(claim)
                if alive is False or (alive is None and now - beaten > lease_s):
                    return None
                beaten = now if alive else beaten
            soon = min(deadline, kill_at, beaten + lease_s / 3) - time.monotonic()
            self.listen([process.report_fd], min(max(soon, 0.001), TICK_S))
        return cause or process.ending()


def run_worker(config: RunnerConfig, index: int, control: socket.socket) -> NoReturn:
    """Run a just forked worker process to its end."""
    code = 1
    try:
        gc.freeze()
        adopt_orphans()
        worker_class = ForkingWorker
        if config.concurrency > 1:
            from agentrl.runner.concurrent_worker import ConcurrentWorker

            worker_class = ConcurrentWorker
        # A store of its own, opened after the fork. Agent processes inherit its connection, but
        # never use it, and end without closing it.
        worker_class(config, Store(config.store), index, control).run()
        code = 0
    except BaseException:
        logger.exception("runner %d failed", index)
    finally:
        os._exit(code)
