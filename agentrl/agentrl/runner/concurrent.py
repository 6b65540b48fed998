"""Several attempts at a time in one process, as asyncio tasks: the child's side.

For async agents only, and only where somebody asked for it (``--concurrency``): the rollouts share
what the agent keeps at module level, and a task that blocks the loop blocks its neighbours. Calls,
spans and rewards are told apart by ``agentrl_tracer.tracing``, output by a context
variable.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import numbers
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, NoReturn, TextIO

from opentelemetry import trace

from agentrl.runner.agent import Agent, load_agent
from agentrl.runner.attempt import (
    LONGEST_OUTPUT,
    Job,
    Report,
    settle_in,
    show_error,
    workflow_attributes,
    write_all,
)
from agentrl.runner.config import RunnerConfig
from agentrl.runner.environment import attempt_environment, shared_environment
from agentrl_tracer.conventions import OUTPUT
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.tracing import attributed, rollout_tracing, tracing

_log: ContextVar[TextIO | None] = ContextVar("agentrl_log", default=None)


def run_shared(config: RunnerConfig, report_fd: int, leash_fd: int) -> NoReturn:
    """Runs attempts in this (just forked or executed) process until it is killed.

    Args:
        report_fd: takes a line per ended attempt, ``{"attempt": id, ...Report}``.
        leash_fd: jobs, one a line, and ``{"cancel": attempt id}``; at its end we die, all of us.
    """
    try:
        os.setsid()
        settle_in()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.path.join(config.logs, f"shared-{os.getpid()}.log")
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)  # what comes from below Python, from whichever attempt
        os.dup2(fd, 2)
        os.close(fd)
        sys.stdout, sys.stderr = _Routed(sys.stdout), _Routed(sys.stderr)  # type: ignore[assignment]
        os.environ.update(shared_environment(config))
        for stale in ("TRACEPARENT", "TRACESTATE"):  # the trainer's own trace is not the agent's
            os.environ.pop(stale, None)
        sys.argv = [config.agent]
        asyncio.run(_Hall(config, report_fd, leash_fd).run())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


class _Routed(io.TextIOBase):
    """Standard output or error: each attempt's goes to its own log."""

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


class _Hall:
    """The attempts under way, and the agent that is loaded once for all."""

    def __init__(self, config: RunnerConfig, report_fd: int, leash_fd: int) -> None:
        self._config = config
        self._report_fd = report_fd
        self._leash_fd = leash_fd
        self._agent: Agent | None = None
        self._reporting = threading.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._hold_leash, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def _hold_leash(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: an agent that blocks the loop must not outlive its worker."""
        partial = b""
        while chunk := os.read(self._leash_fd, 65536):
            *lines, partial = (partial + chunk).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(self._told, line)
                self._tell_who_runs(loop)
        os.killpg(0, signal.SIGKILL)

    def _tell_who_runs(self, loop: asyncio.AbstractEventLoop) -> None:
        """Should the loop be blocked, the worker must kill us all: this says by whom."""
        current = asyncio.current_task(loop)
        for attempt_id, task in list(self._tasks.items()):
            if task is current:
                self._report({"running": attempt_id})

    def _report(self, line: dict[str, Any]) -> None:
        with self._reporting:
            write_all(self._report_fd, json.dumps(line).encode() + b"\n")

    def _told(self, line: bytes) -> None:
        cancelled = json.loads(line).get("cancel")
        if cancelled is None:
            job = Job.from_line(line)
            self._tasks[job.claim.attempt_id] = asyncio.create_task(self._attempt(job))
        elif cancelled in self._tasks:
            self._tasks[cancelled].cancel("its time was up, or its runner was stopped")

    async def _attempt(self, job: Job) -> None:
        claim = job.claim
        report = Report(ok=False)
        with open(job.log, "a", buffering=1, encoding="utf-8") as log:  # noqa: ASYNC230
            _log.set(log)
            environment = attempt_environment(self._config, claim)
            with attributed(
                claim.key,
                claim.rollout_id,
                claim.attempt_id,
                gateway=self._config.gateway,
                environment=environment,
            ) as mine:
                try:
                    with tracing(*workflow_attributes(self._loaded().name, claim)):
                        result = await self._run_agent(job)
                        _note(result, rewarded=mine.rewarded)
                    report.ok = True
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as raised:  # CancelledError and SystemExit too
                    report.ok = isinstance(raised, SystemExit) and raised.code in (None, 0)
                    report.error = None if report.ok else show_error(raised)
                report.reward_emitted = mine.rewarded
                report.incomplete = not await asyncio.to_thread(mine.finish)
        del self._tasks[claim.attempt_id]
        self._report({"attempt": claim.attempt_id, **asdict(report)})

    def _loaded(self) -> Agent:
        if self._agent is None:
            active = rollout_tracing()  # before the import: calls are watched from then on
            assert active is not None
            self._agent = load_agent(self._config.agent, self._config.python_path)
            active.install_globally()
        return self._agent

    async def _run_agent(self, job: Job) -> Any:
        agent = self._loaded()
        if agent.run_async is None:
            raise TypeError(
                f"concurrency: {self._config.agent!r} is not async, so its rollouts cannot share a "
                "process; make it `async def`, or leave concurrency at 1"
            )
        return await agent.run_async(job.claim.task)


def _note(result: Any, *, rewarded: bool) -> None:
    """What the agent returned is its output, and a number its reward unless it emitted one."""
    if result is not None:
        trace.get_current_span().set_attribute(OUTPUT, repr(result)[:LONGEST_OUTPUT])
    if not rewarded and isinstance(result, numbers.Real) and not isinstance(result, bool):
        emit_reward(float(result))


def iterate_lines(received: bytearray) -> Iterator[bytes]:
    """Takes the whole lines out of a buffer."""
    while (end := received.find(b"\n")) >= 0:
        yield bytes(received[:end])
        del received[: end + 1]
