"""Official SDKs' clients of a gateway, and requests that many tests send."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
from scripted_sampler import Running

from agentrl_tracer.schemas import Claim

USER: list[Any] = [{"role": "user", "content": "Say you are 7."}]
SCHEMA: Any = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION: Any = {"name": "search", "description": "looks things up", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name":"search",  "arguments": {"q": "köln", "k":3}}\n</tool_call>'


def client(gateway: Running, claim: Claim | None = None, **more: Any) -> openai.OpenAI:
    claim = claim or gateway.claims[0]
    settings: dict[str, Any] = {"base_url": gateway.base_url(claim), "api_key": claim.key}
    return openai.OpenAI(**(settings | {"max_retries": 0, "timeout": 30} | more))


def claude(gateway: Running, claim: Claim | None = None, **more: Any) -> anthropic.Anthropic:
    claim = claim or gateway.claims[0]
    url = gateway.base_url(claim).removesuffix("/v1")  # the SDK adds /v1
    settings = {"api_key": claim.key, "max_retries": 0, "timeout": 60}
    return anthropic.Anthropic(base_url=url, **(settings | more))


def streamed(stream: Any) -> tuple[str, list[Any], str | None, Any]:
    """Text, tool calls, finish reason and usage of a stream's chunks."""
    text, calls, finish, usage = "", list[Any](), None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(calls):
                    calls.append(piece)
                else:
                    calls[piece.index].function.arguments += piece.function.arguments
            finish = choice.finish_reason or finish
    return text, calls, finish, usage
