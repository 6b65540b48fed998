"""Run several attempts of an async agent at a time in this process, as asyncio tasks.

Used with ``--concurrency`` only. The attempts share what the agent keeps at module level, and one
that blocks the event loop blocks the others. ``agentrl_tracer.tracing`` tells their calls, spans
and rewards apart; a context variable tells their output apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, NoReturn, TextIO

from agentrl.runner.agent_process.attempt import (
    TRACE_CONTEXT,
    load_traced_agent,
    read_leash,
    record_result,
    redirect_fds,
    settle_in,
    show_error,
    workflow_attributes,
    write_all,
)
from agentrl.runner.agent_process.environment import attempt_environment, shared_environment
from agentrl.runner.agent_process.loading import LoadedAgent
from agentrl.runner.protocol import AttemptJob, AttemptReport, RunnerConfig
from agentrl_tracer.tracing import attributed, tracing

_log: ContextVar[TextIO | None] = ContextVar("agentrl_log", default=None)


def run_concurrent_attempts(config: RunnerConfig, report_fd: int, leash_fd: int) -> NoReturn:
    """Run attempts in this process, just forked or executed, until it is killed.

    Args:
        report_fd: takes a line per ended attempt, ``{"attempt": id, ...AttemptReport}``, and
            ``{"running": id}`` for each line on the leash: the attempt that has the event loop.
        leash_fd: jobs, one a line, and ``{"cancel": id}``. At its end the process group dies.
    """
    try:
        os.setsid()
        settle_in(config)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Takes what is written below Python, by any attempt.
        redirect_fds(os.path.join(config.logs, f"shared-{os.getpid()}.log"))
        sys.stdout, sys.stderr = _RoutedOutput(sys.stdout), _RoutedOutput(sys.stderr)  # type: ignore[assignment]
        for name in TRACE_CONTEXT:  # the trainer's own trace is not the agent's
            os.environ.pop(name, None)
        os.environ.update(shared_environment(config))
        asyncio.run(_ConcurrentAttempts(config, report_fd, leash_fd).run())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


class _RoutedOutput(io.TextIOBase):
    """Standard output or error that goes to the log of the current attempt."""

    def __init__(self, fallback: TextIO) -> None:
        self._fallback = fallback

    def write(self, text: str) -> int:
        return (_log.get() or self._fallback).write(text)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):  # a log closed before its attempt's last thread
            (_log.get() or self._fallback).flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fallback.fileno()


class _ConcurrentAttempts:
    """The attempts under way, and the agent that is loaded once for all."""

    def __init__(self, config: RunnerConfig, report_fd: int, leash_fd: int) -> None:
        self._config = config
        self._report_fd = report_fd
        self._leash_fd = leash_fd
        self._agent: LoadedAgent | None = None
        self._reporting = threading.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        # A thread reads the leash: an agent that blocks the loop must not outlive its worker.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._take_lines, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()  # until the process is killed

    def _take_lines(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in read_leash(self._leash_fd):
            loop.call_soon_threadsafe(self._obey, line)
            self._report_running(loop)

    def _report_running(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the attempt that has the loop, for the worker to blame if it blocks the loop."""
        current = asyncio.current_task(loop)
        for attempt_id, task in list(self._tasks.items()):
            if task is current:
                self._report({"running": attempt_id})

    def _report(self, line: dict[str, Any]) -> None:
        with self._reporting:
            write_all(self._report_fd, json.dumps(line).encode() + b"\n")

    def _obey(self, line: bytes) -> None:
        canceled = json.loads(line).get("cancel")
        if canceled is None:
            job = AttemptJob.from_line(line)
            self._tasks[job.claim.attempt_id] = asyncio.create_task(self._run_attempt(job))
        elif canceled in self._tasks:
            self._tasks[canceled].cancel("its time was up, or its runner was stopped")

    async def _run_attempt(self, job: AttemptJob) -> None:
        claim = job.claim
        report = AttemptReport(ok=False)
        with open(job.log, "a", buffering=1, encoding="utf-8") as log:  # noqa: ASYNC230
            _log.set(log)
            environment = attempt_environment(self._config, claim)
            with attributed(
                claim.key,
                claim.rollout_id,
                claim.attempt_id,
                gateway=self._config.gateway,
                environment=environment,
            ) as attribution:
                try:
                    agent = self._agent = self._agent or load_traced_agent(self._config)
                    with tracing(*workflow_attributes(agent.name, claim)):
                        result = await self._run_agent(agent, job)
                        record_result(result, rewarded=attribution.rewarded)
                    report.ok = True
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as raised:  # CancelledError and SystemExit too
                    report.ok = isinstance(raised, SystemExit) and raised.code in (None, 0)
                    report.error = None if report.ok else show_error(raised)
                report.incomplete = not await asyncio.to_thread(attribution.finish)
        del self._tasks[claim.attempt_id]
        self._report({"attempt": claim.attempt_id, **asdict(report)})

    async def _run_agent(self, agent: LoadedAgent, job: AttemptJob) -> Any:
        if agent.run_async is None:
            raise TypeError(
                f"concurrency: {self._config.agent!r} is not async, so its rollouts cannot share a "
                "process; make it `async def`, or leave concurrency at 1"
            )
        return await agent.run_async(job.claim.task)
