"""The routes of the Tinker server: who may use them, and bodies that no SDK sends."""

from __future__ import annotations

import gzip
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from client_data import ROW, TINY
from garbage import broken, fuzz
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from agentrl import capacity
from agentrl.cli.servers.tinker_server import tinker_server_command
from agentrl.config.errors import ConfigError
from agentrl.tinker_server import app as app_module
from agentrl.tinker_server import create_app

MODEL, SAMPLER = "s1:train:0", "s1:sample:0"
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": ROW}]}
URL = re.compile(r"TINKER_BASE_URL=http://([\d.]+):(\d+)")
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
BODIES: dict[str, dict[str, Any]] = {
    "session_heartbeat": {"session_id": "s1"},
    "get_info": {"model_id": MODEL},
    "create_model": {
        "session_id": "s1", "model_seq_id": 0, "base_model": TINY, "user_metadata": {"a": "b"},
        "lora_config": {"rank": 4, "seed": 3, "train_mlp": True, "train_attn": True},
    },
    "load_weights": {
        "model_id": MODEL, "seq_id": 3, "path": f"tinker://{MODEL}/weights/a", "optimizer": True,
    },
    "optim_step": {"model_id": MODEL, "seq_id": 4, "adam_params": ADAM},
    "save_weights": {"model_id": MODEL, "seq_id": 5, "path": "a", "overwrite": True},
    "save_weights_for_sampler": {"model_id": MODEL, "seq_id": 6, "path": "b"},
    "create_sampling_session": {
        "session_id": "s1", "sampling_session_seq_id": 1, "base_model": TINY,
    },
    "asample": {
        "sampling_session_id": SAMPLER, "seq_id": 1, "num_samples": 1, "prompt": PROMPT,
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": 3, "top_p": 0.5,
                            "stop": ["x"], "seed": 1},
        "prompt_logprobs": True, "topk_prompt_logprobs": 1,
    },
    "retrieve_future": {"request_id": "s1:create/0", "allow_metadata_only": False},
}  # fmt: skip


def step_of(model_id: str) -> bytes:
    read = types.ModelInput.from_ints(ROW[:-1])
    data = [types.Datum(model_input=read, loss_fn_inputs={"target_tokens": ROW[1:]})]  # type: ignore[dict-item]
    batch = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(
        forward_backward_input=batch, model_id=model_id, seq_id=1
    )
    return forward_backward_request_to_proto(request).SerializeToString()


@pytest.fixture(scope="module")
def http(shared_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{shared_server.url}/api/v1/", timeout=60) as client:
        for route in ("create_model", "create_sampling_session"):
            body = BODIES[route] | {"sampling_session_seq_id": 0}
            assert client.post(route, json=body).status_code == 200
        client.post("retrieve_future", json=BODIES["retrieve_future"])
        yield client


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, (answer.request.url, answer.request.content[:1000])
    if answer.status_code >= 400:
        said = answer.json()["detail"]
        assert 0 < len(said) < 2000, said


def test_what_the_sdk_sends_passes(http: httpx.Client) -> None:
    for route, body in BODIES.items():
        answer = http.post(route, json=body | {"a_field_of_a_later_sdk": 1})
        assert answer.status_code == 200, (route, answer.text)


@fuzz(200)
@given(data=st.data())
def test_broken_bodies_get_4xx(http: httpx.Client, data: st.DataObject) -> None:
    route = data.draw(st.sampled_from(sorted(BODIES)))
    body = data.draw(broken(BODIES[route]))
    check(http.post(route, content=json.dumps(body).encode()))


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"1", b'"x"', b"{", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"{}"],
    ids=repr,
)
def test_bodies_that_are_no_objects_get_4xx(http: httpx.Client, content: bytes) -> None:
    for route in BODIES:
        answer = http.post(route, content=content)
        check(answer)
        assert answer.status_code >= 400


def test_broken_messages_of_protobuf_get_4xx(http: httpx.Client) -> None:
    good, draw = step_of(MODEL), random.Random(3)
    assert http.post("forward_backward", content=good).status_code == 200
    bad = [b"", b"\xff" * 40, good[:-3], good[5:], json.dumps({"a": 1}).encode()]
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        bad.append(bytes(changed))
    for content in bad:
        check(http.post("forward_backward", content=content))
    packed = gzip.compress(good)
    for headers, content, status in (
        ({"content-encoding": "gzip"}, packed, 200),
        ({"content-encoding": "gzip"}, packed[:-9], 400),
        ({"content-encoding": "gzip"}, good, 400),
        ({"content-encoding": "br"}, good, 415),
    ):
        assert http.post("forward_backward", headers=headers, content=content).status_code == status


def test_an_id_is_no_path(http: httpx.Client, shared_server: Any) -> None:
    for session in ("../../outside", "a/b", "", "s\0"):
        body = BODIES["create_model"] | {"session_id": session}
        assert http.post("create_model", json=body).status_code == 422
    assert not list(Path(shared_server.folder).parent.rglob("*outside*"))


def test_only_its_key_opens_a_server_that_was_started_with_one(tmp_path: Path) -> None:
    key = "tml-0123456789abcdef"
    app = create_app(tmp_path, [TINY], api_key=key, host="0.0.0.0", allowed_hosts=["trainer"])
    with TestClient(app, base_url="http://trainer:8787/api/v1/") as http:
        for route in ("get_server_capabilities", "healthz"):
            assert http.get(route).status_code == 401
            assert http.get(route, headers={"x-api-key": "tml-other"}).status_code == 401
            assert http.get(route, headers={"x-api-key": b"tml-\xff"}).status_code == 401
            assert http.get(route, headers={"x-api-key": key}).status_code == 200
            foreign = {"x-api-key": key, "origin": "http://evil.com"}
            assert http.get(route, headers=foreign).status_code == 403
            assert http.get(route, headers={"x-api-key": key, "host": "evil"}).status_code == 403
        for route in BODIES:
            assert http.post(route, json={}).status_code == 401


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "host: anyone who reaches '0.0.0.0'"),
        ({"api_key": "secret"}, "api_key: must begin with tml-"),
    ],
)
def test_a_server_for_others_needs_a_key(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        tinker_server_command(**settings)
    assert "secret" not in str(error.value)


def test_a_server_that_cannot_start_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        tinker_server_command(folder=tmp_path / "file" / "states")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"host/port: .*in use"):
            tinker_server_command(folder=tmp_path, port=port)


def test_a_second_signal_ends_a_busy_server_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "tinker-server", "--port=0", f"--folder={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        url = next(filter(None, map(URL.search, map(bytes.decode, server.stdout))))
        with socket.create_connection((url[1], int(url[2])), timeout=60) as client:
            head = f"POST /api/v1/get_info HTTP/1.1\r\nhost: {url[1]}\r\ncontent-length: 9\r\n"
            client.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
            assert b"100 Continue" in client.recv(1000)  # it waits for the body
            for _ in range(2):
                server.send_signal(signal.SIGTERM)
                time.sleep(1.2)
            said = server.communicate(timeout=15)[1].decode()
    assert server.returncode == 143
    assert said.split("\n")[1:] == ["ended by SIGTERM at once", ""]


@pytest.mark.parametrize(("worth", "threads"), [(0, 3), (10**9, 1)])
def test_a_large_model_gets_all_cores(
    worth: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "available_cores", lambda: 3)
    monkeypatch.setattr(capacity, "_WORTH_THREADS", worth)
    with create_app(tmp_path, [TINY]).state.server.service as service:
        training = service.create_lora_training_client(TINY, rank=4)
        assert training.local(lambda _: torch.get_num_threads()).result() == threads
