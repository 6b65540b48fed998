"""One attempt, in a process of its own: the child's side.

Knows the claim, the agent and the tracer. Ends with a JSON report on a pipe and ``os._exit``: the
interpreter's own tear-down would cost more than an instant agent's whole run.
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
from dataclasses import asdict, dataclass, field
from types import FrameType, TracebackType
from typing import Any, NoReturn

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl.runner.agent import Agent, CommandFailed, load_agent, parse_agent
from agentrl.runner.config import RunnerConfig
from agentrl.runner.environment import attempt_environment
from agentrl.runner.preload import third_party_modules
from agentrl_tracer.context import current_rollout
from agentrl_tracer.conventions import OUTPUT, REWARD_SPAN
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.schemas import Claim, Purpose
from agentrl_tracer.tracing import finish, rollout_tracing, tracing

_TRACEBACK_LINES = 12
_LONGEST_ERROR = 4000
LONGEST_OUTPUT = 4000  # characters of what the agent returned


@dataclass(slots=True)
class Report:
    """What an attempt tells its worker."""

    ok: bool
    error: str | None = None
    reward_emitted: bool = False
    incomplete: bool = False  # some span or reward did not reach the gateway
    third_party_modules: list[str] = field(default_factory=list[str])


class _RewardWatch(SpanProcessor):
    """Sees whether the agent emitted a reward, so that its return value is not one too."""

    def __init__(self) -> None:
        self.emitted = False

    def on_end(self, span: ReadableSpan) -> None:
        self.emitted = self.emitted or span.name == REWARD_SPAN


@dataclass(frozen=True, slots=True)
class Job:
    """An attempt to run, and the file that takes its standard output and error."""

    claim: Claim
    log: str

    def to_line(self) -> bytes:
        return json.dumps({"claim": asdict(self.claim), "log": self.log}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Job:
        fields = json.loads(line)
        claim = fields["claim"] | {"purpose": Purpose(fields["claim"]["purpose"])}
        return cls(Claim(**claim), fields["log"])


def run_attempts(
    config: RunnerConfig, job: Job, report_fd: int, leash_fd: int, known_modules: frozenset[str]
) -> NoReturn:
    """Runs the agent in this (just forked) process and never returns.

    Args:
        job: the first attempt; more come as lines on the leash, where the configuration allows it.
        report_fd: pipe that takes a report, one line, per attempt.
        leash_fd: pipe whose other end only the worker holds: at its end we die, all of us.
        known_modules: what was imported before the fork; only others are reported.
    """
    _run_attempts(config, job, report_fd, leash_fd, known_modules)


def run_foreign(report_fd: int, leash_fd: int) -> NoReturn:
    """``run_attempts`` in an interpreter of its own: the first job comes on standard input."""
    config = RunnerConfig.from_json(sys.stdin.readline())
    for fd in (report_fd, leash_fd):
        os.set_inheritable(fd, False)
    if config.concurrency > 1:
        from agentrl.runner.concurrent import run_shared

        run_shared(config, report_fd, leash_fd)
    job = Job.from_line(sys.stdin.readline().encode())
    # Nobody preloads for us, so nobody need be told what was imported.
    _run_attempts(config, job, report_fd, leash_fd, None)


def _run_attempts(
    config: RunnerConfig,
    job: Job,
    report_fd: int,
    leash_fd: int,
    known_modules: frozenset[str] | None,
) -> NoReturn:
    code = 1
    try:
        os.setsid()  # a process group of our own: one signal reaches every process of the agent
        settle_in()
        jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=_hold_leash, args=(leash_fd, jobs), daemon=True).start()
        host = _Host(config)
        while True:
            _redirect_output(job.log)
            report = host.run(job.claim)
            if known_modules is not None:
                spec = parse_agent(config.agent)
                report.third_party_modules = third_party_modules(spec, known_modules)
                if report.third_party_modules:  # a copy would touch, and so copy, all pages
                    known_modules |= set(report.third_party_modules)
            _flush_output()
            write_all(report_fd, json.dumps(asdict(report)).encode() + b"\n")
            code = 0 if report.ok else 1
            job = jobs.get()  # the worker ends us if there is no more
    except BaseException:
        traceback.print_exc()
        _flush_output()
    finally:
        os._exit(code)


def settle_in() -> None:
    gc.freeze()  # what the worker left behind is not ours to collect
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    ours = logging.getLogger("agentrl.runner")
    ours.handlers.clear()  # the pool's; the agent configures logging as it likes
    ours.propagate = True
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # preloaded: else every attempt would draw the same numbers
        numpy_random.seed()


def _redirect_output(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):  # a killed agent's last words must be in the log
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit("terminated: its time was up, or its runner was stopped")


def _hold_leash(leash_fd: int, jobs: queue.SimpleQueue[Job]) -> None:
    """Takes further jobs; when the worker is gone, however it went, we go too."""
    partial = b""
    while chunk := os.read(leash_fd, 65536):
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            jobs.put(Job.from_line(line))
    os.killpg(0, signal.SIGKILL)


class _Host:
    """Runs attempts, one after another, with an agent that is loaded once."""

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._agent: Agent | None = None
        self._watch = _RewardWatch()

    def run(self, claim: Claim) -> Report:
        os.environ.pop("AGENTRL_TASK", None)  # one that is too long is not there at all
        os.environ.update(attempt_environment(self._config, claim))
        for stale in ("TRACEPARENT", "TRACESTATE"):  # the trainer's own trace is not the agent's
            os.environ.pop(stale, None)
        sys.argv = [self._config.agent]
        self._watch.emitted = False
        active, rollout = rollout_tracing(), current_rollout()
        assert active is not None
        assert rollout is not None
        active.expect_finish(rollout)  # ``finish`` comes before the report
        error: str | None = None
        try:
            self._execute(claim, self._agent or self._load())
        except SystemExit as end:
            if end.code not in (None, 0):
                show_error(end)
                error = f"SystemExit: {end.code}"
        except CommandFailed as failed:
            error = str(failed)  # our own traceback would explain nothing
            sys.stderr.write(f"{error}\n")
        except BaseException as raised:
            error = show_error(raised)
        delivered = finish()
        return Report(error is None, error, self._watch.emitted, not delivered)

    def _load(self) -> Agent:
        active = rollout_tracing()  # before the import: calls and threads are watched from then on
        assert active is not None
        active.provider.add_span_processor(self._watch)
        self._agent = load_agent(self._config.agent, self._config.python_path)
        # After the import: a provider that the user's module sets is kept, and ours joins it.
        active.install_globally()
        return self._agent

    def _execute(self, claim: Claim, agent: Agent) -> None:
        with tracing(*workflow_attributes(agent.name, claim)):
            _export_traceparent()
            result = agent.run(claim.task)
            if result is not None:
                trace.get_current_span().set_attribute(OUTPUT, repr(result)[:LONGEST_OUTPUT])
            if isinstance(result, bool) or self._watch.emitted:
                return
            if isinstance(result, numbers.Real):
                emit_reward(float(result))


def workflow_attributes(agent: str, claim: Claim) -> tuple[str, dict[str, Any]]:
    """Name and attributes of an attempt's root span."""
    return f"invoke_workflow {agent}", {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": agent,
        "agentrl.rollout.id": claim.rollout_id,
        "agentrl.attempt.id": claim.attempt_id,
        "agentrl.task.id": claim.task_id,
    }


def _export_traceparent() -> None:
    """For the agent's subprocesses: their spans and calls hang under this attempt's root span."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)  # the current span, which is the root
    if "traceparent" in carrier:
        os.environ["TRACEPARENT"] = carrier["traceparent"]


def show_error(raised: BaseException) -> str:
    """Prints the traceback, without our own frames, to the log; returns its last lines."""
    frames: TracebackType | None = raised.__traceback__
    ours = os.path.dirname(__file__) + os.sep
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(raised), raised, frames))
    sys.stderr.write(text)
    return "\n".join(text.rstrip().splitlines()[-_TRACEBACK_LINES:])[-_LONGEST_ERROR:]


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
