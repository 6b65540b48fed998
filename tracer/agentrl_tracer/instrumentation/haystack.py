"""Turn Haystack's operations into spans that follow the gen_ai.* conventions.

Haystack hands each operation to a tracer that an application may provide; here is one. Those that
exist are part of packages that install Haystack itself, or see pipelines only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as otel
from opentelemetry import trace

from agentrl_tracer.conventions import AGENT_NAME, TOOL_NAME

_AGENT = "haystack.agent.run"
_TOOL = "haystack.agent.step.tool"
_COMPONENT = "haystack.component.run"
_PASSED_OVER = ("haystack.agent.step", "haystack.agent.step.llm")  # the call has a span of its own


def trace_haystack(parent: Callable[[], otel.Context | None]) -> None:
    """Provide Haystack's tracer, unless the application does. Call once per process.

    Args:
        parent: returns the context in which new spans start.
    """
    from haystack import tracing  # pyright: ignore

    class OneSpan(tracing.Span):
        def set_tag(self, key: str, value: Any) -> None:
            if key == "haystack.tool.error" and value:
                trace.get_current_span().set_status(trace.StatusCode.ERROR)

    class OtelTracer(tracing.Tracer):
        @contextmanager
        def trace(
            self, operation_name: str, tags: dict[str, Any] | None = None, parent_span: Any = None
        ) -> Iterator[tracing.Span]:
            if operation_name in _PASSED_OVER:
                yield OneSpan()
                return
            name, attributes = _describe(operation_name, tags or {})
            tracer = trace.get_tracer("agentrl.haystack")
            with tracer.start_as_current_span(name, parent(), attributes=attributes):
                yield OneSpan()

        def current_span(self) -> tracing.Span:
            return OneSpan()

    if not tracing.is_tracing_enabled():
        tracing.enable_tracing(OtelTracer())


def _describe(operation: str, tags: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a span's name and attributes. An agent has no name but its component's."""
    if operation == _TOOL:
        tool = tags.get("haystack.tool.name", "")
        attributes = {"gen_ai.operation.name": "execute_tool", TOOL_NAME: tool}
        return f"execute_tool {tool}", attributes
    if operation == _AGENT:
        return "invoke_agent", {"gen_ai.operation.name": "invoke_agent"}
    name = tags.get("haystack.component.name")
    if operation == _COMPONENT and tags.get("haystack.component.type") == "Agent":
        return f"component {name}", {AGENT_NAME: name}
    return f"component {name}" if name else operation, {}
