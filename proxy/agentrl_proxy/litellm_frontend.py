"""Our gateway as a provider of LiteLLM, so that an existing LiteLLM proxy can stand in front of it.

Knows LiteLLM's ``CustomLLM`` and our chat endpoint over HTTP. Does not know the gateway's insides:
LiteLLM's process imports this module, perhaps on another machine, and needs nothing else of ours.
In LiteLLM's configuration::

    litellm_settings:
      custom_provider_map:
        - {provider: agentrl, custom_handler: agentrl_proxy.litellm_frontend.agentrl_llm}

Who is calling: a rollout's key in the header ``x-agentrl-key`` (LiteLLM's proxy passes ``x-``
headers on with ``forward_client_headers_to_llm_api``), else the model's ``api_key``.

The token ids are ``token_ids`` and ``prompt_token_ids`` in ``choices[i].provider_specific_fields``
of a whole answer; of a stream, in ``choices[0].delta.provider_specific_fields`` of one of the last
chunks. LiteLLM streams one choice: with ``n`` above 1 do not stream.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from litellm.llms.custom_llm import CustomLLM, CustomLLMError
from litellm.types.utils import ModelResponse, ModelResponseStream

KEY_HEADER = "x-agentrl-key"
_PASSED_ON = ("x-agentrl-agent", "traceparent", "tracestate")
_TIMEOUT_S = 600.0


class AgentRLLLM(CustomLLM):
    """Asks the gateway; its errors keep their status and text."""

    def __init__(self) -> None:
        super().__init__()
        self._client: httpx.Client | None = None
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    # LiteLLM passes everything by name; what is left out here is in ``arguments`` too.

    def completion(self, **arguments: Any) -> ModelResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        request = _request(self._sync_client(), arguments, stream=False)
        try:
            answer = self._sync_client().send(request)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        return _whole(answer)

    async def acompletion(self, **arguments: Any) -> ModelResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        client = self._async_client()
        try:
            answer = await client.send(_request(client, arguments, stream=False))
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        return _whole(answer)

    def streaming(self, **arguments: Any) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        client, end = self._sync_client(), _End()
        try:
            answer = client.send(_request(client, arguments, stream=True), stream=True)
            try:
                if answer.status_code != 200:
                    answer.read()
                    raise _refused(answer)
                for line in answer.iter_lines():
                    yield from _chunks(line, end)
            finally:
                answer.close()
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    async def astreaming(self, **arguments: Any) -> AsyncIterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        client, end = self._async_client(), _End()
        try:
            answer = await client.send(_request(client, arguments, stream=True), stream=True)
            try:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refused(answer)
                async for line in answer.aiter_lines():
                    for chunk in _chunks(line, end):
                        yield chunk
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    def _sync_client(self) -> httpx.Client:
        if self._client is None:
            self._client = httpx.Client(timeout=_TIMEOUT_S)
        return self._client

    def _async_client(self) -> httpx.AsyncClient:
        """One of each event loop: connections cannot be shared between loops."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(timeout=_TIMEOUT_S)
        return self._clients[loop]


@dataclass(slots=True)
class _End:
    """The chunk that ends the choice, held until usage is known: LiteLLM hears nothing after it."""

    chunk: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


def _request(
    client: httpx.Client | httpx.AsyncClient, arguments: Mapping[str, Any], *, stream: bool
) -> httpx.Request:
    base = arguments.get("api_base")
    if not base:
        raise CustomLLMError(
            400, "the model's litellm_params need api_base: the gateway's URL, ending in /v1"
        )
    params = dict(arguments.get("optional_params") or {})
    extra = params.pop("extra_body", None) or {}
    for name in ("stream", "stream_options", "max_retries", "extra_headers"):
        params.pop(name, None)
    body = {
        **params,
        **extra,
        "model": arguments["model"],
        "messages": arguments["messages"],
        "return_token_ids": True,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    given = {name.lower(): value for name, value in (arguments.get("headers") or {}).items()}
    headers = {name: given[name] for name in _PASSED_ON if name in given}
    key = given.get(KEY_HEADER) or arguments.get("api_key")
    if key:
        headers["authorization"] = f"Bearer {key}"
    timeout = arguments.get("timeout")
    return client.build_request(
        "POST",
        f"{base.rstrip('/')}/chat/completions",
        json=body,
        headers=headers,
        timeout=_TIMEOUT_S if timeout is None else timeout,
    )


def _whole(answer: httpx.Response) -> ModelResponse:
    if answer.status_code != 200:
        raise _refused(answer)
    said = answer.json()
    prompt = said.pop("prompt_token_ids", None)
    for choice in said["choices"]:
        choice["provider_specific_fields"] = {
            "token_ids": choice.pop("token_ids", None),
            "prompt_token_ids": prompt,
        }
    return ModelResponse(**said)


def _chunks(line: str, end: _End) -> Iterator[ModelResponseStream]:
    """LiteLLM's chunks for one line of our event stream."""
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        if end.chunk is not None:
            ids = {**end.chunk, "choices": [{"index": 0, "delta": {
                "provider_specific_fields": end.fields}}]}  # fmt: skip
            yield ModelResponseStream(**ids, usage=end.usage)
            yield ModelResponseStream(**end.chunk)
        return
    said = json.loads(data)
    if "error" in said:
        raise CustomLLMError(500, said["error"]["message"])
    end.usage = said.get("usage") or end.usage
    prompt = said.pop("prompt_token_ids", None)
    for choice in said["choices"]:
        if choice["finish_reason"]:
            end.fields = {"token_ids": choice.pop("token_ids", None), "prompt_token_ids": prompt}
            end.chunk = said
        else:
            yield ModelResponseStream(**said)


def _refused(answer: httpx.Response) -> CustomLLMError:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = answer.text[:500]
    return CustomLLMError(answer.status_code, message)


def _unreachable(error: httpx.HTTPError) -> CustomLLMError:
    return CustomLLMError(503, f"the gateway does not answer: {type(error).__name__}: {error}")


agentrl_llm = AgentRLLLM()
