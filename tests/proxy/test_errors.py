"""A sampler that refuses or dies, and keys that no answer, log or store repeats."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from gateway_client import BODY, HTTP, connected, error_of, head, post
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.sampler import RefusedError
from agentrl_tracer.schemas import CallState

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("code", "status", "ours"),
    [
        ("invalid_parameter", 400, "invalid_parameter"),
        ("unknown_adapter", 404, "model_not_found"),
        ("stopped", 503, "sampler_unavailable"),
        ("deferred", 503, "adapter_deferred"),
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


def test_no_key_is_told_to_anyone(
    gateway: Running, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Every kind of error, with every key; then the logs, the answers and the store's bytes."""
    caplog.set_level(logging.DEBUG)
    mine, other = gateway.claims[:2]
    keys = [mine.key, other.key, OPERATOR_KEY, "sk-agentrl-of-a-stranger", "sk-plain-stranger"]
    own = f"/rollouts/{mine.rollout_id}"
    paths = [CHAT, own + CHAT, f"{own}/v1/traces", f"{own}/v1/rewards", "/admin/adapters", "/no"]
    adapter = {"name": "a", "version": 1, "path": "/missing"}
    bodies: list[Any] = [BODY, {}, {"value": "x"}, {"model": 1}, adapter]
    told: list[str] = []
    for key, path, body in itertools.product(keys, paths, bodies):
        for headers in ({}, {"x-agentrl-rollout": keys[0]}, {"x-api-key": key}):
            response = post(gateway.url + path, key, body, headers=headers)
            told += [response.text, str(response.headers)]
    gateway.sampler.fail_after = 1
    told.append(post(gateway.url + CHAT, mine.key).text)
    gateway.seal(mine)
    told.append(post(gateway.url + CHAT, mine.key).text)
    with connected(gateway) as sock:
        sock.sendall(head(CHAT, mine.key).replace(b"host: localhost", b"bad header"))
        told.append(sock.recv(65536).decode())
    told.append(HTTP.get(f"{gateway.url}/healthz").text)
    told += [record.getMessage() + str(record.exc_text) for record in caplog.records]
    told.append(caplog.text)
    assert gateway.stats["failed"] == 1
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("trace.db*"))
    assert mine.rollout_id.encode() in stored
    for key in keys:
        assert not [text for text in told if key in text]
        assert key.encode() not in stored
