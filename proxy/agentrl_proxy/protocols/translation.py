"""Translate requests of Anthropic's and the Responses API to chat completions, by LiteLLM.

Knows which functions of LiteLLM 1.105.3 do that; they are private, so litellm is pinned exactly.
LiteLLM reads every input item and content block that frameworks send. Only requests are translated
here: through LiteLLM answers lost ids, usage, the order of events, stop sequences, log-probs and
parallel tool calls, so responses.py and messages.py write them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from agentrl_proxy.errors import invalid

IMPORTING = threading.Lock()
"""Held while LiteLLM is imported: its modules import each other in circles, and a second thread
would find them half imported."""


async def load() -> None:
    """Import what the translations need, in a thread. It takes 3 s, once."""
    # Not by looking into sys.modules: a module is there while it is still being imported.
    if not _litellm.cache_info().currsize:
        await asyncio.to_thread(_litellm)


@cache
def _litellm() -> tuple[Any, Any]:
    """Return LiteLLM's translators of Messages and of Responses requests."""
    # Else LiteLLM fetches its price list over the network, and reads the folder's .env file.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    with IMPORTING:
        import litellm.responses.main  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter
        from litellm.responses.litellm_completion_transformation.transformation import (
            LiteLLMCompletionResponsesConfig,
        )

    return AnthropicAdapter(), LiteLLMCompletionResponsesConfig


def chat_of_messages(
    raw: dict[str, Any], provider_model: str | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Translate a Messages request.

    Args:
        provider_model: LiteLLM's name (provider/model) of the model that answers; None for our
            own. Thinking and cache marks are translated for this model.

    Returns:
        The chat request, and the full names of tools by the shortened ones.

    Raises:
        ApiError: LiteLLM cannot read the request (400).
    """
    ours = ("model", "stream", "thinking") if provider_model is None else ("model", "stream")
    known = {k: v for k, v in raw.items() if k not in ours}
    model, provider = _target(provider_model)
    with _reading("messages"):
        chat, names = _litellm()[0].translate_completion_input_params_with_tool_mapping(
            {**known, "model": model}, custom_llm_provider=provider
        )
    return {**chat, "model": raw["model"]}, names


def chat_of_response(raw: dict[str, Any], provider_model: str | None = None) -> dict[str, Any]:
    """Translate a Responses request; arguments and errors as with ``chat_of_messages``."""
    model, provider = _target(provider_model)
    with _reading("input"):
        chat = _litellm()[1].transform_responses_api_request_to_chat_completion_request(
            model=model, input=raw["input"], responses_api_request=raw, custom_llm_provider=provider
        )
    return {**chat, "model": raw["model"]}


def _target(provider_model: str | None) -> tuple[str, str | None]:
    """Return the model and provider that LiteLLM translates for.

    LiteLLM looks up there what a model can do. Ours has no entry in its tables, whatever name the
    client uses ("claude-…" would keep Anthropic's own fields).
    """
    if provider_model is None:
        return "policy", "agentrl"
    provider, slash, _ = provider_model.partition("/")
    return provider_model, provider if slash else None


@contextlib.contextmanager
def _reading(field: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # LiteLLM trusts its input, so it can raise anything
        text = f"{field} could not be read: {type(error).__name__}: {error}"
        raise invalid(field, text[:500]) from error
