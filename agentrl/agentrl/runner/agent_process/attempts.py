"""Run attempts in an agent process, one after the other or several at a time.

With ``--concurrency``, attempts of an async agent run as asyncio tasks. They share what the agent
keeps at module level, and one that blocks the event loop blocks the others.
``agentrl_tracer.tracing`` tells their calls, spans and rewards apart; a context variable tells
their output apart.

The process ends with ``os._exit``: tearing the interpreter down would cost more than an instant
agent's whole run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import numbers
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl.runner.agent_process.environment import attempt_environment, shared_environment
from agentrl.runner.agent_process.loading import CommandFailed, LoadedAgent, load_agent
from agentrl.runner.agent_spec import parse_agent
from agentrl.runner.preload import third_party_modules
from agentrl.runner.protocol import AttemptEnding, RunnerConfig, claim_from, send, take_messages
from agentrl_tracer.context import current_rollout
from agentrl_tracer.conventions import OUTPUT
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.schemas import Claim
from agentrl_tracer.tracing import attributed, finish, rollout_tracing, tracing

_TRACE_CONTEXT = ("TRACEPARENT", "TRACESTATE")
_TRACEBACK_LINES = 12
_LONGEST = 4000  # characters of an error, and of what the agent returned
_log: ContextVar[TextIO | None] = ContextVar("agentrl_log", default=None)


def run_attempts(
    config: RunnerConfig, worker_fd: int, known_modules: frozenset[str] | None
) -> NoReturn:
    """Run the agent in this process, just forked or executed, and never return.

    Args:
        worker_fd: socket whose other end only the worker holds. It brings the claims, and
            ``{"cancel": id}``, and takes ``{"attempt": id, ...AttemptEnding}`` per attempt. At its
            end the process group dies.
        known_modules: modules imported before the fork, which are not reported; None: report none.
    """
    try:
        os.setsid()  # a process group of its own: one signal reaches every process of the agent
        gc.freeze()  # the worker's objects are never garbage here
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pool_logger = logging.getLogger("agentrl.runner")
        pool_logger.handlers.clear()  # the agent configures logging as it likes
        pool_logger.propagate = True
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:  # preloaded: else every attempt would draw the same numbers
            numpy_random.seed()
        sys.argv = [config.agent]
        for name in _TRACE_CONTEXT:  # the trainer's own trace is not the agent's
            os.environ.pop(name, None)
        messages = _hear_worker(worker_fd)
        if config.concurrency > 1:
            _run_concurrently(config, messages, worker_fd)
        else:
            _run_in_turn(config, messages, worker_fd, known_modules)
    except BaseException:
        traceback.print_exc()
        _flush_output()
    finally:
        os._exit(1)


def _hear_worker(worker_fd: int) -> Iterator[dict[str, Any]]:
    """Yield the worker's messages; kill this process group when the worker is gone."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := os.read(worker_fd, 65536):
            received += chunk
            yield from take_messages(received)
    os.killpg(0, signal.SIGKILL)


def _run_in_turn(
    config: RunnerConfig,
    messages: Iterator[dict[str, Any]],
    worker_fd: int,
    known_modules: frozenset[str] | None,
) -> NoReturn:
    """Run an attempt per message; the worker kills the process if there is no more."""
    signal.signal(signal.SIGTERM, _terminate)
    claims: queue.SimpleQueue[Claim] = queue.SimpleQueue()

    def take_claims() -> None:
        for message in messages:
            claims.put(claim_from(message))

    threading.Thread(target=take_claims, daemon=True).start()
    while True:
        claim = claims.get()
        _redirect_output(config.log_of(claim))
        for stream in (sys.stdout, sys.stderr):  # a killed agent's last words must be in the log
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        ending = run_attempt(config, claim)
        if known_modules is not None:
            modules = third_party_modules(parse_agent(config.agent), known_modules)
            if modules:  # copying the set touches all its memory pages
                known_modules |= set(modules)
                ending = replace(ending, modules=tuple(modules))
        _flush_output()
        send(worker_fd, {"attempt": claim.attempt_id, **asdict(ending)})


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit("terminated: its time was up, or its runner was stopped")


