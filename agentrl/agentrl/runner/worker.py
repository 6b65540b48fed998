"""A runner: claims rollouts, forks an attempt for each, and answers for how it ended.

Single-threaded on purpose, since it forks: one loop watches the attempt's result pipe, its time,
its lease and its own parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from agentrl.runner.attempt import Outcome, run_attempt
from agentrl.runner.config import RunnerConfig
from agentrl_tracer.schemas import AttemptState, CallState, Claim
from agentrl_tracer.store import Store

logger = logging.getLogger("agentrl.runner")

_IDLE_FIRST_S, _IDLE_LONGEST_S = 0.02, 0.2
_WATCH_S = 0.05
_TERM_GRACE_S = 2.0
_LOG_TAIL_BYTES = 1500


class Stopped(BaseException):
    """The pool wants this runner to end, or is gone."""


@dataclass(slots=True)
class _Ended:
    """How an attempt's process ended."""

    status: int | None = None  # from waitpid
    output: bytearray = field(default_factory=bytearray)
    timed_out: bool = False
    lease_lost: bool = False


class Runner:
    """
    Args:
        config: shared by the runners of a pool.
        preloaded: modules that the pool has imported, or tried to.
        report_fd: where to tell the pool which modules attempts had to import themselves.
    """

    def __init__(self, config: RunnerConfig, preloaded: set[str], report_fd: int) -> None:
        self._config = config
        self._preloaded = preloaded
        self._report_fd = report_fd
        self._parent = os.getppid()
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        # No open connection may cross a fork.
        self._store = Store(config.store, pooled=False)
        self._stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self) -> None:
        """Works until the pool ends it, or until attempts would start quicker in a fresh runner."""
        idle = _IDLE_FIRST_S
        while not self._should_stop():
            claim = self._store.claim(self._name, self._config.lease_s, self._config.run_id)
            if claim is None:
                time.sleep(idle)
                idle = min(idle * 1.5, _IDLE_LONGEST_S)
                continue
            idle = _IDLE_FIRST_S
            outcome = self._attempt(claim)
            new = sorted(set(outcome.modules) - self._preloaded) if outcome else []
            if new:
                os.write(self._report_fd, (json.dumps(new) + "\n").encode())
                return  # the pool imports them and forks a runner that has them

    def _attempt(self, claim: Claim) -> Outcome | None:
        log = str(
            Path(self._config.logs) / f"rollout-{claim.rollout_id}-{claim.attempt_number}.log"
        )
        boots = self._store.gateway_boots(claim.run_id)
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            _become_attempt(self._config, claim, write_fd, log)
        os.close(write_fd)
        try:
            ended = self._watch(pid, read_fd, claim)
        except Stopped:
            self._kill(pid, grace_s=0.0)
            self._store.end_attempt(
                claim.attempt_id, AttemptState.INFRASTRUCTURE, error="its runner was stopped"
            )
            raise
        finally:
            os.close(read_fd)
        if ended.lease_lost:
            return None  # somebody else has sealed it
        state, error, outcome = self._judge(claim, ended, boots, log)
        self._store.end_attempt(claim.attempt_id, state, error=error, log=log)
        return outcome

    def _watch(self, pid: int, read_fd: int, claim: Claim) -> _Ended:
        """Waits for the attempt's end, keeping its lease and its time limit."""
        ended = _Ended()
        deadline = time.monotonic() + self._config.timeout_s
        beat_every = self._config.lease_s / 3
        next_beat = time.monotonic() + beat_every
        pipe_open = True
        while ended.status is None:
            if self._should_stop():
                raise Stopped
            # The pipe closes when the attempt ends, so nothing is gained by polling faster.
            readable = select.select([read_fd] if pipe_open else [], [], [], _WATCH_S)[0]
            if readable:
                chunk = os.read(read_fd, 65536)
                pipe_open = bool(chunk)
                ended.output += chunk
                if chunk:
                    continue
            done, status = os.waitpid(pid, 0 if readable else os.WNOHANG)
            if done:
                ended.status = status
                break
            now = time.monotonic()
            if now >= deadline:
                ended.timed_out = True
                ended.status = self._kill(pid, _TERM_GRACE_S)
            elif now >= next_beat:
                next_beat = now + beat_every
                if not self._store.heartbeat(claim.attempt_id, self._config.lease_s):
                    ended.lease_lost = True
                    ended.status = self._kill(pid, _TERM_GRACE_S)
        _signal_group(pid, signal.SIGKILL)  # what the agent started and left behind
        return ended

    def _judge(
        self, claim: Claim, ended: _Ended, boots: list[str], log: str
    ) -> tuple[AttemptState, str | None, Outcome | None]:
        """What the end of a process says about its attempt."""
        if ended.timed_out:
            error = f"timeout: killed after {self._config.timeout_s:g} s"
            return AttemptState.TIMEOUT, error, None
        outcome: Outcome | None = None
        with contextlib.suppress(ValueError, TypeError):
            outcome = Outcome(**json.loads(bytes(ended.output)))
        if outcome is not None and outcome.ok:
            return AttemptState.SUCCEEDED, None, outcome
        error = outcome.error if outcome else _death(ended.status or 0, log)
        if (outcome and outcome.undelivered) or self._gateway_failed(claim, boots):
            return AttemptState.INFRASTRUCTURE, error, outcome
        return AttemptState.ERROR, error, outcome

    def _gateway_failed(self, claim: Claim, boots: list[str]) -> bool:
        """Whether the agent's error may well be ours: it must not use up the agent's attempts."""
        if self._store.gateway_boots(claim.run_id) != boots:
            return True
        calls = self._store.calls(attempt_ids=[claim.attempt_id])
        if any(call.state is CallState.ERROR for call in calls):
            return True
        try:
            urllib.request.urlopen(f"{self._config.gateway}/healthz", timeout=2).close()
        except (OSError, urllib.error.URLError):
            return True
        return False

    def _kill(self, pid: int, grace_s: float) -> int:
        """Ends the attempt's process group: SIGTERM, some grace, SIGKILL. Returns its status."""
        _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _signal_group(pid, signal.SIGKILL)
                return status
            time.sleep(0.02)
        _signal_group(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _should_stop(self) -> bool:
        return self._stopping or os.getppid() != self._parent


def _become_attempt(config: RunnerConfig, claim: Claim, result_fd: int, log: str) -> NoReturn:
    try:
        run_attempt(config, claim, result_fd, log)
    except BaseException:
        logging.getLogger("agentrl.runner").exception("the attempt could not be started")
    finally:
        os._exit(1)


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signals the attempt's group, and itself in case it has not made one yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) != pid:
            os.kill(pid, number)


def _death(status: int, log: str) -> str:
    """Why a process ended without a word."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"the agent's process was killed by signal {number} ({signal.Signals(number).name})"
    else:
        how = f"the agent's process ended with exit code {os.waitstatus_to_exitcode(status)}"
    try:
        tail = Path(log).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        tail = ""
    return f"{tail}\n{how}" if tail else how


def run_worker(config: RunnerConfig, preloaded: set[str], report_fd: int) -> NoReturn:
    """The whole life of a runner process, in a child that the pool has just forked."""
    code = 0
    try:
        Runner(config, preloaded, report_fd).run()
    except Stopped:
        pass
    except BaseException:
        logger.exception("a runner failed")
        code = 1
    sys.stderr.flush()
    os._exit(code)
