"""Which instrumentation watches which framework, as soon as the agent has imported it.

Knows the names of OpenTelemetry's own GenAI instrumentations, which are optional (the ``tracing``
extra): without one there are simply fewer spans, and calls and rewards are recorded all the same.
CrewAI has none, so ours listens to its events.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from agentrl_tracer.propagation.hooks import on_import

logger = logging.getLogger("agentrl")

_GENAI = "opentelemetry.instrumentation.genai"


def watch_frameworks() -> None:
    """Instruments what is loaded, and the rest when it is."""
    on_import("crewai", _crewai)
    on_import("openai", _instrument(f"{_GENAI}.openai", "OpenAIInstrumentor"))
    on_import("langchain_core", _instrument(f"{_GENAI}.langchain", "LangChainInstrumentor"))
    on_import("agents", _openai_agents)


def openai_is_watched() -> bool:
    """Whether calls through the openai SDK have spans of their own."""
    module = sys.modules.get(f"{_GENAI}.openai")
    return module is not None and module.OpenAIInstrumentor().is_instrumented_by_opentelemetry


def _instrument(module: str, name: str, **options: object) -> Callable[[ModuleType], None]:
    def instrument(_framework: ModuleType) -> None:
        try:
            instrumentor = getattr(importlib.import_module(module), name)()
        except ImportError as error:
            logger.debug("%s is not installed: %s", module, error)
            return
        if not instrumentor.is_instrumented_by_opentelemetry:  # else the application's own is there
            # Its spans go to the global provider: ours, or the application's with us as a guest.
            instrumentor.instrument(skip_dep_check=True, **options)

    return instrument


def _openai_agents(framework: ModuleType) -> None:
    if not hasattr(framework, "add_trace_processor"):
        return  # a module of the user's that has the same name
    # The SDK would send its traces to OpenAI, with the rollout's key: only its own exporter does.
    cast(Any, framework).set_trace_processors([])
    watch = _instrument(
        f"{_GENAI}.openai_agents", "OpenAIAgentsInstrumentor", disable_openai_trace_export=True
    )
    watch(framework)


def _crewai(_framework: ModuleType) -> None:
    from agentrl_tracer.instrumentation.crewai import watch_crewai

    watch_crewai()
