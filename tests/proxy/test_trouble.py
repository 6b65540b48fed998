"""Clients that are slow, huge, rude or gone, a sampler that refuses or dies, and the way out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import select
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_sampler import OPERATOR_KEY, Running
from test_access import BODY, error_of, post
from test_chat import USER, client

from agentrl_proxy.sampler import DecodingParams, FinishEvent, RefusedError, TokenEvent
from agentrl_proxy.server.connection import Limits
from agentrl_proxy.server.sse import _SseSender
from agentrl_tracer.schemas import CallState, SkipReason
from agentrl_tracer.store import Store

CHAT = "/v1/chat/completions"
HERE = Path(__file__).parent


def wait_until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def connected(gateway: Running, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(20)
        sock.connect((host, int(port)))
        yield sock


def head(path: str = CHAT, key: str = OPERATOR_KEY, **headers: Any) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes; a reset is one way of closing."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


def send_all(sock: socket.socket, data: bytes) -> bool:
    """Whether the server took it all."""
    try:
        sock.sendall(data)
    except ConnectionError:
        return False
    return True


@contextlib.contextmanager
def little_is_allocated(*, kept: int, at_once: int) -> Iterator[None]:
    """What the block allocates in Python objects, in bytes: at its peak, and for good. (The memory
    of the whole process is what every other test before has left of it.)"""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < at_once
        wait_until(lambda: gc.collect() >= 0 and tracemalloc.get_traced_memory()[0] < kept)
    finally:
        tracemalloc.stop()


# --- heads and bodies


@pytest.mark.parametrize("shape", ["one header", "many headers", "the path", "never ending"])
def test_a_huge_head_is_refused(gateway: Running, shape: str) -> None:
    size = 1_000_000
    if shape == "one header":
        data = head(x_big="a" * size, content_length=0)
    elif shape == "many headers":
        data = head(**{f"x_{i}": "a" * 90 for i in range(size // 100)})
    elif shape == "the path":
        data = head("/" + "a" * size)
    else:
        data = head(x_big="a" * size)[:-4]
    with little_is_allocated(kept=500_000, at_once=2_000_000):  # of 20 MB that are sent
        for _ in range(20):
            with connected(gateway) as sock:
                send_all(sock, data)
                answer = read_all(sock)
                # Bytes still under way may turn the close into a reset, which eats the answer.
                assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert post(gateway.url + CHAT, OPERATOR_KEY).status_code == 200


def test_the_head_limit_has_an_error_of_the_usual_shape(start: Any) -> None:
    gateway: Running = start(limits=Limits(head_bytes=2000))
    response = post(gateway.url + CHAT, OPERATOR_KEY, headers={"x-big": "a" * 2000})
    assert response.status_code == 431
    assert error_of(response)["code"] == "headers_too_large"
    with httpx.Client(headers={"authorization": f"Bearer {OPERATOR_KEY}"}) as api:
        for _ in range(3):  # a connection may carry many heads and bodies beyond the limit
            long = [{"role": "user", "content": "a b " * 1500}]
            body = BODY | {"messages": long, "max_tokens": 1}
            answer = api.post(gateway.url + CHAT, json=body, headers={"x-big": "a" * 1500})
            assert answer.status_code in (200, 400)
            assert "headers" not in answer.text


def test_what_is_no_http_gets_the_usual_shape(gateway: Running) -> None:
    with connected(gateway) as sock:
        sock.sendall(b"GET nonsense\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/chat/completions HT",
        head()[:-2],
        head(content_length=100) + b'{"mod',
        head(transfer_encoding="chunked") + b'5\r\n{"mod\r\n',
    ],
)
def test_a_request_must_arrive_in_time(start: Any, sent: bytes) -> None:
    gateway: Running = start(limits=Limits(receive_s=0.5))
    started = time.monotonic()
    with connected(gateway) as sock:
        sock.sendall(sent)
        sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            sock.recv(10)
            pytest.fail("too early")
        sock.settimeout(20)
        answer = read_all(sock)
    assert 0.4 < time.monotonic() - started < 5
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert gateway.stats["accepted"] == 0
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_a_slow_answer_is_no_slow_request(start: Any) -> None:
    gateway: Running = start(limits=Limits(receive_s=0.3, stall_s=0.3))
    gateway.sampler.delay = 0.05  # the answer takes over a second
    with client(gateway) as api:
        for stream in (False, True):
            made: Any = api.chat.completions.create(model="policy", messages=USER, stream=stream)
            if stream:
                assert [*made][-1].choices[0].finish_reason == "stop"
    assert gateway.stats["completed"] == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_trickling_body_is_not_waited_for(start: Any, chunked: bool) -> None:
    """A byte now and then keeps no connection: the whole request has to be here in time."""
    gateway: Running = start(limits=Limits(receive_s=0.8))
    how = {"transfer_encoding": "chunked"} if chunked else {"content_length": 1000}
    with connected(gateway) as sock:
        sock.sendall(head(**how))
        began = time.monotonic()
        sock.settimeout(0.1)
        answer = b""
        while not answer and time.monotonic() - began < 10:
            if not send_all(sock, b"1\r\n \r\n" if chunked else b" "):
                break
            with contextlib.suppress(TimeoutError, ConnectionError):
                answer = sock.recv(65536)
        took = time.monotonic() - began
    assert 0.7 < took < 6
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")
    assert (gateway.stats["accepted"], gateway.stats["in_flight"]) == (0, 0)


def test_an_endless_body_is_cut_off(start: Any) -> None:
    """Without a declared length, too: read to the limit, refused, and none of it kept."""
    gateway: Running = start(max_body_bytes=200_000)
    assert post(gateway.url + CHAT, OPERATOR_KEY).status_code == 200
    piece = b"%x\r\n%b\r\n" % (65536, b" " * 65536)
    with little_is_allocated(kept=500_000, at_once=2_000_000):  # of 10 bodies of up to 65 MB
        for _ in range(10):
            with connected(gateway) as sock:
                sock.sendall(head(transfer_encoding="chunked"))
                sent = 0
                while sent < 1000 and send_all(sock, piece):
                    sent += 1
                    sock.settimeout(0.001)
                    with contextlib.suppress(TimeoutError, ConnectionError):
                        if sock.recv(12):
                            break
                    sock.settimeout(20)
            assert sent < 1000
    assert gateway.stats["accepted"] == 1


def test_stuck_bodies_have_one_bound_together(start: Any) -> None:
    """Of what is beyond the bound nothing is kept, and small requests pass all the while."""
    size, bound = 1_000_000, 3_000_000
    gateway: Running = start(limits=Limits(receive_bytes=bound))
    url = gateway.url + CHAT

    def ask(more: int) -> httpx.Response:
        body = BODY | {"metadata": {"x": "a" * more}}
        return httpx.post(url, json=body, headers={"authorization": f"Bearer {OPERATOR_KEY}"})

    assert ask(size).status_code == 200
    for how in ({"content_length": 2 * size}, {"transfer_encoding": "chunked"}):
        data = head(**how) + (b"" if "content_length" in how else b"%x\r\n" % (2 * size))
        before = gateway.stats["overloaded"]
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(connected(gateway)) for _ in range(20)]
            data += b" " * size
            with little_is_allocated(kept=5_000_000, at_once=8_000_000):
                for sock in socks:
                    send_all(sock, data)
                wait_until(lambda: gateway.stats["overloaded"] == before + 17)  # noqa: B023
            answered = select.select(socks, [], [], 5)[0]
            assert len(answered) == 17
            for sock in answered:
                answer = read_all(sock)  # and then it is closed
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"\r\nretry-after: " in answer
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
            assert ask(0).status_code == 200
            assert ask(size).status_code == 429
            with client(gateway) as api, pytest.raises(openai.RateLimitError):
                api.chat.completions.create(
                    model="policy", messages=USER, metadata={"x": "a" * size}
                )
            stack.close()  # the three leave
            wait_until(lambda: ask(2 * size).status_code == 200)
    assert gateway.stats["in_flight"] == 0


def test_no_body_is_counted_for_good(start: Any) -> None:
    """The bound is whole again after each fate of a body: answered, refused, cut off, pipelined."""
    gateway: Running = start(
        limits=Limits(receive_bytes=1_000_000, receive_s=1.5), max_body_bytes=600_000
    )
    large = json.dumps(BODY | {"metadata": {"x": "a" * 500_000}}).encode()
    whole = head(content_length=len(large)) + large
    with httpx.Client(headers={"authorization": f"Bearer {OPERATOR_KEY}"}) as api:
        for _ in range(4):
            assert api.post(gateway.url + CHAT, content=large).status_code == 200
            assert api.post(gateway.url + "/nowhere", content=large).status_code == 404
            assert api.post(gateway.url + CHAT, content=large, headers={"authorization": "x"}
                            ).status_code == 401  # fmt: skip
            assert api.post(gateway.url + CHAT, content=large * 3).status_code == 413
            with connected(gateway) as sock:  # cut off by its client
                sock.sendall(whole[:-9])
            with connected(gateway) as sock:  # cut off by us
                sock.sendall(whole[:-9])
                assert read_all(sock).startswith(b"HTTP/1.1 408 ")
            with connected(gateway) as sock:
                sock.sendall(whole + whole)
                answers = b""
                while answers.count(b"HTTP/1.1 200 ") < 2:
                    answers += sock.recv(65536)


@pytest.mark.parametrize("refused", ["too much", "no http", "too slow"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_waits_for_the_answers_before_it(start: Any, refused: str, stream: bool) -> None:
    """Pipelined: the answers under way come whole and in order, then the refusal, then the end."""
    gateway: Running = start(limits=Limits(receive_bytes=100_000, receive_s=0.5))
    gateway.sampler.delay = 0.05  # the answer takes over a second
    body = json.dumps(BODY | {"stream": stream}).encode()
    whole = head(content_length=len(body)) + body
    last, status = {
        "too much": (head(content_length=400_000) + b" " * 400_000 + whole, 429),
        "no http": (b"nonsense\r\n\r\n" + whole, 400),
        "too slow": (head()[:-2], 408),
    }[refused]
    with connected(gateway) as sock:
        for number in range(2):
            sock.sendall(whole)
            if number == 0:
                wait_until(lambda: gateway.stats["in_flight"] == 1)
        sock.sendall(last)
        data = read_all(sock)
    assert data.count(b"HTTP/1.1 ") == 3
    first, second, third = data.split(b"HTTP/1.1 ")[1:]
    for answer in (first, second):
        assert answer.startswith(b"200 ")
        if stream:
            assert b"data: [DONE]" in answer
        else:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]
    assert third.startswith(b"%d " % status)
    assert json.loads(third.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert (gateway.stats["completed"], gateway.stats["cancelled"]) == (2, 0)


@pytest.mark.parametrize("behind", ["a refused body", "a large body", "two whole requests"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_with_more_on_the_way_is_missed(start: Any, behind: str, stream: bool) -> None:
    """Pipelined: nothing is read behind the first request, or what comes is dropped."""
    room = 10_000 if behind == "a refused body" else 10_000_000
    gateway: Running = start(limits=Limits(receive_bytes=room))
    gateway.sampler.delay = 0.5  # ten seconds an answer
    body = json.dumps(BODY | {"stream": stream}).encode()
    whole = head(content_length=len(body)) + body
    with connected(gateway) as sock:
        sock.sendall(whole)
        wait_until(lambda: gateway.stats["in_flight"] == 1)
        large = head(content_length=400_000) + b" " * 400_000
        sock.sendall(2 * whole if behind == "two whole requests" else large)
        if behind == "a refused body":
            wait_until(lambda: gateway.stats["overloaded"] == 1)
        else:
            time.sleep(0.2)
        assert gateway.stats["in_flight"] == 1
    wait_until(lambda: gateway.stats["cancelled"] == 1)
    wait_until(lambda: gateway.stats["in_flight"] == 0)
    assert gateway.stats["completed"] == 0
    assert len(gateway.sampler.requests) == 1


def test_a_refused_body_is_not_too_slow_as_well(start: Any, caplog: Any) -> None:
    gateway: Running = start(limits=Limits(receive_bytes=100_000, receive_s=0.3))
    with connected(gateway) as sock:
        sock.sendall(head(content_length=400_000) + b" " * 200_000)
        data = read_all(sock)
        time.sleep(0.6)  # the client goes on sending, or rather does not
    assert data.startswith(b"HTTP/1.1 429 ")
    assert data.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.exc_info]
    assert "408" not in caplog.text


def test_who_waits_to_be_told_to_go_on_is_told(gateway: Running) -> None:
    body = json.dumps(BODY).encode()
    with connected(gateway) as sock:
        for _ in range(2):
            sock.sendall(head(content_length=len(body), expect="100-continue"))
            assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(body)
            answer = sock.recv(100_000)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]  # all in one piece


# --- clients that do not read


class Endless:
    """As many tokens as are asked for, as fast as they are taken."""

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


def test_a_client_that_does_not_read_is_dropped(start: Any) -> None:
    gateway: Running = start(limits=Limits(stall_s=1.5), context_length=10_000_000)
    [word] = gateway.renderer.encode(" there")
    gateway.deps.sampler = sampler = Endless(word)
    claim = gateway.claims[0]
    wanted = 1_000_000
    body = BODY | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": wanted}
    content = json.dumps(body).encode()
    path = f"/rollouts/{claim.rollout_id}{CHAT}"
    with connected(gateway, receive_buffer=4096) as sock:
        sock.sendall(head(path, claim.key, content_length=len(content)) + content)
        assert sock.recv(12) == b"HTTP/1.1 200"
        last = -1
        while sampler.taken != last:  # until sampling waits for the client
            last = sampler.taken
            time.sleep(0.4)
        assert last < 20_000
        wait_until(lambda: gateway.stats["in_flight"] == 0)
        assert sampler.taken < last + 200
    [call] = gateway.calls(claim)
    assert (call.state, call.skip_reason) == (
        CallState.CANCELLED,
        SkipReason.CLIENT_DISCONNECTED,
    )
    assert abs(len(call.response_ids) - sampler.taken) <= 1
    assert gateway.stats["cancelled"] == 1
    assert gateway.store.accounting(gateway.run_id).adds_up


def test_an_answer_nobody_reads_does_not_stay(start: Any) -> None:
    """A whole JSON answer, larger than any socket buffer: kept for the client, but not forever."""
    gateway: Running = start(limits=Limits(stall_s=0.5), context_length=10_000_000)
    gateway.deps.sampler = Endless(gateway.renderer.encode(" there")[0])
    body = BODY | {"logprobs": True, "top_logprobs": 20, "max_tokens": 6000}
    content = json.dumps(body).encode()
    with connected(gateway, receive_buffer=4096) as sock:
        sock.sendall(head(content_length=len(content)) + content)
        assert sock.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: gateway.stats["completed"] == 1)
        time.sleep(1.2)
        received = len(read_all(sock))
    assert received < 6000 * 1000  # the rest is gone


def test_clients_that_stop_reading_leave_nothing_behind(start: Any) -> None:
    """Twenty at once: all are dropped, their sampling ends, and their buffers and tasks go."""
    gateway: Running = start(limits=Limits(stall_s=1.0), context_length=10_000_000)
    [word] = gateway.renderer.encode(" there")
    gateway.deps.sampler = sampler = Endless(word)
    claim = gateway.claims[0]
    body = BODY | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 1_000_000}
    content = json.dumps(body).encode()
    path = f"/rollouts/{claim.rollout_id}{CHAT}"
    count = 20
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(connected(gateway, receive_buffer=4096))
            sock.sendall(head(path, claim.key, content_length=len(content)) + content)
        # Counts that only grow: on a busy machine the first may be dropped before the last begins.
        wait_until(lambda: gateway.stats["accepted"] == count, 60)
        wait_until(lambda: gateway.stats["cancelled"] == count, 60)
        wait_until(lambda: gateway.stats["in_flight"] == 0)
        taken = sampler.taken
        time.sleep(0.5)
        assert sampler.taken == taken
    calls = gateway.calls(claim)
    assert len(calls) == gateway.stats["cancelled"] == count
    assert {(call.state, call.skip_reason) for call in calls} == {
        (CallState.CANCELLED, SkipReason.CLIENT_DISCONNECTED)
    }
    assert abs(sum(len(call.response_ids) for call in calls) - taken) <= count
    memory = gateway.app.state.gateway.attempts.get(claim.attempt_id)
    assert memory.in_flight == 0
    assert not any(same.running for same in memory.requests.values())

    def held() -> int:
        gc.collect()
        return sum(type(one) is _SseSender for one in gc.get_objects())

    wait_until(lambda: held() == 0)
    assert gateway.store.accounting(gateway.run_id).adds_up


# --- the sampler says no, or nothing any more


@pytest.mark.parametrize(
    ("code", "status", "ours"),
    [
        ("invalid_parameter", 400, "invalid_parameter"),
        ("unknown_adapter", 404, "model_not_found"),
        ("stopped", 503, "sampler_unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_sampler(
    gateway: Running, code: Any, status: int, ours: str, stream: bool
) -> None:
    async def refuse(*_: Any) -> Any:
        raise RefusedError(code, "because")
        yield

    gateway.sampler.sample = refuse  # type: ignore[method-assign]
    claim = gateway.claims[0]
    response = post(
        gateway.base_url(claim) + "/chat/completions", claim.key, BODY | {"stream": stream}
    )
    assert response.status_code == status
    assert error_of(response)["code"] == ours
    assert error_of(response)["message"] == "because"
    assert ("retry-after" in response.headers) == (status == 503)
    [call] = gateway.calls(claim)
    assert (call.state, call.error) == (CallState.ERROR, "RefusedError: because")


def test_a_dead_sampler_shows(gateway: Running) -> None:
    gateway.sampler.healthy = False
    response = post(gateway.url + CHAT, OPERATOR_KEY)
    assert (response.status_code, error_of(response)["code"]) == (503, "sampler_unavailable")
    assert int(response.headers["retry-after"]) >= 1
    assert httpx.get(f"{gateway.url}/healthz").status_code == 503
    gateway.sampler.healthy = True
    assert httpx.get(f"{gateway.url}/healthz").status_code == 200


# --- secrets


def test_no_key_is_told_to_anyone(
    gateway: Running, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Every kind of error, with every key; then the logs, the answers and the store's bytes."""
    caplog.set_level(logging.DEBUG)
    mine, other = gateway.claims[:2]
    stranger = "sk-agentrl-of-a-stranger"
    keys = [mine.key, other.key, OPERATOR_KEY, stranger, "sk-plain-stranger"]
    paths = [
        CHAT,
        f"/rollouts/{mine.rollout_id}{CHAT}",
        f"/rollouts/{mine.rollout_id}/v1/traces",
        f"/rollouts/{mine.rollout_id}/v1/rewards",
        "/admin/adapters",
        "/nowhere",
    ]
    bodies: list[Any] = [BODY, {}, {"value": "x"}, {"model": 1}, {"name": "a", "version": 1,
                                                                  "path": "/missing"}]  # fmt: skip
    told: list[str] = []
    for key in keys:
        for path in paths:
            for body in bodies:
                for headers in ({}, {"x-agentrl-rollout": keys[0]}, {"x-api-key": key}):
                    response = post(gateway.url + path, key, body, headers=headers)
                    told += [response.text, str(response.headers)]
    gateway.sampler.fail_after = 1
    told.append(post(gateway.url + CHAT, mine.key).text)
    gateway.seal(mine)
    told.append(post(gateway.url + CHAT, mine.key).text)
    with connected(gateway) as sock:
        sock.sendall(head(key=mine.key)[:-2] + b"bad header\r\n\r\n")
        told.append(read_all(sock).decode())
    told.append(httpx.get(f"{gateway.url}/healthz").text)
    told += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    told.append(caplog.text)
    assert gateway.stats["failed"] == 1
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("trace.db*"))
    assert mine.rollout_id.encode() in stored
    for key in keys:
        assert not [text for text in told if key in text]
        assert key.encode() not in stored


