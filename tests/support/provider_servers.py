"""Servers that play a provider, and what a call to one leaves behind."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from gateway_client import ask
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


class FaultyServer:
    """An HTTP server that answers with what it is given, in turn; the last one for good. Bytes are
    an event stream."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.seen: list[dict[str, Any]] = []
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {k.lower(): v for k, v in self.headers.items()}
                faulty.seen.append(
                    {"body": json.loads(body), "headers": headers, "path": self.path}
                )
                at = min(len(faulty.seen), len(faulty.answers)) - 1
                status, said = faulty.answers[at]
                if callable(said):
                    said = said(self.headers)
                kind = "text/event-stream" if isinstance(said, bytes) else "application/json"
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                if status == 429:
                    self.send_header("retry-after", "7")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


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
