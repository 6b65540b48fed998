"""Requests to somebody else's model, in any of our protocols, as chat requests for LiteLLM.

Knows how each protocol's request becomes chat fields, and which dialect says the answer. Does not
know LiteLLM's Router, rows or who asks. There is one way for all protocols: the translation that
our own model's requests go through, ``acompletion``, and our own dialects; so ids, usage, records
and the order of events are those of our own model's answers.

What LiteLLM 1.105.3 has besides was tried. Its ``aresponses`` and ``anthropic_messages`` rewrite
ids and lose usage, see translation.py; towards the provider whose own protocol it is they would
carry more (server tools, stored conversations), which we refuse by name instead. Anthropic's
signed thinking survives our way: LiteLLM hands the blocks on. ``atext_completion`` sends any
``openai/`` model to ``/v1/completions``, which chat models do not serve; ``acompletion`` asks a
chat model in chat and a ``text-completion-…/`` model in text, where one user message is the prompt
to the letter. Token ids as prompts are refused: chat has no place for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.errors import ApiError, invalid
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import PROVIDER_CHAT
from agentrl_proxy.protocols.completions import (
    CHAT_ONLY,
    CompletionDialect,
    check_choices,
    check_completion,
)
from agentrl_proxy.protocols.fields import check_body
from agentrl_proxy.protocols.messages import messages_as_chat
from agentrl_proxy.protocols.responses import responses_as_chat
from agentrl_proxy.providers.service import ProviderRequest, ProviderService
from agentrl_proxy.server.sse import Write


def chat_elsewhere(raw: dict[str, Any]) -> ProviderRequest:
    """``/v1/chat/completions``: everything is the provider's to judge but what we need to know, and
    what LiteLLM would fall over."""
    check_body(PROVIDER_CHAT, raw, ours=False)
    dialect = chat_objects.ChatDialect(include_usage=_include_usage(raw))
    return _request(raw, raw, dialect, n=raw.get("n") or 1)


def of_response(raw: dict[str, Any], model: ProviderModel) -> ProviderRequest:
    """``/v1/responses``."""
    return _request(raw, *responses_as_chat(raw, model.model))


def of_message(
    raw: dict[str, Any], model: ProviderModel, *, counted: bool = False
) -> ProviderRequest:
    """``/v1/messages`` and ``/v1/messages/count_tokens``."""
    return _request(raw, *messages_as_chat(raw, model.model, counted=counted))


def of_completion(
    raw: dict[str, Any], model: ProviderModel
) -> tuple[list[ProviderRequest], CompletionDialect]:
    """``/v1/completions``: a request per prompt, of one heading, and how their answer is said."""
    check_completion(raw, ours=False)
    echo, logprobs, n = bool(raw.get("echo")), raw.get("logprobs"), raw.get("n") or 1
    if echo and logprobs is not None:
        raise invalid("echo", "echo and logprobs together ask for the log-probs of the prompt, "
                      "which a provider's model does not tell; send one of them",
                      code="unsupported_parameter")  # fmt: skip
    prompts = [raw["prompt"]] if isinstance(raw["prompt"], str) else raw["prompt"]
    check_choices(len(prompts), n)
    dialect = CompletionDialect(
        include_usage=_include_usage(raw), n=n, echoed=prompts if echo else []
    )
    chat = {k: v for k, v in raw.items() if k not in CHAT_ONLY | {"logprobs"}}
    if logprobs is not None:
        in_text = model.model.startswith("text-completion-")  # such a provider's are a number
        chat |= {"logprobs": logprobs} if in_text else {"logprobs": True, "top_logprobs": logprobs}
    requests: list[ProviderRequest] = []
    for i, prompt in enumerate(prompts):
        one = {**chat, "messages": [{"role": "user", "content": prompt}]}
        requests.append(_request(raw, one, dialect, n=n, first_choice=i * n))
    return requests, dialect


def _request(
    raw: dict[str, Any],
    chat: dict[str, Any],
    dialect: chat_objects.Dialect,
    *,
    n: int = 1,
    **more: Any,
) -> ProviderRequest:
    if n == 1:
        chat = {name: value for name, value in chat.items() if name != "n"}
    return ProviderRequest(raw["model"], chat, raw, dialect, bool(raw.get("stream")), n, **more)


def _include_usage(raw: Mapping[str, Any]) -> bool:
    return bool((raw.get("stream_options") or {}).get("include_usage"))


class ProviderCountWork:
    """A request to ``/v1/messages/count_tokens``: nothing is recorded, so nobody needs its answer
    once its client has left."""

    keep_alone = False

    def __init__(
        self, service: ProviderService, request: ProviderRequest, model: ProviderModel
    ) -> None:
        self._service = service
        self._request = request
        self._model = model

    async def run(self, write: Write | None) -> dict[str, int]:
        return {"input_tokens": await self._service.count(self._request, self._model)}

    def failed(self, error: ApiError) -> bytes:
        return self._request.dialect.failed(error)
