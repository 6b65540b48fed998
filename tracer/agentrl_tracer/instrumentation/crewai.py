"""Turn CrewAI's events into spans that follow the gen_ai.* conventions.

CrewAI's event handlers run in other threads, too late to set a current span. So the event bus's
public ``emit`` is wrapped, in the context of its caller: an event that begins an operation makes
its span current, and the event that ends the operation restores the span before it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import wrapt
from opentelemetry import context as otel
from opentelemetry import trace

from agentrl_tracer.conventions import AGENT_NAME, RESPONSE_ID

logger = logging.getLogger("agentrl")

_OPERATION = otel.create_key("agentrl-crewai")

# The beginning of an event's name → its kind of operation, and how names end when that ends.
_EVENTS = {
    "flow": ("flow", "finished failed paused"),
    "method_execution": ("method", "finished failed paused"),
    "crew_kickoff": ("crew", "completed failed"),
    "task": ("task", "completed failed"),
    "agent_execution": ("agent", "completed error"),
    "lite_agent_execution": ("agent", "completed error"),
    "llm_call": ("llm", "completed failed"),
    "tool_usage": ("tool", "finished error"),
}
_BEGINS = {f"{event}_started": kind for event, (kind, _) in _EVENTS.items()}
_ENDS = {
    f"{event}_{ending}": kind
    for event, (kind, endings) in _EVENTS.items()
    for ending in endings.split()
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """A running operation and what was current before it."""

    kind: str
    span: trace.Span
    before: otel.Context
    outer: _Operation | None


def trace_crewai(parent: Callable[[], otel.Context | None]) -> None:
    """Trace CrewAI's event bus from now on. Call once per process.

    Args:
        parent: returns the context in which new spans start.
    """
    from crewai.events.event_bus import CrewAIEventsBus

    begin = functools.partial(_begin, parent)

    def follow(kinds: Mapping[str, str], handle: Any, source: Any, event: Any) -> None:
        kind = kinds.get(getattr(event, "type", ""))
        if kind is None:
            return
        module = type(source).__module__
        if kind in ("flow", "method") and module.startswith("crewai."):
            return  # agents are flows internally
        by_openai = kind == "llm" and module.startswith("crewai.llms.providers.openai")
        genai = sys.modules.get("opentelemetry.instrumentation.genai.openai")
        if by_openai and genai and genai.OpenAIInstrumentor().is_instrumented_by_opentelemetry:
            return  # the call has a span
        try:
            handle(kind, source, event)
        except Exception:  # a newer CrewAI may change its events; the agent must go on
            logger.debug("could not trace CrewAI's %s", event.type, exc_info=True)

    def emit(wrapped: Any, _bus: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, event = (*args, *(kwargs[name] for name in ("source", "event") if name in kwargs))
        # Handlers run in copies of this context: they see the span that begins or is still open.
        follow(_BEGINS, begin, source, event)
        try:
            return wrapped(*args, **kwargs)
        finally:
            follow(_ENDS, _end, source, event)

    wrapt.wrap_function_wrapper(CrewAIEventsBus, "emit", emit)


def flush_events() -> None:
    """Wait for the event bus's handlers, which may emit rewards."""
    try:
        from crewai.events import crewai_event_bus

        crewai_event_bus.flush(5.0)
    except Exception:  # another version, or a module of the agent's with this name
        logger.debug("could not wait for CrewAI's events", exc_info=True)


def _begin(parent: Callable[[], otel.Context | None], kind: str, source: Any, event: Any) -> None:
    name, attributes = _describe(kind, source, event)
    tracer = trace.get_tracer("agentrl.crewai")
    span_kind = trace.SpanKind.CLIENT if kind == "llm" else trace.SpanKind.INTERNAL
    span = tracer.start_span(name, parent(), kind=span_kind, attributes=_known(attributes))
    operation = _Operation(kind, span, otel.get_current(), _current())
    otel.attach(otel.set_value(_OPERATION, operation, trace.set_span_in_context(span)))


def _end(kind: str, _source: Any, event: Any) -> None:
    """End the innermost operation of a kind, and the operations left open inside it."""
    ended: list[_Operation] = []
    found = _current()
    while found is not None:
        ended.append(found)
        if found.kind == kind:
            break
        found = found.outer
    if found is None:
        return
    if kind == "llm":
        usage: Mapping[str, Any] = getattr(event, "usage", None) or {}
        finish = getattr(event, "finish_reason", None)
        answer = {
            RESPONSE_ID: getattr(event, "response_id", None),
            "gen_ai.response.finish_reasons": None if finish is None else (finish,),
            "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        }
        found.span.set_attributes(_known(answer))
    error = getattr(event, "error", None)
    if error is not None:
        found.span.set_status(trace.StatusCode.ERROR, str(error)[:500])
        found.span.set_attribute("error.type", type(error).__name__)
    for operation in ended:
        if operation.span.is_recording():
            operation.span.end()
    # Not detached by token: the operation may have begun in a context that this one copies.
    otel.attach(found.before)


def _current() -> _Operation | None:
    found = otel.get_value(_OPERATION)
    return found if isinstance(found, _Operation) else None


def _describe(kind: str, source: Any, event: Any) -> tuple[str, dict[str, Any]]:
    """Return a span's name and attributes.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-agent-spans/
    """
    role = _role(source, event)
    match kind:
        case "method":
            name = event.method_name
            return f"{event.flow_name}.{name}", {"code.function.name": name}
        case "task":
            task = getattr(event, "task_name", None) or getattr(source, "description", "")
            return "task", {"agentrl.crewai.task": str(task)[:500]}
        case "flow" | "crew":
            name = getattr(event, "flow_name", None) or getattr(event, "crew_name", None) or kind
            operation, more = "invoke_workflow", {"gen_ai.workflow.name": name}
        case "agent":
            agent = getattr(event, "agent", None)
            identity = getattr(agent, "id", None) or getattr(source, "id", None)
            operation, name = "invoke_agent", role
            more = {
                AGENT_NAME: role,
                "gen_ai.agent.id": None if identity is None else str(identity),
            }
        case "tool":
            operation, name = "execute_tool", event.tool_name
            more = {"gen_ai.tool.name": name, "gen_ai.tool.type": "function", AGENT_NAME: role}
        case _:
            operation, name = "chat", event.model
            asked = {key: getattr(event, key) for key in ("temperature", "top_p", "max_tokens")}
            more = {f"gen_ai.request.{key}": value for key, value in asked.items()}
            more |= {"gen_ai.request.model": name, AGENT_NAME: role}
    attributes = {"gen_ai.operation.name": operation, **more}
    return f"{operation} {name}" if name else operation, attributes


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _role(source: Any, event: Any) -> str | None:
    info = getattr(event, "agent_info", None)
    candidates = (
        getattr(getattr(event, "agent", None), "role", None),
        getattr(event, "agent_role", None),
        info.get("role") if isinstance(info, dict) else None,
        getattr(source, "role", None),
    )
    return next((" ".join(c.split()) for c in candidates if isinstance(c, str) and c.strip()), None)
