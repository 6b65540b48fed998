"""Run attempts one after the other in this process, and report each to the worker.

The process ends with ``os._exit``: tearing the interpreter down would cost more than an instant
agent's whole run.
"""

from __future__ import annotations

import gc
import json
import logging
import numbers
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType, TracebackType
from typing import Any, NoReturn

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl.runner.agent_process.environment import attempt_environment
from agentrl.runner.agent_process.loading import CommandFailed, LoadedAgent, load_agent
from agentrl.runner.agent_spec import parse_agent
from agentrl.runner.preload import third_party_modules
from agentrl.runner.protocol import AttemptJob, AttemptReport, RunnerConfig, take_lines
from agentrl_tracer.context import current_rollout
from agentrl_tracer.conventions import OUTPUT
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.schemas import Claim
from agentrl_tracer.tracing import finish, rollout_tracing, tracing

TRACE_CONTEXT = ("TRACEPARENT", "TRACESTATE")
_TRACEBACK_LINES = 12
_LONGEST_ERROR = 4000
_LONGEST_OUTPUT = 4000  # characters of what the agent returned


def run_attempts(
    config: RunnerConfig,
    job: AttemptJob,
    report_fd: int,
    leash_fd: int,
    known_modules: frozenset[str] | None,
) -> NoReturn:
    """Run the agent in this process, just forked or executed, and never return.

    Args:
        job: the first attempt; more come as lines on the leash, where the configuration allows it.
        report_fd: pipe that takes a report, one line, per attempt.
        leash_fd: pipe whose other end only the worker holds. At its end the process group dies.
        known_modules: modules imported before the fork, which are not reported; None: report none.
    """
    code = 1
    try:
        os.setsid()  # a process group of its own: one signal reaches every process of the agent
        settle_in(config)
        jobs: queue.SimpleQueue[AttemptJob] = queue.SimpleQueue()
        threading.Thread(target=_take_jobs, args=(leash_fd, jobs), daemon=True).start()
        runner = _AttemptRunner(config)
        while True:
            _redirect_output(job.log)
            report = runner.run(job.claim)
            if known_modules is not None:
                spec = parse_agent(config.agent)
                report.third_party_modules = third_party_modules(spec, known_modules)
                if report.third_party_modules:  # copying the set touches all its memory pages
                    known_modules |= set(report.third_party_modules)
            _flush_output()
            write_all(report_fd, json.dumps(asdict(report)).encode() + b"\n")
            code = 0 if report.ok else 1
            job = jobs.get()  # the worker kills the process if there is no more
    except BaseException:
        traceback.print_exc()
        _flush_output()
    finally:
        os._exit(code)


def settle_in(config: RunnerConfig) -> None:
    """Undo what the process inherited from its worker."""
    gc.freeze()  # the worker's objects are never garbage here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    pool_logger = logging.getLogger("agentrl.runner")
    pool_logger.handlers.clear()  # the agent configures logging as it likes
    pool_logger.propagate = True
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # preloaded: else every attempt would draw the same numbers
        numpy_random.seed()
    sys.argv = [config.agent]


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit("terminated: its time was up, or its runner was stopped")


def _take_jobs(leash_fd: int, jobs: queue.SimpleQueue[AttemptJob]) -> None:
    for line in read_leash(leash_fd):
        jobs.put(AttemptJob.from_line(line))


def read_leash(leash_fd: int) -> Iterator[bytes]:
    """Yield the worker's lines; kill this process group when the worker is gone."""
    received = bytearray()
    while chunk := os.read(leash_fd, 65536):
        received += chunk
        yield from take_lines(received)
    os.killpg(0, signal.SIGKILL)


class _AttemptRunner:
    """Runs attempts in turn, with an agent that is loaded once."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._agent: LoadedAgent | None = None

    def run(self, claim: Claim) -> AttemptReport:
        # Of the attempt before, or the trainer's own trace. A task may be too long for a variable.
        for name in ("AGENTRL_TASK", *TRACE_CONTEXT):
            os.environ.pop(name, None)
        os.environ.update(attempt_environment(self._config, claim))
        active, rollout = rollout_tracing(), current_rollout()
        assert active is not None
        assert rollout is not None
        active.attempt(rollout).finish_expected = True  # ``finish`` comes before the report
        error: str | None = None
        try:
            agent = self._agent or self._load()
            with tracing(*workflow_attributes(agent.name, claim)):
                _export_traceparent()
                result = agent.run(claim.task)
                record_result(result, rewarded=active.attempt(rollout).rewarded)
        except SystemExit as end:
            if end.code not in (None, 0):
                show_error(end)
                error = f"SystemExit: {end.code}"
        except CommandFailed as failed:
            error = str(failed)  # a traceback of this module would explain nothing
            sys.stderr.write(f"{error}\n")
        except BaseException as raised:
            error = show_error(raised)
        return AttemptReport(error is None, error, incomplete=not finish())

    def _load(self) -> LoadedAgent:
        self._agent = load_traced_agent(self._config)
        return self._agent


def load_traced_agent(config: RunnerConfig) -> LoadedAgent:
    """Load the agent with tracing around it."""
    active = rollout_tracing()  # before the import: calls and threads are watched from then on
    assert active is not None
    agent = load_agent(config.agent)
    # After the import: a provider that the user's module sets is kept, and ours joins it.
    active.install_globally()
    return agent


def workflow_attributes(agent: str, claim: Claim) -> tuple[str, dict[str, Any]]:
    """Return name and attributes of an attempt's root span."""
    return f"invoke_workflow {agent}", {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": agent,
        "agentrl.rollout.id": claim.rollout_id,
        "agentrl.attempt.id": claim.attempt_id,
        "agentrl.task.id": claim.task_id,
    }


def record_result(result: Any, *, rewarded: bool) -> None:
    """Record what the agent returned; a number is its reward, unless it emitted one."""
    if result is not None:
        trace.get_current_span().set_attribute(OUTPUT, repr(result)[:_LONGEST_OUTPUT])
    if not rewarded and isinstance(result, numbers.Real) and not isinstance(result, bool):
        emit_reward(float(result))


def _export_traceparent() -> None:
    """Make the current span, the attempt's root, the parent of the agent's subprocesses' spans."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    if "traceparent" in carrier:
        os.environ["TRACEPARENT"] = carrier["traceparent"]


def show_error(raised: BaseException) -> str:
    """Print the traceback, without the runner's own frames; return its last lines."""
    frames: TracebackType | None = raised.__traceback__
    ours = os.path.dirname(__file__) + os.sep
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(raised), raised, frames))
    sys.stderr.write(text)
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])[-_LONGEST_ERROR:]


def _redirect_output(log: str) -> None:
    redirect_fds(log)
    for stream in (sys.stdout, sys.stderr):  # a killed agent's last words must be in the log
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def redirect_fds(log: str) -> None:
    """Append file descriptors 1 and 2 to a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk, or the agent closed it
            continue


def write_all(fd: int, data: bytes) -> None:
    view: Any = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
