"""The gateway on a real port: slow and vanishing clients, and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_client import connected, head, wait_until
from running_gateway import LIMITS
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.protocols.chat_objects import ChatDialect
from agentrl_proxy.sampler import DecodingParams, FinishEvent, TokenEvent
from agentrl_proxy.server.sse import WorkResponse
from agentrl_tracer.schemas import CallState, SkipReason
from agentrl_tracer.store import Store

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
UNREAD = BODY | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 1_000_000}


def request_bytes(
    body: Any, path: str = CHAT, key: str = OPERATOR_KEY, length: int | None = None
) -> bytes:
    content = json.dumps(body).encode()
    return head(path, key, content_length=length or len(content)) + content


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes the connection, or resets it."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


def test_head_and_body_of_an_answer_leave_in_one_write(gateway: Running) -> None:
    with connected(gateway) as sock:
        for _ in range(2):
            sock.sendall(request_bytes(BODY))
            head, _, body = sock.recv(100_000).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert json.loads(body)["choices"]


def test_a_request_that_trickles_in_is_refused_and_its_connection_closed(start: Any) -> None:
    gateway: Running = start(limits=replace(LIMITS, receive_s=0.3))
    with connected(gateway) as sock:
        sock.sendall(request_bytes(BODY, length=1000))
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert (gateway.stats["accepted"], gateway.stats["in_flight"]) == (0, 0)


class Endless:
    """A sampler that samples as many tokens as requested, as fast as they are taken."""

    def __init__(self, word: int) -> None:
        self.word = word
        self.taken = 0
        self.adapters = {"policy": 1}
        self.healthy = True

    async def sample(self, prompt_ids: Any, params: DecodingParams, adapter: str | None) -> Any:
        top = [(self.word, -1.0)] * params.top_logprobs
        for _ in range(params.max_tokens):
            self.taken += 1
            yield TokenEvent(0, self.word, -1.0, top, 1)
            await asyncio.sleep(0)
        yield FinishEvent(0, "length")

    async def load_adapter(self, name: str, version: int, path: str) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def endless(start: Any) -> Running:
    gateway: Running = start(limits=replace(LIMITS, stall_s=0.6), context_length=10_000_000)
    gateway.deps.sampler = Endless(gateway.renderer.encode(" there")[0])  # type: ignore[assignment]
    return gateway


def test_clients_that_stop_reading_are_disconnected_and_leave_nothing(endless: Running) -> None:
    gateway, sampler = endless, endless.deps.sampler
    claim, count = gateway.claims[0], 5
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(connected(gateway, receive_buffer=4096))
            sock.sendall(request_bytes(UNREAD, f"/rollouts/{claim.rollout_id}{CHAT}", claim.key))
        wait_until(lambda: gateway.stats["accepted"] == count)
        wait_until(lambda: gateway.stats["cancelled"] == count)
        wait_until(lambda: gateway.stats["in_flight"] == 0)
        taken = sampler.taken  # type: ignore[attr-defined]
        assert taken < count * 20_000  # sampling waited for its clients
    calls = gateway.calls(claim)
    assert len(calls) == count
    assert {(call.state, call.skip_reason) for call in calls} == {
        (CallState.CANCELLED, SkipReason.CLIENT_DISCONNECTED)
    }
    assert abs(sum(len(call.response_ids) for call in calls) - taken) <= count
    wait_until(lambda: gc.collect() >= 0 and not any(
        type(one) is WorkResponse for one in gc.get_objects()
    ))  # fmt: skip
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_an_answer_that_is_not_read_is_dropped(endless: Running) -> None:
    body = UNREAD | {"stream": False, "max_tokens": 3000}
    claim = endless.claims[0]
    with connected(endless, receive_buffer=4096) as sock:
        sock.sendall(request_bytes(body, f"/rollouts/{claim.rollout_id}{CHAT}", claim.key))
        wait_until(lambda: endless.stats["completed"] == 1)
        time.sleep(1.2)
        received = len(read_all(sock))
    assert 0 < received < 3000 * 1000
    wait_until(lambda: endless.calls(claim)[0].state is CallState.CANCELLED)


@pytest.mark.parametrize("reads", [True, False])
def test_an_answer_is_delivered_to_a_client_that_has_not_closed_before(
    gateway: Running, reads: bool
) -> None:
    """One that closes the connection with the last byte got it; one that closed before did not."""
    claim, count = gateway.claims[0], 30
    gateway.sampler.delay = 0.0 if reads else 0.1  # a token
    for number in range(count):
        body = BODY | {"stream": reads and number % 2 == 0, "max_tokens": 1}
        with connected(gateway) as sock:
            sock.sendall(request_bytes(body, f"/rollouts/{claim.rollout_id}{CHAT}", claim.key))
            if reads:
                last = b"data: [DONE]" if body["stream"] else b"}"
                while not (sock.recv(100_000)).rstrip().rstrip(b"0\r\n").endswith(last):
                    pass
    time.sleep(0.2)
    wait_until(lambda: not gateway.stats["in_flight"])
    states = [call.state for call in gateway.calls(claim)]
    assert set(states) == {CallState.COMPLETED if reads else CallState.CANCELLED}
    assert len(states) == count or not reads  # some were not even accepted


@pytest.mark.skipif(sys.platform != "linux", reason="others hear of it a turn later")
def test_an_answer_whose_client_leaves_just_before_it_is_sent_does_not_train(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look for a disconnect: only the connection itself can tell."""
    claim, made, left = gateway.claims[0], threading.Event(), threading.Event()
    whole = ChatDialect.whole

    def wait(dialect: ChatDialect, response: Any) -> Any:
        made.set()
        assert left.wait(20)
        return whole(dialect, response)

    monkeypatch.setattr(ChatDialect, "whole", wait)
    with connected(gateway) as sock:
        sock.sendall(request_bytes(BODY, f"/rollouts/{claim.rollout_id}{CHAT}", claim.key))
        assert made.wait(20)
    left.set()
    wait_until(lambda: gateway.stats["undelivered"] == 1)
    wait_until(lambda: gateway.calls(claim)[0].state is CallState.CANCELLED)