# --- the way out

SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from running_gateway import WEIGHTS
from scripted_sampler import ScriptedSampler
from transformers import AutoTokenizer
from agentrl_proxy.app import create_app
from agentrl_proxy.server.connection import Limits
from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.server.uvicorn import serve
from agentrl_tracer.store import Store
from agentrl_tracer.store.writer import TraceWriter

renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
store = Store({store!r})
store.register_gateway("boot", None, 1)
writer = TraceWriter(store, "boot")
sampler = ScriptedSampler(renderer)
sampler.delay = {delay}
deps = GatewayDependencies(sampler, renderer, store, writer, "boot", default_adapter="policy",
                   limits=Limits(grace_s=2))
try:
    serve(create_app(deps), "127.0.0.1", 0, on_bound=lambda url: print(url, flush=True))
finally:
    writer.close()
    store.close()
    print("closed", flush=True)
"""


@pytest.mark.parametrize(("delay", "finishes"), [(0.03, True), (1.0, False)])
def test_told_to_stop_it_finishes_what_it_can(tmp_path: Path, delay: float, finishes: bool) -> None:
    """A real process, a real SIGTERM: short answers arrive whole, long ones are cut, and kept."""
    db = str(tmp_path / "trace.db")
    code = SERVER.format(here=str(HERE), store=db, delay=delay)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as api:
            stream = api.chat.completions.create(model="policy", messages=USER, stream=True)
            chunks = iter(stream)
            next(chunks)
            server.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{url}/healthz", timeout=2)
            try:
                reason = [chunk.choices[0].finish_reason for chunk in chunks][-1]
            except (httpx.HTTPError, openai.APIError):
                reason = None
        assert "closed" in server.stdout.read()
        assert server.wait(20) == 128 + signal.SIGTERM
    assert reason == ("stop" if finishes else None)
    store = Store(db)
    [call] = store.calls()
    store.close()
    assert call.state is (CallState.COMPLETED if finishes else CallState.CANCELLED)
    assert call.response_ids
