"""Read requests to providers' models, in any of the protocols, as chat requests for LiteLLM.

Knows how each protocol's request becomes chat fields, and which dialect writes the answer. All
protocols go the way of our own model's: the same translation, ``acompletion``, our own dialects. So
ids, usage, records and the order of events are the same, too.

LiteLLM 1.105.3's other entrances do less: ``aresponses`` and ``anthropic_messages`` rewrite ids and
lose usage; ``atext_completion`` sends any ``openai/`` model to ``/v1/completions``, which chat
models do not serve. ``acompletion`` sends a ``text-completion-…/`` model one user message as the
prompt, to the letter.
"""

from __future__ import annotations

from typing import Any

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.errors import invalid
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
from agentrl_proxy.providers.service import ProviderRequest


def provider_chat_request(raw: dict[str, Any]) -> ProviderRequest:
    """Read a request of ``/v1/chat/completions``.

    Raises:
        ApiError: a field has a type that LiteLLM cannot read (400).
    """
    check_body(PROVIDER_CHAT, raw, ours=False)
    return ProviderRequest(raw, raw, chat_objects.ChatDialect(raw), raw.get("n") or 1)


def provider_response_request(raw: dict[str, Any], model: ProviderModel) -> ProviderRequest:
    """Read a request of ``/v1/responses``; raises like ``provider_chat_request``."""
    return ProviderRequest(raw, *responses_as_chat(raw, model.model))


def provider_message_request(
    raw: dict[str, Any], model: ProviderModel, *, counted: bool = False
) -> ProviderRequest:
    """Read a request of ``/v1/messages`` or its ``count_tokens``; raises like the others."""
    return ProviderRequest(raw, *messages_as_chat(raw, model.model, counted=counted))


def provider_completion_requests(
    raw: dict[str, Any], model: ProviderModel
) -> list[ProviderRequest]:
    """Read a request of ``/v1/completions``: a request for each prompt.

    Raises:
        ApiError: a field is wrong, or unsupported with providers (400).
    """
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
        in_text = model.model.startswith("text-completion-")  # there logprobs is a number
        chat |= {"logprobs": logprobs} if in_text else {"logprobs": True, "top_logprobs": logprobs}
    chats = [{**chat, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return [ProviderRequest(raw, one, dialect, n, i * n) for i, one in enumerate(chats)]
