"""Servers that play a provider, and what a call to one leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from gateway_client import ask
from local_server import LocalServer
from scripted_sampler import Running

from agentrl_proxy.dependencies import ProviderModel
from agentrl_tracer.schemas import Call, CallState, SkipReason

SECRET = "sk-provider-secret-0123456789"


def answerer(provider: Running, **more: Any) -> ProviderModel:
    """A gateway as the provider of another's model."""
    settings: dict[str, Any] = {"num_retries": 0, "timeout": 20.0, "api_key": SECRET}
    return ProviderModel("openai/policy", f"{provider.url}/v1", **(settings | more))


def asking(start: Any, upstream: FaultyServer, model: str = "openai/x", **more: Any) -> Running:
    """A gateway whose model ``answerer`` is this server's."""
    settings: dict[str, Any] = {"num_retries": 0, "api_key": SECRET}
    deps = more.pop("deps", {})
    other = ProviderModel(model, upstream.url, **(settings | more))
    return start(provider_models={"answerer": other}, **deps)


def post_to(
    gateway: Running, path: str = "chat/completions", model: str = "answerer", **body: Any
) -> httpx.Response:
    """Ask a provider's model as the first rollout."""
    return ask(gateway, path, model=model, **body)


class FaultyServer(LocalServer):
    """Answers with what it is given, in turn; the last one for good. Bytes are an event stream."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.seen: list[dict[str, Any]] = []
        super().__init__()
        self.url += "/v1"

    def answer(
        self, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        self.seen.append({"body": json.loads(body), "headers": headers, "path": path})
        status, said = self.answers[min(len(self.seen), len(self.answers)) - 1]
        if callable(said):
            said = said(headers)
        stream = isinstance(said, bytes)
        more = {"content-type": "text/event-stream" if stream else "application/json"}
        if status == 429:
            more["retry-after"] = "7"
        return status, said if stream else json.dumps(said).encode(), more


def said(text: str) -> dict[str, Any]:
    """A provider's chat completion."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-provider",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-9",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def streaming(*choices: dict[str, Any], **ending: Any) -> bytes:
    """A provider's stream of chunks with these choices and a last one."""
    heading = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-9"}
    last = {"delta": {}, "finish_reason": "stop", **ending}
    chunks = [{**heading, "choices": [{"index": 0, **one}]} for one in (*choices, last)]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks).encode() + b"data: [DONE]\n\n"


def trouble(message: str, code: str | None = None) -> dict[str, Any]:
    """A provider's error."""
    return {"error": {"message": message, "type": "x", "param": None, "code": code}}


def only_call(gateway: Running) -> Call:
    """The one call of the first rollout: without tokens."""
    [call] = gateway.calls(gateway.claims[0])
    assert (call.prompt_ids, call.response_ids, call.adapter) == ([], [], None)
    assert gateway.store.accounting(gateway.run_id).adds_up
    return call


def recorded(gateway: Running, count: int) -> list[Call]:
    """Every call of the first rollout: whole, without tokens, never trained, nothing lost."""
    calls = gateway.calls(gateway.claims[0])
    assert len(calls) == count
    for call in calls:
        assert call.state is CallState.COMPLETED
        assert call.skip_reason is SkipReason.NOT_TRAINABLE_MODEL
        assert (call.prompt_ids, call.response_ids, call.adapter) == ([], [], None)
    assert gateway.store.accounting(gateway.run_id).adds_up
    return calls


def assert_no_key(gateway: Running, log: str = "", *more: str) -> None:
    """The provider's key is in none of these texts, nor in the store."""
    for text in (log, *more):
        assert SECRET not in text
    for path in Path(gateway.store.url.removeprefix("sqlite:///")).parent.glob("trace.db*"):
        assert SECRET.encode() not in path.read_bytes()
