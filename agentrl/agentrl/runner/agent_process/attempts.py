"""Run attempts in an agent process, one after the other or several at a time.

An async agent whose rollouts take turns in a process gets one event loop for all of them
(``event_loop.py``).

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
import json
import logging
import numbers
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl.runner.agent_process.environment import (
    attempt_environment,
    client_environment,
    shared_owner,
    storage_environment,
)
from agentrl.runner.agent_process.event_loop import KeptLoop
from agentrl.runner.agent_spec import (
    LoadedAgent,
    load_agent,
    parse_agent,
    run_once,
)
from agentrl.runner.preload import third_party_modules
from agentrl.runner.protocol import AttemptEnding, AttemptFailed, RunnerConfig, send
from agentrl_tracer.conventions import OUTPUT
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.schemas import Claim
from agentrl_tracer.tracing import attributed, flush, rollout_tracing, tracing

_TRACE_CONTEXT = ("TRACEPARENT", "TRACESTATE")
_TRACEBACK_LINES = 12
_LONGEST = 4000  # characters of an error, and of what the agent returned
_NO_STREAM = (OSError, ValueError, AttributeError)
"""Of a full disk, or standard output that the agent has closed or replaced."""
_log: ContextVar[TextIO | None] = ContextVar("agentrl_log", default=None)


def run_attempts(config: RunnerConfig, worker_fd: int, known_modules: int | None) -> NoReturn:
    """Run the agent in this process, just forked or executed, and never return.

    Args:
        worker_fd: socket whose other end only the worker holds. It brings the claims, and
            ``{"cancel": id}``, and takes ``{"attempt": id, ...AttemptEnding}`` per attempt. At its
            end the process group dies.
        known_modules: number of modules imported before the fork. Attempts report those imported
            later; with None, none.
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
        if config.concurrency > 1:
            asyncio.run(_run_concurrently(config, worker_fd))
        else:
            _run_in_turn(config, worker_fd, known_modules)
    except BaseException:
        traceback.print_exc()
        _flush_output()
    finally:
        os._exit(1)


def _hear_worker(worker_fd: int, take: Callable[[dict[str, Any]], object]) -> None:
    """Take the worker's messages in a thread, which kills this process group when it is gone."""

    def listen() -> None:
        try:
            for message in _messages(worker_fd):
                take(message)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()


def _messages(worker_fd: int) -> Iterator[dict[str, Any]]:
    """Yield the worker's messages; to a claim belongs the open file of its ``log``."""
    worker, received, logs = socket.socket(fileno=os.dup(worker_fd)), b"", list[int]()
    while True:
        data, descriptors, _, _ = socket.recv_fds(worker, 65536, 8, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        logs += descriptors
        *lines, received = (received + data).split(b"\n")
        for line in filter(None, lines):
            message = json.loads(line)
            yield message if "cancel" in message else {**message, "log": logs.pop(0)}


def _run_in_turn(config: RunnerConfig, worker_fd: int, known_modules: int | None) -> NoReturn:
    """Run an attempt per message; the worker kills the process if there is no more."""
    why = "terminated: its time was up, or its runner was stopped"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(why))
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    _hear_worker(worker_fd, messages.put)
    while True:
        message = messages.get()
        redirect_output(message.pop("log"))
        claim = Claim(**message)
        _buffer_lines()
        ending = run_attempt(config, claim)
        if known_modules is not None:
            modules = third_party_modules(parse_agent(config.agent), known_modules)
            ending, known_modules = replace(ending, modules=modules), len(sys.modules)
        _flush_output()
        send(worker_fd, {"attempt": claim.attempt_id, **asdict(ending)})


def redirect_output(log: int) -> None:
    """Write file descriptors 1 and 2 to an open file."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _buffer_lines() -> None:
    """Have a killed agent's last words in the log. The agent before may have closed its streams."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            how: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
            setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False, **how))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):  # else it is the agent's own
            stream.reconfigure(line_buffering=True)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(*_NO_STREAM):
            stream.flush()


def _say(text: str) -> None:
    with contextlib.suppress(*_NO_STREAM):
        sys.stderr.write(text)


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


