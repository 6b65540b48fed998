"""Serve our gateway as a provider of LiteLLM, behind an existing LiteLLM proxy.

Knows LiteLLM's ``CustomLLM`` and our chat endpoint over HTTP. LiteLLM's process imports this
module, perhaps on another machine, and needs nothing else of ours. In LiteLLM's configuration::

    litellm_settings:
      custom_provider_map:
        - {provider: agentrl, custom_handler: agentrl_proxy.litellm_frontend.agentrl_llm}

A request's rollout is known by its key: in the header ``x-agentrl-key`` (LiteLLM's proxy passes
``x-`` headers on with ``forward_client_headers_to_llm_api``), else the model's ``api_key``.

Token ids are ``token_ids`` and ``prompt_token_ids`` in ``choices[i].provider_specific_fields`` of a
whole answer; of a stream, in ``choices[0].delta.provider_specific_fields`` of one of the last
chunks. LiteLLM streams one choice: do not stream with ``n`` above 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from litellm.llms.custom_llm import CustomLLM, CustomLLMError
from litellm.types.utils import ModelResponse, ModelResponseStream

from agentrl_proxy.server.event_data import event_data

KEY_HEADER = "x-agentrl-key"
_PASSED_ON = ("x-agentrl-agent", "traceparent", "tracestate")
_TIMEOUT_S = 600.0


class AgentRLLLM(CustomLLM):
    """Sends LiteLLM's requests to the gateway. Its errors keep their status and text.

    LiteLLM's proxy calls the asynchronous methods only, with all arguments by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clients = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]()

    async def acompletion(self, **arguments: Any) -> ModelResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        async with self._answered(arguments, stream=False) as answer:
            said = json.loads(await answer.aread())
        prompt = said.pop("prompt_token_ids", None)
        for choice in said["choices"]:
            ids = choice.pop("token_ids", None)
            choice["provider_specific_fields"] = {"token_ids": ids, "prompt_token_ids": prompt}
        return ModelResponse(**said)

    async def astreaming(self, **arguments: Any) -> AsyncIterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The chunk that ends the choice is held until usage is known: LiteLLM reads nothing later.
        last: dict[str, Any] | None = None
        usage, fields = None, dict[str, Any]()
        async with self._answered(arguments, stream=True) as answer:
            async for data in event_data(answer):
                if data == b"[DONE]":  # the last one; read to the end, so that httpx can reuse
                    continue
                said = json.loads(data)
                if "error" in said:
                    raise CustomLLMError(500, said["error"]["message"])
                usage = said.get("usage") or usage
                prompt = said.pop("prompt_token_ids", None)
                for choice in said["choices"]:
                    if choice["finish_reason"]:
                        ids = choice.pop("token_ids", None)
                        last, fields = said, {"token_ids": ids, "prompt_token_ids": prompt}
                    else:
                        yield ModelResponseStream(**said)
        if last is not None:
            delta = {"provider_specific_fields": fields}
            yield ModelResponseStream(
                **{**last, "choices": [{"index": 0, "delta": delta}]}, usage=usage
            )
            yield ModelResponseStream(**last)

    @contextlib.asynccontextmanager
    async def _answered(
        self, arguments: Mapping[str, Any], *, stream: bool
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; the answer's body is not read yet."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:  # loops cannot share connections
            self._clients[loop] = httpx.AsyncClient(timeout=_TIMEOUT_S)
        try:
            async with self._clients[loop].stream(**_request(arguments, stream=stream)) as answer:
                if answer.status_code != 200:
                    said = (await answer.aread()).decode(errors="replace")
                    with contextlib.suppress(ValueError, LookupError, TypeError):
                        said = json.loads(said)["error"]["message"]
                    raise CustomLLMError(answer.status_code, str(said)[:1000])
                yield answer
        except httpx.HTTPError as error:
            said = f"{type(error).__name__}: {error}"
            raise CustomLLMError(503, f"the gateway does not answer: {said}") from error


def _request(arguments: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """Return httpx's arguments for one of LiteLLM's requests."""
    base = arguments.get("api_base")
    if not base:
        raise CustomLLMError(
            400, "the model's litellm_params need api_base: the gateway's URL, ending in /v1"
        )
    params = dict(arguments.get("optional_params") or {})
    extra = params.pop("extra_body", None) or {}
    for name in ("stream", "stream_options", "max_retries", "extra_headers"):
        params.pop(name, None)
    body = {**params, **extra, "return_token_ids": True}
    body |= {name: arguments[name] for name in ("model", "messages")}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    given = {name.lower(): value for name, value in (arguments.get("headers") or {}).items()}
    headers = {name: given[name] for name in _PASSED_ON if name in given}
    key = given.get(KEY_HEADER) or arguments.get("api_key")
    if key:
        headers["authorization"] = f"Bearer {key}"
    timeout = arguments.get("timeout")
    return {
        "method": "POST",
        "url": f"{base.rstrip('/')}/chat/completions",
        "json": body,
        "headers": headers,
        "timeout": _TIMEOUT_S if timeout is None else timeout,
    }


agentrl_llm = AgentRLLLM()
