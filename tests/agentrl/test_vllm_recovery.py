"""``VllmSampler`` when its server comes and goes. Real deaths are in ``test_vllm.py``."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentrl import vllm
from agentrl.vllm import VllmSampler
from agentrl_proxy.sampler import RefusedError, SamplingParams

CHOICE = {
    "token_ids": [5],
    "logprobs": {"top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.0}]},
    "finish_reason": "length",
}


class Server(ThreadingHTTPServer):
    """Says about adapters and health what vLLM says. It samples nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        self.loras: dict[str, str] = {}  # path by name
        self.well = True
        self.while_loading: Callable[[], None] = lambda: None
        super().__init__(("127.0.0.1", 0), Handler)

    def start_anew(self) -> None:
        self.loras = {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200 if self.server.well else 503, {})
        elif self.path == "/v1/models":
            names = ["base", *self.server.loras]
            self._answer(200, {"data": [{"id": name, "max_model_len": 64} for name in names]})
        elif self.path == "/openapi.json":
            self._answer(200, {"paths": {"/v1/load_lora_adapter": {}}})
        else:
            self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/load_lora_adapter":
            hook, self.server.while_loading = self.server.while_loading, lambda: None
            hook()
            self.server.loras[body["lora_name"]] = body["lora_path"]
        elif self.path == "/v1/unload_lora_adapter":
            self._answer(200 if self.server.loras.pop(body["lora_name"], None) else 404, {})
            return
        elif body["model"] not in ("base", *self.server.loras):
            self._answer(404, {"error": {"message": "The model does not exist."}})
            return
        self._answer(200, {"choices": [CHOICE]})

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def sampler(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmSampler]:
    monkeypatch.setattr(vllm, "_POLL_S", 0.02)
    monkeypatch.setattr(vllm, "_PATIENCE_S", 0.2)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    sampler = VllmSampler(url, eos_ids=frozenset({2}), context_length=128)
    sampler.start(timeout_s=10)
    yield sampler
    sampler.stop()
    assert server.loras == {}


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_new_server_gets_every_adapter_under_new_names(
    server: Server, sampler: VllmSampler
) -> None:
    sampler.load_now("asker", 3, "/asker/3")
    sampler.load_now("answerer", 4, "/answerer/4")
    before = dict(server.loras)
    server.start_anew()
    eventually(lambda: sampler.stats()["recoveries"] > 0 and sampler.healthy)
    assert sorted(server.loras.values()) == ["/answerer/4", "/asker/3"]
    assert not before.keys() & server.loras.keys()
    assert sampler.adapters == {"asker": 3, "answerer": 4}
    assert sampler.context_length == 64


def test_a_server_without_an_engine_is_unhealthy_until_it_has_one(
    server: Server, sampler: VllmSampler
) -> None:
    sampler.load_now("policy", 0, "/0")
    server.well = False
    eventually(lambda: not sampler.healthy)
    with pytest.raises(RefusedError, match="/health answers 503") as refused:
        asyncio.run(sampler.load_adapter("policy", 1, "/1"))
    assert refused.value.code == "stopped"
    server.start_anew()
    time.sleep(0.1)
    assert not sampler.healthy
    server.well = True
    eventually(lambda: sampler.healthy)
    assert list(server.loras.values()) == ["/0"]

    async def publish() -> None:
        await sampler.load_adapter("policy", 1, "/1")
        await asyncio.gather(*sampler._unloading)

    asyncio.run(publish())
    assert list(server.loras.values()) == ["/1"]
    assert sampler.adapters == {"policy": 1}


def test_a_version_published_during_recovery_wins(server: Server, sampler: VllmSampler) -> None:
    """The watch loads the old version anew; before that is done, the new one is there."""
    sampler.load_now("policy", 1, "/1")
    server.while_loading = lambda: sampler.load_now("policy", 2, "/2")
    server.start_anew()
    eventually(lambda: sampler.stats()["recoveries"] > 0 and sampler.healthy)
    assert sampler.adapters == {"policy": 2}
    assert list(server.loras.values()) == ["/2"]


def test_an_adapter_that_is_gone_is_the_servers_fault(
    server: Server, sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a server's start and our noticing, it knows no adapter: agents must ask again."""
    sampler.load_now("policy", 1, "/1")
    monkeypatch.setattr(vllm, "_POLL_S", 60)
    time.sleep(0.2)
    server.start_anew()

    async def ask() -> None:
        async for _ in sampler.sample([1, 2], SamplingParams(max_tokens=4), "policy"):
            raise AssertionError("a token of nobody")

    with pytest.raises(RefusedError) as refused:
        asyncio.run(ask())
    assert refused.value.code == "stopped"


def test_its_client_ends_with_its_event_loop(sampler: VllmSampler) -> None:
    async def client() -> Any:
        await sampler.load_adapter("policy", 1, "/1")
        return await sampler._async()

    first, second = asyncio.run(client()), asyncio.run(client())
    assert first.is_closed
    assert second.is_closed
    assert first is not second
