"""Translate requests of Anthropic's and the Responses API to a provider's model, by LiteLLM.

Knows which functions of LiteLLM 1.105.3 do that; they are private, so litellm is pinned exactly.
LiteLLM reads every input item and content block that frameworks send to providers (our own model's
are conversion.py's). Only requests are translated here: through LiteLLM answers lost ids, usage,
the order of events, stop sequences, log-probs and parallel tool calls, so responses.py and
messages.py write them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from agentrl_proxy.errors import invalid


@cache
def translators() -> tuple[Any, Any]:
    """Import LiteLLM, which takes seconds, and return its translators of Messages and of Responses
    requests."""
    # Else LiteLLM fetches its price list over the network, and reads the folder's .env file.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    import litellm.responses.main  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter
    from litellm.responses.litellm_completion_transformation.transformation import (
        LiteLLMCompletionResponsesConfig,
    )

    return AnthropicAdapter(), LiteLLMCompletionResponsesConfig


def chat_of_messages(
    raw: dict[str, Any], provider_model: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Translate a Messages request.

    Args:
        provider_model: LiteLLM's name (provider/model) of the model that answers. Thinking and
            cache marks are translated for this model.

    Returns:
        The chat request, and the full names of tools by the shortened ones.

    Raises:
        ApiError: LiteLLM cannot read the request (400).
    """
    known = {k: v for k, v in raw.items() if k not in ("model", "stream")}
    provider = _provider(provider_model)
    with _reading("messages"):
        chat, names = translators()[0].translate_completion_input_params_with_tool_mapping(
            {**known, "model": provider_model}, custom_llm_provider=provider
        )
    return {**chat, "model": raw["model"]}, names


def chat_of_response(raw: dict[str, Any], provider_model: str) -> dict[str, Any]:
    """Translate a Responses request; arguments and errors as with ``chat_of_messages``."""
    provider = _provider(provider_model)
    with _reading("input"):
        chat = translators()[1].transform_responses_api_request_to_chat_completion_request(
            model=provider_model,
            input=raw["input"],
            responses_api_request=raw,
            custom_llm_provider=provider,
        )
    return {**chat, "model": raw["model"]}


def _provider(provider_model: str) -> str | None:
    provider, slash, _ = provider_model.partition("/")
    return provider if slash else None


@contextlib.contextmanager
def _reading(field: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # LiteLLM trusts its input, so it can raise anything
        text = f"{field} could not be read: {type(error).__name__}: {error}"
        raise invalid(field, text[:500]) from error
