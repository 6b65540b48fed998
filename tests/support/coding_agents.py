"""Drives a coding agent's command line against a gateway, and records what it sends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.sampler import DecodingParams

PROFILES = Path(__file__).parents[2] / "examples/coding_agents"
Step = tuple[str, dict[str, Any]] | str
"""A tool call, name and arguments, or a text."""


@dataclass
class Wire:
    """The requests that reached the gateway; an ASGI app around its own."""

    app: Any
    state: Any
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        one: dict[str, Any] = {"method": scope["method"], "path": scope["path"], "headers": headers}
        one |= {"query": scope["query_string"].decode(), "body": b"", "status": 0, "said": b""}
        self.requests.append(one)

        async def receiving() -> Any:
            message = await receive()
            one["body"] += message.get("body", b"")
            return message

        async def sending(message: Any) -> None:
            one["status"] = message.get("status", one["status"])
            one["said"] += message.get("body", b"")
            await send(message)

        await self.app(scope, receiving, sending)


@dataclass
class Player:
    """Plays the steps in each conversation that has tools; answers others with a short text."""

    renderer: Renderer
    steps: Sequence[Step]

    def __call__(self, prompt_ids: Sequence[int], params: DecodingParams, choice: int) -> str:
        text = self.renderer.decode_raw(list(prompt_ids))
        turn = text.count("<|im_start|>assistant\nI go on.")
        if "<tools>" not in text:
            return "A short answer."
        step = self.steps[turn] if turn < len(self.steps) else "Done."
        if isinstance(step, str):
            return step
        call = {"name": step[0], "arguments": step[1]}
        return f"I go on.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
