"""Embeddings of a provider's model: forwarded, recorded with their usage, never trained."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from gateway_client import HTTP
from official_clients import client
from provider_servers import FaultyServer, asking

from agentrl_tracer.schemas import CallState, SkipReason

VECTORS: list[list[float]] = [[0.5, -0.25], [1.0, 2.0]]


def embedded(*_: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(VECTORS)]
    usage = {"prompt_tokens": 5, "total_tokens": 5}
    return {"object": "list", "data": data, "model": "theirs", "usage": usage}


def test_they_are_forwarded_and_recorded(start: Any) -> None:
    provider = FaultyServer((200, embedded()))
    gateway = asking(start, provider, "openai/text-embedding-3-small")
    retry = {"x-stainless-retry-count": "1"}
    with client(gateway) as api:
        for headers in ({}, retry):  # vectors are not kept, so a retry asks again
            made = api.embeddings.create(
                model="answerer",
                input=["one", "two"],
                dimensions=2,
                encoding_format="float",
                extra_headers=headers,
            )
            assert [one.embedding for one in made.data] == VECTORS
            assert (made.model, made.usage.total_tokens) == ("answerer", 5)
    assert [one["path"] for one in provider.seen] == ["/v1/embeddings"] * 2
    body = {"input": ["one", "two"], "dimensions": 2, "encoding_format": "float"}
    assert provider.seen[0]["body"] == body | {"model": "text-embedding-3-small"}
    for call in gateway.calls(gateway.claims[0]):
        assert call.state is CallState.COMPLETED
        assert call.skip_reason is SkipReason.NOT_TRAINABLE_MODEL
        assert call.tokens == (5, 0)
        assert call.params["usage"]["total_tokens"] == 5
        assert call.params["embeddings"] == 2
        assert call.request is not None
        assert call.request["input"] == ["one", "two"]
        assert call.response is None
        assert call.prompt_ids == call.response_ids == []


def test_what_the_provider_refuses(start: Any) -> None:
    provider = FaultyServer((400, {"error": {"message": "no dimensions", "code": "bad"}}))
    gateway = asking(start, provider)
    with client(gateway) as api, pytest.raises(openai.BadRequestError) as caught:
        api.embeddings.create(model="answerer", input="one", encoding_format="float")
    assert "no dimensions" in caught.value.message
    [call] = gateway.calls(gateway.claims[0])
    assert call.state is CallState.ERROR
    assert call.params["error_status"] == 400


def test_without_a_model_it_says_how(gateway: Any) -> None:
    with client(gateway) as api:
        for model in ("text-embedding-3-small", "policy"):
            with pytest.raises(openai.NotFoundError) as caught:
                api.embeddings.create(model=model, input="one")
            assert f'[models."{model}"]' in caught.value.message
        with pytest.raises(openai.BadRequestError) as wrong:
            api.embeddings.create(model="policy", input=[])
    assert wrong.value.param == "input"
    assert gateway.calls(gateway.claims[0]) == []
    url = gateway.base_url(gateway.claims[0]) + "/embeddings"
    assert HTTP.post(url, json={"model": "x", "input": "x"}).status_code == 401