SERVER = """
import sys
from dataclasses import replace
from running_gateway import LIMITS, WEIGHTS, gateway_dependencies
from scripted_sampler import ScriptedSampler
from transformers import AutoTokenizer
from agentrl_proxy.app import create_app
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.listening import bind, url_of
from agentrl_proxy.server.uvicorn import serve_on
from agentrl_tracer.store import Store
from agentrl_tracer.store.writer import TraceWriter

renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
store = Store(sys.argv[1])
store.register_gateway("boot", None, 1)
writer = TraceWriter(store, "boot")
sampler = ScriptedSampler(renderer)
sampler.delay = 0.15
limits = replace(LIMITS, grace_s=1)
deps = gateway_dependencies(
    sampler, renderer, store, writer, default_adapter="policy", limits=limits
)
try:
    with bind("127.0.0.1", 0, operator_key=None) as bound:
        print(url_of(bound), flush=True)
        serve_on(create_app(deps), bound)
finally:
    writer.close()
    store.close()
    print("closed", flush=True)
"""


def test_on_sigterm_short_answers_finish_and_long_ones_are_cut_and_recorded(
    tmp_path: Path,
) -> None:
    db, support = str(tmp_path / "trace.db"), str(Path(__file__).parents[2] / "support")
    with (
        subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {support!r})\n{SERVER}", db],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
        ThreadPoolExecutor() as threads,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as api:
            messages: Any = BODY["messages"]
            streams = [
                api.chat.completions.create(
                    model="policy", messages=messages, stream=True, max_tokens=count
                )
                for count in (4, 100)
            ]
            chunks = [iter(stream) for stream in streams]
            body = BODY | {"model": "policy", "max_tokens": 100}
            whole = threads.submit(httpx.post, f"{url}{CHAT}", json=body, timeout=30)
            for one in chunks:
                next(one)
            time.sleep(0.1)  # the whole answer has begun, too
            server.send_signal(signal.SIGTERM)
            reasons = []
            for one in chunks:
                try:
                    reasons.append([chunk.choices[0].finish_reason for chunk in one][-1])
                except (httpx.HTTPError, openai.APIError):
                    reasons.append(None)
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{url}/healthz", timeout=2)
        said, problems = server.communicate(timeout=20)
        assert "closed" in said
        assert "Traceback" not in problems
        assert (whole.result().status_code, "is stopping" in whole.result().text) == (503, True)
        assert server.wait(20) == 128 + signal.SIGTERM
    assert reasons == ["length", None]
    store = Store(db)
    states = {call.finish_reason: (call.state, bool(call.response_ids)) for call in store.calls()}
    store.close()
    assert states == {"length": (CallState.COMPLETED, True), None: (CallState.CANCELLED, True)}


def test_refused_requests_do_not_fill_the_log(
    gateway: Running, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"authorization": f"Bearer {OPERATOR_KEY}"}
    with httpx.Client(base_url=gateway.url, headers=own) as http:
        for _ in range(300):
            assert http.get("/v1/models", headers={"host": "evil.com"}).status_code == 403
            assert http.get("/rollouts/another/v1/models").status_code == 403
            with connected(gateway) as sock:
                sock.sendall(b"nonsense\r\n\r\n")
                assert sock.recv(100).startswith(b"HTTP/1.1 400 ")
    said = Counter(record.msg for record in caplog.records)
    assert said["refused a request: %s"] == 256
    assert len(said) <= 2
    assert max(said.values()) <= 256


def test_clients_that_connect_together_are_let_in_together(gateway: Running) -> None:
    """libuv accepts one in a turn of the event loop, which takes long in a busy gateway."""
    loops, sample, turns = [], gateway.sampler.sample, Counter[str]()

    def noting(*args: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        return sample(*args)

    def turn() -> None:
        turns["busy"] += 1
        time.sleep(0.01)
        if turns["answered"] < 60:
            loops[0].call_soon(turn)

    gateway.sampler.sample = noting
    with contextlib.ExitStack() as clients:
        first = clients.enter_context(connected(gateway))
        first.sendall(request_bytes(BODY))
        assert first.recv(100_000).startswith(b"HTTP/1.1 200 ")
        loops[0].call_soon_threadsafe(turn)
        others = [clients.enter_context(connected(gateway)) for _ in range(60)]
        for other in others:
            other.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        for other in others:
            assert other.recv(100_000).startswith(b"HTTP/1.1 200 ")
            turns["answered"] += 1
    assert turns["busy"] < 30
