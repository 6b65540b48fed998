"""Spans from CrewAI's events, by the gen_ai.* conventions.

Knows the types of CrewAI's public events and the bus they pass through. Handlers of the bus run in
other threads, too late to be anybody's parent; so the bus's ``emit`` itself is followed, in the
context of whoever emits: an event that begins something makes its span current there, the one that
ends it restores what was current before.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import context as otel
from opentelemetry import trace

from agentrl_tracer.conventions import AGENT_NAME, RESPONSE_ID

logger = logging.getLogger("agentrl")

_WITHIN = otel.create_key("agentrl-crewai")

_BEGINS = {
    "flow_started": "flow",
    "method_execution_started": "method",
    "crew_kickoff_started": "crew",
    "task_started": "task",
    "agent_execution_started": "agent",
    "lite_agent_execution_started": "agent",
    "llm_call_started": "llm",
    "tool_usage_started": "tool",
}
_ENDS = {
    "flow_finished": "flow",
    "flow_failed": "flow",
    "flow_paused": "flow",
    "method_execution_finished": "method",
    "method_execution_failed": "method",
    "method_execution_paused": "method",
    "crew_kickoff_completed": "crew",
    "crew_kickoff_failed": "crew",
    "task_completed": "task",
    "task_failed": "task",
    "agent_execution_completed": "agent",
    "agent_execution_error": "agent",
    "lite_agent_execution_completed": "agent",
    "lite_agent_execution_error": "agent",
    "llm_call_completed": "llm",
    "llm_call_failed": "llm",
    "tool_usage_finished": "tool",
    "tool_usage_error": "tool",
}


@dataclass(frozen=True, slots=True)
class _Running:
    """Something that has begun, and what was current before it."""

    kind: str
    span: trace.Span
    before: otel.Context
    outer: _Running | None


def watch_crewai() -> None:
    """Follows the event bus from now on. Once per process."""
    from crewai.events.event_bus import CrewAIEventsBus

    emit = CrewAIEventsBus.emit
    if getattr(emit, "_agentrl", False):
        return

    @functools.wraps(emit)
    def followed(self: Any, source: Any, event: Any) -> Any:
        # Handlers run in copies of this context: they see a span that began, or one still open.
        _follow(_BEGINS, _begin, source, event)
        try:
            return emit(self, source, event)
        finally:
            _follow(_ENDS, _end, source, event)

    followed._agentrl = True  # pyright: ignore[reportAttributeAccessIssue]
    CrewAIEventsBus.emit = followed


def flush_events() -> None:
    """Waits for the bus's own handlers: they may emit rewards."""
    from crewai.events import crewai_event_bus

    crewai_event_bus.flush(5.0)


def _follow(kinds: Mapping[str, str], follow: Any, source: Any, event: Any) -> None:
    kind = kinds.get(getattr(event, "type", ""))
    if kind is None or _seen_otherwise(kind, source):
        return
    try:
        follow(kind, source, event)
    except Exception:  # a newer CrewAI's events; the agent must not suffer
        logger.debug("could not follow CrewAI's %s", event.type, exc_info=True)


def _seen_otherwise(kind: str, source: Any) -> bool:
    module = type(source).__module__
    if kind in ("flow", "method"):
        return module.startswith("crewai.")  # its agents are flows inside: of no use to a reader
    if kind == "llm" and module.startswith("crewai.llms.providers.openai"):
        from agentrl_tracer.instrumentation.registry import openai_is_watched

        return openai_is_watched()
    return False


def _begin(kind: str, source: Any, event: Any) -> None:
    from agentrl_tracer.provider import rollout_tracing

    active = rollout_tracing()
    if active is None:
        return
    name, attributes = _describe(kind, source, event)
    known = {key: value for key, value in attributes.items() if value is not None}
    before = otel.get_current()
    span = trace.get_tracer("agentrl.crewai").start_span(
        name,
        active.parent(),
        kind=trace.SpanKind.CLIENT if kind == "llm" else trace.SpanKind.INTERNAL,
        attributes=known,
    )
    running = _Running(kind, span, before, _running())
    otel.attach(otel.set_value(_WITHIN, running, trace.set_span_in_context(span)))


def _end(kind: str, _source: Any, event: Any) -> None:
    """Ends the innermost of its kind, and what was left open inside it."""
    found = _running()
    while found is not None and found.kind != kind:
        found = found.outer
    if found is None:
        return
    if kind == "llm":
        _describe_answer(found.span, event)
    error = getattr(event, "error", None)
    if error is not None:
        found.span.set_status(trace.StatusCode.ERROR, str(error)[:500])
        found.span.set_attribute("error.type", type(error).__name__)
    inner = _running()
    while inner is not None:
        if inner.span.is_recording():
            inner.span.end()
        if inner is found:
            break
        inner = inner.outer
    # Not by token: it may have begun in another context, of which this one is a copy.
    otel.attach(found.before)


def _running() -> _Running | None:
    found = otel.get_value(_WITHIN)
    return found if isinstance(found, _Running) else None


def _describe(kind: str, source: Any, event: Any) -> tuple[str, dict[str, Any]]:
    """A span's name and attributes.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-agent-spans/
    """
    role = _role(source, event)
    if kind in ("flow", "crew"):
        name = getattr(event, "flow_name", None) or getattr(event, "crew_name", None) or kind
        return f"invoke_workflow {name}", {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": name,
        }
    if kind == "method":
        return f"{event.flow_name}.{event.method_name}", {"code.function.name": event.method_name}
    if kind == "task":
        task = getattr(event, "task_name", None) or getattr(source, "description", "")
        return "task", {"agentrl.crewai.task": str(task)[:500]}
    if kind == "agent":
        agent = getattr(event, "agent", None)
        identity = getattr(agent, "id", None) or getattr(source, "id", None)
        return f"invoke_agent {role}" if role else "invoke_agent", {
            "gen_ai.operation.name": "invoke_agent",
            AGENT_NAME: role,
            "gen_ai.agent.id": None if identity is None else str(identity),
        }
    if kind == "tool":
        return f"execute_tool {event.tool_name}", {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": event.tool_name,
            "gen_ai.tool.type": "function",
            AGENT_NAME: role,
        }
    return f"chat {event.model}", {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": event.model,
        "gen_ai.request.temperature": event.temperature,
        "gen_ai.request.top_p": event.top_p,
        "gen_ai.request.max_tokens": event.max_tokens,
        AGENT_NAME: role,
    }


def _role(source: Any, event: Any) -> str | None:
    agent = getattr(event, "agent", None)
    info = getattr(event, "agent_info", None)
    candidates = (
        getattr(agent, "role", None),
        getattr(event, "agent_role", None),
        info.get("role") if isinstance(info, dict) else None,
        getattr(source, "role", None),
    )
    return next((" ".join(c.split()) for c in candidates if isinstance(c, str) and c.strip()), None)


def _describe_answer(span: trace.Span, event: Any) -> None:
    usage: Mapping[str, Any] = getattr(event, "usage", None) or {}
    finish = getattr(event, "finish_reason", None)
    attributes = {
        RESPONSE_ID: getattr(event, "response_id", None),
        "gen_ai.response.finish_reasons": None if finish is None else (finish,),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
    }
    span.set_attributes({key: value for key, value in attributes.items() if value is not None})
