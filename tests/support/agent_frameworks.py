"""The agent frameworks that ``make frameworks`` installs, and what is known of their agents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """What a framework needs installed, and what is seen of the agent of that name.

    Each call of an attempt after the first continues the tokens of the one before.
    """

    requirements: str
    tracing: bool = True  # install the extra ``tracing`` beside it
    agent: str | None = "calculator"  # name of each call's agent
    tool: str | None = "execute_tool add"  # span of the tool
    turns: int = 1  # of the user
    stateful: bool = False  # sends ``previous_response_id`` instead of the conversation
    branched: str | None = None  # why calls after the first continue none, if they do not


FRAMEWORKS = {
    "agent_framework": Framework(
        "agent-framework-core>=1 agent-framework-openai>=1", turns=2, stateful=True
    ),
    "agno": Framework("agno>=3 openai"),
    "autogen": Framework("autogen-agentchat>=0.7 autogen-ext[openai]"),
    "crewai": Framework("crewai>=1.15.30,<2"),
    # An answer that it cannot parse is asked for once more, from the beginning.
    "dspy": Framework("dspy>=3.4", agent=None, tool=None, branched="new_conversation"),
    "google_adk": Framework("google-adk>=2 litellm mcp"),
    "haystack": Framework("haystack-ai>=3", agent=None),
    "langgraph": Framework("langchain>=1.2 langchain-openai>=1", turns=2),
    "llama_index": Framework("llama-index-core>=0.14 llama-index-llms-openai-like"),
    "openai": Framework("openai>=3,<4", agent=None, tool=None, turns=2),
    "openai_agents": Framework("openai-agents>=0.24", turns=2),
    "pydantic_ai": Framework("pydantic-ai-slim[openai]>=2"),
    "semantic_kernel": Framework("semantic-kernel>=1.45", tool="execute_tool Sums-add", turns=2),
    "smolagents": Framework("smolagents[openai]>=1.26"),
    # It pins an OpenTelemetry that is older than what the extra needs.
    "strands": Framework("strands-agents[openai]>=1.60", tracing=False),
}
VERCEL = Framework("ai@6 @ai-sdk/openai@3 zod@4", tracing=False, agent=None, tool=None, turns=2)
