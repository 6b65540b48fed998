"""Read requests for our own model or a provider's, in any of the protocols.

Both are read as chat requests: the same translation, our own dialects. LiteLLM gets a provider's by
``acompletion``. So ids, usage, records and the order of events are the same, too.

LiteLLM 1.105.3's other entrances do less: ``aresponses`` and ``anthropic_messages`` rewrite ids and
lose usage; ``atext_completion`` sends any ``openai/`` model to ``/v1/completions``, which chat
models do not serve. ``acompletion`` sends a ``text-completion-…/`` model one user message as the
prompt, to the letter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies, ProviderModel
from agentrl_proxy.errors import invalid
from agentrl_proxy.protocols.chat import (
    PROVIDER_CHAT,
    ChatRequest,
    chat_request,
    translated_request,
)
from agentrl_proxy.protocols.chat_objects import ChatDialect, Dialect
from agentrl_proxy.protocols.completions import (
    CHAT_ONLY,
    CompletionDialect,
    check_choices,
    check_completion,
    completion_requests,
)
from agentrl_proxy.protocols.embeddings import EMBEDDINGS, EmbeddingDialect, no_embeddings
from agentrl_proxy.protocols.fields import check_body
from agentrl_proxy.protocols.vendor_fields import refuse_unsupported
from agentrl_proxy.providers.service import ProviderRequest

Parts = list[ChatRequest] | list[ProviderRequest]
Reader = Callable[[dict[str, Any], ProviderModel | None], Parts]
"""Returns a checked request's parts, for our own model (None) or a provider's. Raises an ApiError
(400) that names the wrong field."""


def chat_parts(raw: dict[str, Any], provider: ProviderModel | None) -> Parts:
    if provider is None:
        return [chat_request(raw)]
    check_body(PROVIDER_CHAT, raw, ours=False)
    refuse_unsupported(raw, {}, ours=False, passed_on=PROVIDER_CHAT.properties)
    return [ProviderRequest(raw, raw, ChatDialect(raw), raw.get("n") or 1)]


def translated_parts(
    as_chat: Callable[..., tuple[dict[str, Any], Dialect]],
    raw: dict[str, Any],
    provider: ProviderModel | None,
) -> Parts:
    """Read a request that ``as_chat`` translates to the fields of chat completions."""
    if provider is None:
        return [translated_request(as_chat, raw)]
    return [ProviderRequest(raw, *as_chat(raw, provider.model))]


def completion_parts(
    deps: GatewayDependencies, raw: dict[str, Any], provider: ProviderModel | None
) -> Parts:
    """Read a request of ``/v1/completions``: a part for each prompt."""
    if provider is None:
        return completion_requests(raw, deps.renderer, deps.context_length)
    check_completion(raw, ours=False)
    echo, logprobs, n = bool(raw.get("echo")), raw.get("logprobs"), raw.get("n") or 1
    if echo and logprobs is not None:
        raise invalid("echo", "echo and logprobs together ask for the log-probs of the prompt, "
                      "which providers do not give; send one of them",
                      code="unsupported_parameter")  # fmt: skip
    prompts = [raw["prompt"]] if isinstance(raw["prompt"], str) else raw["prompt"]
    check_choices(len(prompts), n)
    dialect = CompletionDialect(raw, n, prompts if echo else [])
    chat = {k: v for k, v in raw.items() if k not in CHAT_ONLY | {"logprobs"}}
    if logprobs is not None:
        in_text = provider.model.startswith("text-completion-")  # there logprobs is a number
        chat |= {"logprobs": logprobs} if in_text else {"logprobs": True, "top_logprobs": logprobs}
    chats = [{**chat, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return [ProviderRequest(raw, one, dialect, n, i * n) for i, one in enumerate(chats)]


def embedding_parts(raw: dict[str, Any], provider: ProviderModel | None) -> Parts:
    check_body(EMBEDDINGS, raw)
    if provider is None:
        raise no_embeddings(raw["model"])
    if raw.get("stream"):
        raise invalid("stream", "embeddings are not streamed; leave stream out")
    texts = 1 if isinstance(raw["input"], str) else len(raw["input"])
    return [ProviderRequest(raw, raw, EmbeddingDialect({}), texts=texts)]
