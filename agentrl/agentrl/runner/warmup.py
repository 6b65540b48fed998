"""A rehearsal: what nearly every attempt does is done once, before the fork, for all to inherit.

A client's first call costs many times its second: validators are built, patterns compiled, modules
imported late. An attempt is a fresh process, so its first call is often its only one. After a
rehearsal in the pool it starts warm.

Knows the libraries that an agent's calls and our spans go through, and only those already loaded;
never the user's code. It leaves nothing but warm caches: each client talks to a stand-in inside
this process, the environment is not touched, and no descriptor or thread stays.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from importlib import import_module
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from agentrl.runner.preload import StartedThreads
from agentrl_tracer.conventions import EVALUATION_NAME, EVALUATION_VALUE, REWARD_SPAN

logger = logging.getLogger("agentrl.runner")

_NOWHERE = "http://127.0.0.1:9"  # the discard port; no client gets as far as to connect
_PATIENCE_S = 1.0  # for threads to end that a library started and stopped
_CALL: dict[str, Any] = {
    "model": "rehearsal",
    "messages": [{"role": "user", "content": "Are you there?"}],
    "max_tokens": 8,
}
_COMPLETION = {
    "id": "chatcmpl-rehearsal",
    "object": "chat.completion",
    "created": 0,
    "model": "rehearsal",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "Yes."},
            "logprobs": None,
        }
    ],
    "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
}
_CHUNK = {
    **_COMPLETION,
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "finish_reason": None, "delta": {"content": "Yes."}}],
}


def rehearse() -> None:
    """Plays every scene whose library is loaded; one that fails is left to the attempts.

    Raises:
        StartedThreads: a thread is still running; whoever asked should begin again without us.
    """
    threads = threading.active_count()
    started = time.monotonic()
    scenes = (_export_spans, _speak_http, _ask_openai)
    for scene in scenes * 2:  # again, since whatever is imported late empties Python's type caches
        try:
            scene()
        except Exception as error:
            name = scene.__name__.lstrip("_")
            logger.info("rehearsing %s failed: %s: %s", name, type(error).__name__, error)
    logger.debug("rehearsed in %.2f s", time.monotonic() - started)
    deadline = time.monotonic() + _PATIENCE_S
    while threading.active_count() > threads:
        if time.monotonic() > deadline:
            raise StartedThreads(__name__)
        time.sleep(0.01)


def _export_spans() -> None:
    """A root span and a reward, through the exporter that attempts use.

    Not through their batches: those have a thread.
    """
    import requests
    from requests.adapters import BaseAdapter

    class StandIn(BaseAdapter):
        def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
            response = requests.Response()
            response.status_code, response.reason = 200, "OK"
            response.request, response.url = request, request.url or ""
            response._content = b""  # pyright: ignore[reportPrivateUsage]
            return response

        def close(self) -> None: ...

    session = requests.Session()
    session.mount("http://", StandIn())
    exporter = OTLPSpanExporter(
        endpoint=f"{_NOWHERE}/v1/traces",
        headers={"authorization": "Bearer rehearsal"},
        session=session,
    )
    provider = TracerProvider(
        resource=Resource({"service.name": "rehearsal"}), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("agentrl")
    with tracer.start_as_current_span("rehearsal", attributes={"agentrl.task.id": "none"}):
        reward = {EVALUATION_NAME: "reward", EVALUATION_VALUE: 0.0}
        tracer.start_span(REWARD_SPAN, attributes=reward).end()
    provider.shutdown()


def _speak_http() -> None:
    """One exchange below httpx, whose own stand-in would leave the protocol out."""
    body = json.dumps(_COMPLETION).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for name in ("httpcore", "httpcore2"):
        if name in sys.modules:
            core = import_module(name)
            backend = core.MockBackend([head % len(body), body])
            with core.ConnectionPool(network_backend=backend) as pool:
                pool.request("POST", _NOWHERE, content=json.dumps(_CALL).encode())


def _ask_openai() -> None:
    if "openai" not in sys.modules:
        return
    import openai

    openai.OpenAI(api_key="rehearsal", base_url=_NOWHERE).close()  # with its usual transport
    http_client = openai.DefaultHttpxClient(transport=_stand_in(openai))
    with openai.OpenAI(api_key="rehearsal", base_url=_NOWHERE, http_client=http_client) as client:
        client.chat.completions.create(**_CALL)
        for _ in client.chat.completions.create(**_CALL, stream=True):
            pass


def _stand_in(openai: Any) -> Any:
    """A transport that answers as a model would, for the HTTP library that openai is built on."""
    http = import_module(openai.DefaultHttpxClient.__base__.__module__.partition(".")[0])
    stream = f"data: {json.dumps(_CHUNK)}\n\ndata: [DONE]\n\n".encode()

    def answer(request: Any) -> Any:
        if json.loads(request.content).get("stream"):
            return http.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
        return http.Response(200, json=_COMPLETION)

    return http.MockTransport(answer)