def _redirect_output(log: str) -> None:
    """Append file descriptors 1 and 2 to a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or the agent closed it
            stream.flush()


def _run_concurrently(
    config: RunnerConfig, messages: Iterator[dict[str, Any]], worker_fd: int
) -> None:
    """Run the attempts that ``messages`` brings, until the process is killed.

    After each message, reports ``{"running": id}``: the attempt that has the event loop, or None.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Takes what is written below Python, by any attempt.
    _redirect_output(os.path.join(config.logs, f"shared-{os.getpid()}.log"))
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


@dataclass(slots=True)
class _ConcurrentAttempts:
    _config: RunnerConfig
    _messages: Iterator[dict[str, Any]]
    _worker_fd: int
    _reporting: threading.Lock = field(default_factory=threading.Lock)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])

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
                    agent = _load_traced_agent(config)
                    with _workflow_span(agent, claim):
                        if agent.run_async is None:
                            raise TypeError(
                                f"concurrency: {config.agent!r} is not async, so its rollouts "
                                "cannot share a process; make it `async def`, or leave "
                                "concurrency at 1"
                            )
                        result = await agent.run_async(claim.task)
                        _record_result(result, rewarded=attribution.rewarded)
                except (KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as raised:  # CancelledError and SystemExit too
                    error = _show_error(raised)
                complete = await asyncio.to_thread(attribution.finish)
        del self._tasks[claim.attempt_id]
        ending = AttemptEnding.of(error, complete=complete)
        self._report({"attempt": claim.attempt_id, **asdict(ending)})


def run_attempt(config: RunnerConfig, claim: Claim) -> AttemptEnding:
    """Run one attempt in this process."""
    # Of the attempt before. A task may be too long for a variable.
    for name in ("AGENTRL_TASK", *_TRACE_CONTEXT):
        os.environ.pop(name, None)
    os.environ.update(attempt_environment(config, claim))
    active, rollout = rollout_tracing(), current_rollout()
    assert active is not None
    assert rollout is not None
    active.attempt(rollout).finish_expected = True  # ``finish`` comes before the report
    error: str | None = None
    try:
        agent = _load_traced_agent(config)
        with _workflow_span(agent, claim):
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier)
            if "traceparent" in carrier:  # the parent of the agent's subprocesses' spans
                os.environ["TRACEPARENT"] = carrier["traceparent"]
            result = agent.run(claim.task)
            _record_result(result, rewarded=active.attempt(rollout).rewarded)
    except CommandFailed as failed:
        error = str(failed)  # a traceback of this module would explain nothing
        sys.stderr.write(f"{error}\n")
    except BaseException as raised:
        error = _show_error(raised)
    return AttemptEnding.of(error, complete=finish())


@cache  # loaded once for all attempts of a process
def _load_traced_agent(config: RunnerConfig) -> LoadedAgent:
    active = rollout_tracing()  # before the import: calls and threads are watched from then on
    assert active is not None
    agent = load_agent(config.agent)
    # After the import: a provider that the user's module sets is kept, and ours joins it.
    active.install_globally()
    return agent


def _workflow_span(agent: LoadedAgent, claim: Claim) -> AbstractContextManager[object]:
    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": agent.name,
        "agentrl.rollout.id": claim.rollout_id,
        "agentrl.attempt.id": claim.attempt_id,
        "agentrl.task.id": claim.task_id,
    }
    return tracing(f"invoke_workflow {agent.name}", attributes)


def _record_result(result: Any, *, rewarded: bool) -> None:
    """Record what the agent returned; a number is its reward, unless it emitted one."""
    if result is not None:
        trace.get_current_span().set_attribute(OUTPUT, repr(result)[:_LONGEST])
    if not rewarded and isinstance(result, numbers.Real) and not isinstance(result, bool):
        emit_reward(float(result))


def _show_error(raised: BaseException) -> str | None:
    """Print the traceback, without the runner's own frames; return its last lines.

    Returns None for a ``sys.exit`` that means success.
    """
    if isinstance(raised, SystemExit) and raised.code in (None, 0):
        return None
    frames: TracebackType | None = raised.__traceback__
    ours = os.path.dirname(__file__) + os.sep
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(raised), raised, frames))
    sys.stderr.write(text)
    if isinstance(raised, SystemExit):
        return f"SystemExit: {raised.code}"
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])[-_LONGEST:]
