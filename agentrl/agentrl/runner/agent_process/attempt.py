"""Run one attempt in this process, and load the agent for it."""

from __future__ import annotations

import numbers
import os
import sys
import traceback
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentrl.runner.agent_process.environment import attempt_environment
from agentrl.runner.agent_process.loading import CommandFailed, LoadedAgent, load_agent
from agentrl.runner.protocol import AttemptEnding, RunnerConfig
from agentrl_tracer.context import current_rollout
from agentrl_tracer.conventions import OUTPUT
from agentrl_tracer.emit import emit_reward
from agentrl_tracer.schemas import Claim
from agentrl_tracer.tracing import finish, rollout_tracing, tracing

TRACE_CONTEXT = ("TRACEPARENT", "TRACESTATE")
_TRACEBACK_LINES = 12
_LONGEST = 4000  # characters of an error, and of what the agent returned


def run_attempt(config: RunnerConfig, claim: Claim) -> AttemptEnding:
    """Run one attempt in this process."""
    # Of the attempt before. A task may be too long for a variable.
    for name in ("AGENTRL_TASK", *TRACE_CONTEXT):
        os.environ.pop(name, None)
    os.environ.update(attempt_environment(config, claim))
    active, rollout = rollout_tracing(), current_rollout()
    assert active is not None
    assert rollout is not None
    active.attempt(rollout).finish_expected = True  # ``finish`` comes before the report
    error: str | None = None
    try:
        agent = load_traced_agent(config)
        with workflow_span(agent, claim):
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier)
            if "traceparent" in carrier:  # the parent of the agent's subprocesses' spans
                os.environ["TRACEPARENT"] = carrier["traceparent"]
            result = agent.run(claim.task)
            record_result(result, rewarded=active.attempt(rollout).rewarded)
    except CommandFailed as failed:
        error = str(failed)  # a traceback of this module would explain nothing
        sys.stderr.write(f"{error}\n")
    except BaseException as raised:
        error = show_error(raised)
    return AttemptEnding.of(error, complete=finish())


@cache  # loaded once for all attempts of a process
def load_traced_agent(config: RunnerConfig) -> LoadedAgent:
    """Load the agent with tracing around it."""
    active = rollout_tracing()  # before the import: calls and threads are watched from then on
    assert active is not None
    agent = load_agent(config.agent)
    # After the import: a provider that the user's module sets is kept, and ours joins it.
    active.install_globally()
    return agent


def workflow_span(agent: LoadedAgent, claim: Claim) -> AbstractContextManager[object]:
    """Return the context of an attempt's root span."""
    attributes = {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.workflow.name": agent.name,
        "agentrl.rollout.id": claim.rollout_id,
        "agentrl.attempt.id": claim.attempt_id,
        "agentrl.task.id": claim.task_id,
    }
    return tracing(f"invoke_workflow {agent.name}", attributes)


def record_result(result: Any, *, rewarded: bool) -> None:
    """Record what the agent returned; a number is its reward, unless it emitted one."""
    if result is not None:
        trace.get_current_span().set_attribute(OUTPUT, repr(result)[:_LONGEST])
    if not rewarded and isinstance(result, numbers.Real) and not isinstance(result, bool):
        emit_reward(float(result))


def show_error(raised: BaseException) -> str | None:
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
