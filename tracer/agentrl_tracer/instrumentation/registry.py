"""Instrument agent frameworks as soon as the agent has imported them.

Uses OpenTelemetry's GenAI instrumentations, which are optional (the ``tracing`` extra). Without
them there are fewer spans; calls and rewards are recorded all the same. CrewAI has no such
instrumentation, so ``crewai`` here follows its events.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from opentelemetry.context import Context

from agentrl_tracer.import_hooks import on_import
from agentrl_tracer.instrumentation.crewai import trace_crewai

logger = logging.getLogger("agentrl")

_GENAI = "opentelemetry.instrumentation.genai"


def instrument_frameworks(parent: Callable[[], Context | None]) -> None:
    """Instrument the frameworks that are imported, now or later. Call once per process.

    Args:
        parent: returns the context in which new spans start.
    """
    on_import("crewai", lambda _: trace_crewai(parent))
    on_import("openai", lambda _: _instrument("openai", "OpenAIInstrumentor"))
    on_import("langchain_core", lambda _: _instrument("langchain", "LangChainInstrumentor"))
    on_import("agents", _instrument_openai_agents)


def _instrument(module: str, name: str, **options: object) -> None:
    try:
        instrumentor = getattr(importlib.import_module(f"{_GENAI}.{module}"), name)()
    except ImportError as error:
        logger.debug("%s.%s is not installed: %s", _GENAI, module, error)
        return
    if not instrumentor.is_instrumented_by_opentelemetry:  # the application may have done it
        instrumentor.instrument(skip_dep_check=True, **options)


def _instrument_openai_agents(framework: ModuleType) -> None:
    if not hasattr(framework, "add_trace_processor"):
        return  # a user's module of the same name
    # By default the SDK exports its traces to OpenAI, authorized with the rollout's key.
    cast(Any, framework).set_trace_processors([])
    _instrument("openai_agents", "OpenAIAgentsInstrumentor", disable_openai_trace_export=True)
