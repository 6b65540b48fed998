"""Replies, messages and checks of conversations that continue token for token."""

from __future__ import annotations

import json
from typing import Any

from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Call

# Spaces as no template would write them: decoded, parsed and rendered again they would be others.
ODD_CALL = '<tool_call>\n{"arguments":  {"q":"köln",   "n": 1.50}, "name":"search"}\n</tool_call>'


def one_by_one(renderer: Renderer, text: str) -> list[int]:
    """Ids that no tokenizer would choose: every character by itself."""
    ids = [i for char in text for i in renderer.encode(char)]
    assert renderer.decode(ids) == text
    return [*ids, renderer.tokenizer.eos_token_id]


def extends(later: Call, earlier: Call) -> bool:
    known = earlier.prompt_ids + earlier.response_ids
    return later.prompt_ids[: len(known)] == known


def echo(message: Any) -> dict[str, Any]:
    """An answer as frameworks send it back: through pydantic, JSON and their own habits."""
    back = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        back["tool_calls"] = [
            {
                "id": f"theirs-{i}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(json.loads(call.function.arguments), indent=1),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return back