async def _run_concurrently(config: RunnerConfig, worker_fd: int) -> None:
    """Run the attempts that the worker sends, until the process is killed.

    After each message, reports ``{"running": id}``: the attempt that has the event loop, or None.
    """
    loop, reporting = asyncio.get_running_loop(), threading.Lock()
    tasks: dict[str, asyncio.Task[None]] = {}

    def report(message: dict[str, Any]) -> None:
        with reporting:
            send(worker_fd, message)

    def hear(message: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(obey, message)
        current = asyncio.current_task(loop)
        report({"running": current and current.get_name()})

    def obey(message: dict[str, Any]) -> None:
        canceled = message.get("cancel")
        if canceled is None:
            log = message.pop("log")
            claim = Claim(**message)
            name = claim.attempt_id
            tasks[name] = asyncio.create_task(run(claim, log), name=name)
        elif canceled in tasks:
            tasks[canceled].cancel("its time was up, or its runner was stopped")

    async def run(claim: Claim, output: int) -> None:
        failures: list[AttemptFailed] = []
        with open(output, "a", buffering=1, encoding="utf-8") as log:  # noqa: ASYNC230
            _log.set(log)
            with attributed(attempt_environment(config, claim)) as attempt:
                with _failures_in(failures):
                    agent = _load_agent(config.agent, config.rollouts_per_process > 1)
                    if agent.run_async is None:
                        raise TypeError(
                            f"concurrency: {config.agent!r} is not async, so its rollouts cannot "
                            "share a process; make it `async def`, or leave concurrency at 1"
                        )
                    with _root_span(agent.name, claim):
                        with _forks_end():
                            result = await agent.run_async(claim.task)
                        _record_result(result, rewarded=attempt.rewarded)
                complete = await _whole(asyncio.to_thread(attempt.finish))
        del tasks[claim.attempt_id]
        ending = AttemptEnding.of(failures, complete=complete)
        report({"attempt": claim.attempt_id, **asdict(ending)})

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = _RoutedOutput(sys.stdout), _RoutedOutput(sys.stderr)  # type: ignore[assignment]
    # A header names each call's rollout; a call without one is refused, not misattributed.
    os.environ.update(client_environment(config, config.gateway, "sk-shared-process"))
    os.environ.update(storage_environment(shared_owner(config, os.getpid())))
    # In a thread: an agent that blocks the loop must not outlive its worker.
    _hear_worker(worker_fd, hear)
    await asyncio.Event().wait()


def run_attempt(config: RunnerConfig, claim: Claim) -> AttemptEnding:
    """Run one attempt in this process."""
    # Of the attempt before. A task may be too long for a variable.
    for name in ("AGENTRL_TASK", *_TRACE_CONTEXT):
        os.environ.pop(name, None)
    os.environ.update(attempt_environment(config, claim))
    attempt = rollout_tracing()
    assert attempt is not None
    attempt.finish_expected = True  # ``finish`` comes before the report
    failures: list[AttemptFailed] = []
    with _failures_in(failures):
        agent = _load_agent(config.agent, config.rollouts_per_process > 1)
        with _root_span(agent.name, claim):
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier)
            if "traceparent" in carrier:  # the parent of the agent's subprocesses' spans
                os.environ["TRACEPARENT"] = carrier["traceparent"]
            with _forks_end():
                result = agent.run(claim.task)
            _record_result(result, rewarded=attempt.rewarded)
    return AttemptEnding.of(failures, complete=attempt.finish())


def _root_span(agent: str, claim: Claim) -> AbstractContextManager[object]:
    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": agent,
        "agentrl.rollout.id": claim.rollout_id,
        "agentrl.attempt.id": claim.attempt_id,
        "agentrl.task.id": claim.task_id,
    }
    return tracing(f"invoke_workflow {agent}", attributes)


@contextlib.contextmanager
def _failures_in(failures: list[AttemptFailed]) -> Iterator[None]:
    """Print what is raised, while the agent is loaded or runs, and add it to ``failures``."""
    try:
        yield
    except AttemptFailed as failed:
        failures.append(failed)
        _say(f"{failed}\n")
    except BaseException as raised:  # CancelledError and SystemExit too
        if not isinstance(raised, SystemExit) or raised.code not in (None, 0):
            failures.append(AttemptFailed(_show_error(raised)))


@contextlib.contextmanager
def _forks_end() -> Iterator[None]:
    """End processes that the agent forks where they leave it, as in a script of the agent's own."""
    own = os.getpid()
    try:
        yield
    except BaseException as raised:
        if os.getpid() != own:
            _end_fork(raised)
        raise
    if os.getpid() != own:
        _end_fork(None)


def _end_fork(raised: BaseException | None) -> NoReturn:
    """End this process as Python does after this error, whatever happens meanwhile."""
    code = 0 if raised is None else 1
    try:
        if isinstance(raised, SystemExit):
            if isinstance(raised.code, int | None):
                code = raised.code or 0
            else:
                _say(f"{raised.code}\n")
        elif raised is not None:
            _show_error(raised)
        flush()
        _flush_output()
    finally:
        os._exit(code & 0xFF)


async def _whole(work: Coroutine[Any, Any, bool]) -> bool:
    """Return the result of what a cancellation must not cut off."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()


@cache  # loaded once for all attempts of a process
def _load_agent(spec: str, keep_loop: bool) -> LoadedAgent:
    attempt = rollout_tracing()  # before the import: calls and threads are watched from then on
    assert attempt is not None
    agent = load_agent(spec, KeptLoop().run if keep_loop else run_once)
    # After the import: a provider that the user's module sets is kept, and ours joins it.
    attempt.router.install_globally()
    return agent


def _record_result(result: Any, *, rewarded: bool) -> None:
    """Record what the agent returned; a number is its reward, unless it emitted one."""
    if result is not None:
        with contextlib.suppress(Exception):  # what the agent's own class raises
            trace.get_current_span().set_attribute(OUTPUT, repr(result)[:_LONGEST])
    if not rewarded and isinstance(result, numbers.Real | Decimal) and not isinstance(result, bool):
        emit_reward(result)


def _show_error(raised: BaseException) -> str:
    """Print the traceback, without the runner's own frames; return its last lines."""
    frames: TracebackType | None = raised.__traceback__
    ours = str(Path(__file__).parents[1]) + os.sep
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(raised), raised, frames))
    _say(text)
    if isinstance(raised, SystemExit):
        return f"SystemExit: {raised.code}"
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])[-_LONGEST:]
