"""Trace the tools of smolagents, which its OpenTelemetry instrumentation leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt
from opentelemetry import context as otel
from opentelemetry import trace

from agentrl_tracer.conventions import TOOL_NAME


def trace_tools(parent: Callable[[], otel.Context | None]) -> None:
    """Trace each call of a tool from now on. Call once per process.

    Args:
        parent: returns the context in which new spans start.
    """

    def call(wrapped: Any, tool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer = trace.get_tracer("agentrl.smolagents")
        attributes = {"gen_ai.operation.name": "execute_tool", TOOL_NAME: tool.name}
        with tracer.start_as_current_span(
            f"execute_tool {tool.name}", parent(), attributes=attributes
        ):
            return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper("smolagents", "Tool.__call__", call)
