"""Keep each attempt's answers out of other attempts' caches.

An agent that is answered from a cache asks the model nothing, so its rollout has no token to train
on. The key under which a framework caches an answer therefore names the attempt, whatever keeps the
answers: memory that rollouts share, a file, a server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import wrapt

from agentrl_tracer.context import current_rollout
from agentrl_tracer.import_hooks import on_import

# Module → the method that returns the key of an answer.
_KEYS = {
    "dspy.clients.cache": "Cache.cache_key",
    "litellm.caching.caching": "Cache.get_cache_key",
    "langchain_core.language_models.chat_models": "BaseChatModel._get_llm_string",
}


def keep_caches_apart() -> None:
    """Name the attempt in the keys of DSPy, LiteLLM and LangChain. Call once per process."""
    for module, method in _KEYS.items():
        on_import(module, partial(_name_attempt, method))


def _name_attempt(method: str, module: ModuleType) -> None:
    def key(
        wrapped: Callable[..., str], _cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        found, rollout = wrapped(*args, **kwargs), current_rollout()
        # LiteLLM hands a key that it computed before back to this method.
        if rollout is None or found.endswith(rollout.attempt_id):
            return found
        return f"{found}-{rollout.attempt_id}"

    wrapt.wrap_function_wrapper(module, method, key)
