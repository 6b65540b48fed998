"""A marked retry gets the answer of the request that it repeats, whatever became of its client."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from running_gateway import running
from scripted_sampler import Running

from agentrl_proxy.deps import OtherModel
from agentrl_proxy.rendering import Renderer
from agentrl_tracer.schemas import CallState, Claim

pytestmark = [  # LiteLLM's use of pydantic
    pytest.mark.filterwarnings("ignore:.*using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

USER = [{"role": "user", "content": "Who are you?"}]
RETRY = {"x-stainless-retry-count": "1"}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": USER},
    "/completions": {"prompt": ["One", "Two"]},
    "/responses": {"input": "Who are you?"},
    "/messages": {"messages": USER, "max_tokens": 50},
}


@pytest.fixture
def gateway(start: Callable[..., Running], renderer: Renderer, tmp_path: Any) -> Iterator[Running]:
    """One whose model ``answerer`` is somebody else's: another gateway's."""
    with running(tmp_path / "provider", renderer, {}) as provider:
        base, key = provider.base_url(), str(provider.deps.operator_key)
        other = OtherModel("openai/policy", base, key, num_retries=0)
        yield start(other_models={"answerer": other})


def post(
    gateway: Running, path: str, body: dict[str, Any], claim: Claim | None = None, **more: Any
) -> httpx.Response:
    claim = claim or gateway.claims[0]
    headers = {"authorization": f"Bearer {claim.key}", **more.pop("headers", {})}
    return httpx.post(
        gateway.base_url(claim) + path, json=body, headers=headers, **{"timeout": 60} | more
    )


@contextlib.contextmanager
def locked(gateway: Running) -> Iterator[None]:
    """Somebody else writes into the store: whoever commits has to wait."""
    path = gateway.store.url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def completed(gateway: Running, claim: Claim) -> bool:
    calls = gateway.calls(claim)
    return bool(calls) and all(call.state is CallState.COMPLETED for call in calls)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["policy", "answerer"])
def test_a_client_that_leaves_during_the_commit(gateway: Running, model: str, stream: bool) -> None:
    claims = gateway.new_claims(len(BODIES))
    for claim, (path, body) in zip(claims, BODIES.items(), strict=True):
        asked = {"model": model, "stream": stream} | body
        assert post(gateway, path, asked).is_success  # LiteLLM's first call takes seconds
        replayed = gateway.stats["replayed"]
        with locked(gateway):
            with pytest.raises(httpx.TimeoutException):
                post(gateway, path, asked, claim, timeout=0.5)
            until(lambda: gateway.stats["in_flight"] == 0)  # nobody is held up by the store
        until(lambda: completed(gateway, claim))
        again = [post(gateway, path, asked, claim, headers=RETRY) for _ in range(2)]
        calls = gateway.calls(claim)
        assert again[0].text == again[1].text
        assert calls[0].response_id in again[0].text
        assert len(calls) == (2 if path == "/completions" else 1)
        assert gateway.stats["replayed"] == replayed + 2 * len(calls)


def test_a_retry_during_the_commit_waits_for_it(gateway: Running) -> None:
    asked = {"model": "policy", "messages": USER}
    with locked(gateway):
        for headers in ({}, RETRY):
            with pytest.raises(httpx.TimeoutException):
                post(gateway, "/chat/completions", asked, headers=headers, timeout=0.5)
    until(lambda: gateway.calls(gateway.claims[0]))
    again = post(gateway, "/chat/completions", asked, headers=RETRY).json()
    [call] = gateway.calls(gateway.claims[0])
    assert call.response_id == again["id"]
    # The conversation goes on with the exact tokens, though its first client never heard them.
    reply = again["choices"][0]["message"]
    more = [*USER, reply, {"role": "user", "content": "And now?"}]
    assert post(gateway, "/chat/completions", {"model": "policy", "messages": more}).is_success
    assert gateway.calls(gateway.claims[0])[1].params["continued"]
