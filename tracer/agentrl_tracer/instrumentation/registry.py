"""Instrument agent frameworks as soon as the agent has imported them.

Uses OpenTelemetry's GenAI instrumentations, which are optional (the ``tracing`` extra). Without
them there are fewer spans; calls and rewards are recorded all the same. For CrewAI, Haystack and
the tools of smolagents there is none, so modules here trace them. docs/frameworks.md has the table.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from opentelemetry.context import Context

from agentrl_tracer.import_hooks import on_import
from agentrl_tracer.instrumentation.caches import keep_caches_apart
from agentrl_tracer.instrumentation.crewai import trace_crewai
from agentrl_tracer.instrumentation.haystack import trace_haystack
from agentrl_tracer.instrumentation.smolagents import trace_tools

logger = logging.getLogger("agentrl")

_GENAI = "opentelemetry.instrumentation.genai"
# A framework's package → the module and the class of its instrumentation.
_INSTRUMENTORS = {
    "openai": ("openai", "OpenAIInstrumentor"),
    "langchain_core": ("langchain", "LangChainInstrumentor"),
    "agno": ("agno", "AgnoInstrumentor"),
    "dspy": ("dspy", "DSPyInstrumentor"),
    "llama_index.core": ("llama_index", "LlamaIndexInstrumentor"),
    "smolagents": ("smolagents", "SmolagentsInstrumentor"),
}


def instrument_frameworks(parent: Callable[[], Context | None]) -> None:
    """Instrument the frameworks that are imported, now or later. Call once per process.

    Args:
        parent: returns the context in which new spans start.
    """
    keep_caches_apart()
    on_import("crewai", lambda _: trace_crewai(parent))
    on_import("haystack", lambda _: trace_haystack(parent))
    on_import("smolagents", lambda _: trace_tools(parent))
    on_import("pydantic_ai", _instrument_pydantic_ai)
    on_import("agents", _instrument_openai_agents)
    for framework, (module, name) in _INSTRUMENTORS.items():
        on_import(framework, lambda _, module=module, name=name: _instrument(module, name))


def _instrument(module: str, name: str, **options: object) -> None:
    try:
        instrumentor = getattr(importlib.import_module(f"{_GENAI}.{module}"), name)()
    except ImportError as error:
        logger.debug("%s.%s is not installed: %s", _GENAI, module, error)
        return
    if not instrumentor.is_instrumented_by_opentelemetry:  # the application may have done it
        instrumentor.instrument(skip_dep_check=True, **options)


def _instrument_pydantic_ai(framework: ModuleType) -> None:
    module = cast(Any, framework)
    # Without the conversation, which each span would repeat: the calls have it.
    module.Agent.instrument_all(module.InstrumentationSettings(include_content=False))


def _instrument_openai_agents(framework: ModuleType) -> None:
    if not hasattr(framework, "add_trace_processor"):
        return  # a user's module of the same name
    # By default the SDK exports its traces to OpenAI, authorized with the rollout's key.
    cast(Any, framework).set_trace_processors([])
    _instrument("openai_agents", "OpenAIAgentsInstrumentor", disable_openai_trace_export=True)
