"""LiteLLM's reading of Anthropic's and the Responses API's requests, as chat completions.

Knows which of LiteLLM's functions read what (litellm is pinned exactly, so they stay). Does not
know tokens, answers or HTTP. Only requests are translated here: LiteLLM reads every input item and
content block that frameworks send, and keeps up with them. The answers are ours, see messages.py
and responses.py: through LiteLLM 1.105.3 they lost ids, usage, the order of events, stop
sequences, log-probs and parallel tool calls, and a stream could not be refused before it began.
"""

from __future__ import annotations

import asyncio
import os
import threading
from functools import cache
from typing import Any, cast

from agentrl_proxy.errors import invalid

# LiteLLM asks here what a target can do; ours has no entry in its tables, whatever its clients
# call it ("claude-…" would keep Anthropic's own fields).
_MODEL = "policy"
_PROVIDER = "agentrl"

IMPORTING = threading.Lock()
"""Held while LiteLLM is imported: its modules import each other in circles, and two threads in
them at once find half of one."""


async def load() -> None:
    """Imports what the other functions need: 3 s, once, and only where a client asks for it."""
    # Not by looking into sys.modules: a module is there from the beginning of its import on, and
    # whoever came meanwhile would wait for it on the event loop.
    if not _import.cache_info().currsize:
        await asyncio.to_thread(_import)


@cache
def _import() -> None:
    # Without these it fetches its price list over the network and reads the folder's .env file.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    with IMPORTING:
        import litellm.responses.main  # noqa: F401  # pyright: ignore[reportUnusedImport]

        _anthropic_adapter()
        _responses_config()


def chat_of_messages(
    raw: dict[str, Any], elsewhere: str | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """A Messages request as a chat request, and the full names of tools it had to shorten.

    Args:
        elsewhere: LiteLLM's name (provider/model) of the model that answers, if it is not ours:
            what thinking, cache marks and the like become depends on it.
    """
    ours = ("model", "stream", "thinking") if elsewhere is None else ("model", "stream")
    known = {k: v for k, v in raw.items() if k not in ours}
    model, provider = _target(elsewhere)
    try:
        chat, names = _anthropic_adapter().translate_completion_input_params_with_tool_mapping(
            {**known, "model": model}, custom_llm_provider=provider
        )
    except Exception as error:  # it trusts its input: anything can be raised
        raise _unreadable("messages", error) from error
    return {**chat, "model": raw["model"]}, names


def chat_of_response(raw: dict[str, Any], elsewhere: str | None = None) -> dict[str, Any]:
    """A Responses request as a chat request; ``elsewhere`` as with ``chat_of_messages``."""
    config = _responses_config()
    model, provider = _target(elsewhere)
    try:
        return {
            **config.transform_responses_api_request_to_chat_completion_request(
                model=model,
                input=raw["input"],
                responses_api_request=cast(Any, raw),
                custom_llm_provider=provider,
            ),
            "model": raw["model"],
        }
    except Exception as error:
        raise _unreadable("input", error) from error


def _target(elsewhere: str | None) -> tuple[str, str | None]:
    """Model and provider, as LiteLLM's translations are told them."""
    if elsewhere is None:
        return _MODEL, _PROVIDER
    provider, slash, _ = elsewhere.partition("/")
    return elsewhere, provider if slash else None


def _unreadable(field: str, error: Exception) -> Exception:
    text = f"{field} could not be read: {type(error).__name__}: {error}"
    return invalid(field, text[:500])


def _anthropic_adapter() -> Any:
    from litellm.llms.anthropic.pass_through.adapters.transformation import AnthropicAdapter

    return AnthropicAdapter()


def _responses_config() -> Any:
    from litellm.responses.litellm_completion_transformation.transformation import (
        LiteLLMCompletionResponsesConfig,
    )

    return LiteLLMCompletionResponsesConfig
