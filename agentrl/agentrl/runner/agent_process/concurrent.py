"""Run several attempts of an async agent at a time in this process, as asyncio tasks.

Used with ``--concurrency`` only. The attempts share what the agent keeps at module level, and one
that blocks the event loop blocks the others. ``agentrl_tracer.tracing`` tells their calls, spans
and rewards apart; a context variable tells their output apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, TextIO

from agentrl.runner.agent_process.attempt import (
    load_traced_agent,
    record_result,
    redirect_output,
    show_error,
    workflow_span,
)
from agentrl.runner.agent_process.environment import attempt_environment, shared_environment
from agentrl.runner.protocol import AttemptEnding, RunnerConfig, claim_from, send
from agentrl_tracer.schemas import Claim
from agentrl_tracer.tracing import attributed

_log: ContextVar[TextIO | None] = ContextVar("agentrl_log", default=None)


def run_concurrently(
    config: RunnerConfig, messages: Iterator[dict[str, Any]], worker_fd: int
) -> None:
    """Run the attempts that ``messages`` brings, until the process is killed.

    After each message, reports ``{"running": id}``: the attempt that has the event loop, or None.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Takes what is written below Python, by any attempt.
    redirect_output(os.path.join(config.logs, f"shared-{os.getpid()}.log"))
    sys.stdout, sys.stderr = _RoutedOutput(sys.stdout), _RoutedOutput(sys.stderr)  # type: ignore[assignment]
    os.environ.update(shared_environment(config))
    asyncio.run(_ConcurrentAttempts(config, messages, worker_fd).run())


class _RoutedOutput(io.TextIOBase):
    """Standard output or error that goes to the log of the current attempt."""

    def __init__(self, fallback: TextIO) -> None:
        self._fallback = fallback

    def write(self, text: str) -> int:
        return (_log.get() or self._fallback).write(text)

    def flush(self) -> None:
        with contextlib.suppress(ValueError):  # a log closed before its attempt's last thread
            (_log.get() or self._fallback).flush()

    def fileno(self) -> int:
        return self._fallback.fileno()


class _ConcurrentAttempts:
    """The attempts under way."""

    def __init__(
        self, config: RunnerConfig, messages: Iterator[dict[str, Any]], worker_fd: int
    ) -> None:
        self._config = config
        self._messages = messages
        self._worker_fd = worker_fd
        self._reporting = threading.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        # A thread hears the worker: an agent that blocks the loop must not outlive its worker.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._take_messages, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()  # until the process is killed

    def _take_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        for message in self._messages:
            loop.call_soon_threadsafe(self._obey, message)
            current = asyncio.current_task(loop)
            tasks = list(self._tasks.items())
            running = next((attempt_id for attempt_id, task in tasks if task is current), None)
            self._report({"running": running})

    def _report(self, message: dict[str, Any]) -> None:
        with self._reporting:
            send(self._worker_fd, message)

    def _obey(self, message: dict[str, Any]) -> None:
        canceled = message.get("cancel")
        if canceled is None:
            claim = claim_from(message)
            self._tasks[claim.attempt_id] = asyncio.create_task(self._run_attempt(claim))
        elif canceled in self._tasks:
            self._tasks[canceled].cancel("its time was up, or its runner was stopped")

    async def _run_attempt(self, claim: Claim) -> None:
        config, error = self._config, None
        with open(config.log_of(claim), "a", buffering=1, encoding="utf-8") as log:  # noqa: ASYNC230
            _log.set(log)
            with attributed(
                claim.key,
                claim.rollout_id,
                claim.attempt_id,
                gateway=config.gateway,
                environment=attempt_environment(config, claim),
            ) as attribution:
                try:
                    agent = load_traced_agent(config)
                    with workflow_span(agent, claim):
                        if agent.run_async is None:
                            raise TypeError(
                                f"concurrency: {config.agent!r} is not async, so its rollouts "
                                "cannot share a process; make it `async def`, or leave "
                                "concurrency at 1"
                            )
                        result = await agent.run_async(claim.task)
                        record_result(result, rewarded=attribution.rewarded)
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as raised:  # CancelledError and SystemExit too
                    error = show_error(raised)
                complete = await asyncio.to_thread(attribution.finish)
        del self._tasks[claim.attempt_id]
        ending = AttemptEnding.of(error, complete=complete)
        self._report({"attempt": claim.attempt_id, **asdict(ending)})
