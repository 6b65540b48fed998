"""Requests made from the gateway's own OpenAPI document: what it allows is taken, what it forbids
is refused, and nothing is a 500 or fails once accepted. The document names every route.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from garbage import REQUESTS, broken, fuzz
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from running_gateway import running
from scripted_sampler import OPERATOR_KEY, Running

from agentrl_proxy.app import ROUTES
from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.protocols.chat import CHAT
from agentrl_proxy.protocols.openapi import SCHEMAS, document
from agentrl_proxy.rendering.renderer import Renderer

EXAMPLES = 6
KEY = "sk-of-the-provider"
# What an otherwise valid request may be refused for: rules between fields, the sense of a text in
# a field, and what this model, its template and its sampler can do.
DEPENDS: dict[str, set[str | None]] = {
    "chat/completions": {
        "top_logprobs", "tool_choice", "tools", "response_format", "messages", "logit_bias",
        "guided_json", "structured_outputs", "chat_template_kwargs",
    },
    "completions": {"best_of", "prompt", "logit_bias", "max_tokens", "echo"},
    "responses": {"input", "tool_choice", "tools", "response_format", "messages", "text",
                  "previous_response_id", "chat_template_kwargs"},
    "messages": {"messages", "tool_choice", "tools", "response_format", "output_config",
                 "chat_template_kwargs"},
}  # fmt: skip
DEPENDS["messages/count_tokens"] = DEPENDS["messages"]


@cache
def operations() -> Any:
    import schemathesis

    return schemathesis.openapi.from_dict(document("1"))


def bodies(path: str, mode: str) -> st.SearchStrategy[Any]:
    """Bodies of requests: of those that the document allows (positive), or does not (negative)."""
    import schemathesis

    def usable(case: Any) -> Any:
        body = _integers(case.body)
        if isinstance(body, dict) and isinstance(body.get("model"), str) and body["model"]:
            body = {**body, "model": "policy"}  # one that is there
        if path.startswith("messages") and mode == "positive":  # no schema can demand it
            body = {**body, "messages": [*body["messages"], {"role": "user", "content": "And?"}]}
        return body

    operation = operations()[f"/v1/{path}"]["POST"]
    return operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)).map(usable)


def _integers(value: Any) -> Any:
    """2.0 as 2: JSON Schema takes both for integers, most parsers do not."""
    if isinstance(value, dict):
        return {key: _integers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_integers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer) -> Iterator[Running]:
    """A gateway with its own model and one that another gateway serves."""
    folder = tmp_path_factory.mktemp("provider")
    with running(folder, renderer, {}, operator_key=KEY) as provider:
        provider.sampler.script = lambda *_: "ok"
        other = ProviderModel("openai/policy", f"{provider.url}/v1", KEY, num_retries=0)
        folder = tmp_path_factory.mktemp("gateway")
        with running(folder, renderer, {}, provider_models={"other": other}) as made:
            made.sampler.script = lambda *_: "ok"
            yield made
            import litellm

            # LiteLLM's connections belong to the gateway's event loop and are never closed.
            litellm.in_memory_llm_clients_cache.flush_cache()
            gc.collect()


@pytest.fixture(scope="module")
def http(gateway: Running) -> Iterator[httpx.Client]:
    claim = gateway.claims[0]
    headers = {"x-api-key": claim.key, "content-type": "application/json"}
    with httpx.Client(
        base_url=gateway.base_url(claim), headers=headers, timeout=60, trust_env=False
    ) as client:
        # Hypothesis walks through sys.modules: by then LiteLLM is to be imported, not on its way.
        hello = {"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "h"}]}
        assert client.post("/messages", json=hello).status_code == 200
        yield client


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(f"/{path}", content=content)
    assert answer.status_code < 500, (answer.text, body)
    assert "internal_error" not in answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    return answer


@pytest.mark.parametrize("path", REQUESTS)
def test_what_the_document_allows(gateway: Running, http: httpx.Client, path: str) -> None:
    taken = [0]

    @fuzz(EXAMPLES)
    @given(body=bodies(path, "positive"))
    def test(body: Any) -> None:
        answer = post(http, path, body)
        taken[0] += answer.status_code == 200
        if answer.status_code != 200 and not path.startswith("messages"):
            error = answer.json()["error"]
            assert error["param"].split("[")[0].split(".")[0] in DEPENDS[path], (error, body)

    failed = gateway.stats["failed"]
    test()
    assert taken[0] > EXAMPLES / 5
    assert gateway.stats["failed"] == failed, "it was accepted, and then failed"
    assert gateway.store.accounting(gateway.run_id).adds_up


@pytest.mark.parametrize("path", REQUESTS)
def test_what_the_document_forbids(gateway: Running, http: httpx.Client, path: str) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    content = document["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    validator = Draft202012Validator(document["components"]["schemas"][name])
    refused = [0]

    @fuzz(EXAMPLES)
    @given(body=bodies(path, "negative"))
    def test(body: Any) -> None:
        answer = post(http, path, body)
        # Within messages, tools and their like the parsers take more than they promise.
        wrong = {e.path[0]: e.message for e in validator.iter_errors(body) if len(e.path) == 1}
        if wrong.keys() & CHAT.properties.keys() - {"tools", "tool_choice", "response_format"}:
            assert answer.status_code == 400, (wrong, answer.text)
        refused[0] += answer.status_code == 400

    failed = gateway.stats["failed"]
    test()
    assert refused[0] > EXAMPLES / 5
    assert gateway.stats["failed"] == failed


@pytest.mark.parametrize("path", REQUESTS)
def test_broken_requests_to_a_provider(gateway: Running, http: httpx.Client, path: str) -> None:
    """Our own model gets them in test_handlers.py. What a provider refuses is a failed request."""

    @fuzz(EXAMPLES)
    @given(data=st.data())
    def test(data: st.DataObject) -> None:
        post(http, path, data.draw(broken(REQUESTS[path] | {"model": "other"})))

    test()


def test_the_document_describes_the_routes(gateway: Running) -> None:
    described = {
        (path.replace("{model}", "{model:path}"), method.upper())
        for path, one in document("1")["paths"].items()
        for method in one
        if method != "parameters"
    }
    routes = {(path, method) for path, (method, _) in ROUTES.items()}
    assert described == routes - {("/openapi.json", "GET")}
    for path, method in described:
        if method == "POST" and path.startswith("/rollouts"):
            answer = httpx.post(gateway.url + path.replace("{rollout_id}", "unknown"), timeout=60)
            assert answer.status_code == 401, path


def test_what_the_document_requires_is_required(gateway: Running) -> None:
    claim = gateway.claims[0]
    chat, adapter = REQUESTS["chat/completions"], {"name": "policy", "version": 4, "path": "/x"}
    for name, url, key, body in (
        ("ChatCompletionRequest", gateway.base_url(claim) + "/chat/completions", claim.key, chat),
        ("RewardRequest", gateway.base_url(claim) + "/rewards", claim.key, {"value": 1.0}),
        ("AdapterRequest", gateway.url + "/admin/adapters", OPERATOR_KEY, adapter),
    ):
        for field in SCHEMAS[name]["required"]:
            less = {k: v for k, v in body.items() if k != field}
            response = httpx.post(url, json=less, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 400, field
            assert response.json()["error"]["param"] == field
