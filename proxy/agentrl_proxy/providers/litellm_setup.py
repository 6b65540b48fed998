"""Import LiteLLM, build its Router and warm it up; service.py sends through it.

LiteLLM takes 3 CPU-seconds and 170 MB to import. That happens before the gateway is ready, and only
where the configuration has a ``models`` table. Timeouts, retries and fallbacks are the Router's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Mapping
from typing import Any

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.protocols.conversion import translators


async def make_router(models: Mapping[str, ProviderModel]) -> Any:
    """Return the Router for these models. Holds its event loop for seconds, see
    background_loop.py."""
    translators()  # first, for the environment that it sets
    import litellm
    from litellm.router import Router

    litellm.suppress_debug_info = True  # it prints advice to stdout at every error
    litellm.turn_off_message_logging = True
    for name in ("LiteLLM", "LiteLLM Router"):
        # They quote errors, which may quote keys; our own log has cleaned ones.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Its DEBUG level quotes requests with most of their headers.
    logging.getLogger("openai").setLevel(logging.INFO)
    await _warm_up(litellm)
    own = ("model", "api_base", "api_key", "timeout", "num_retries")
    return Router(
        model_list=[
            {
                "model_name": name,
                "litellm_params": {**model.params, **{f: getattr(model, f) for f in own}},
            }
            for name, model in models.items()
        ],
        fallbacks=[
            {name: list(model.fallbacks)} for name, model in models.items() if model.fallbacks
        ],
        num_retries=0,  # each model has its own number
        # A name has one deployment: cooling it down would turn one failure into many.
        disable_cooldowns=True,
    )


async def close_connections() -> None:
    """Close LiteLLM's connections: uvloop waits for them as it closes."""
    if "litellm" not in sys.modules:  # it could not be imported
        return
    from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

    litellm: Any = sys.modules["litellm"]
    await close_litellm_async_clients()
    litellm.in_memory_llm_clients_cache.flush_cache()
    # Of streamed Anthropic calls. The client itself must stay open: LiteLLM has no other.
    if (shared := vars(litellm).get("module_level_aclient")) is not None:
        await shared.client._transport.aclose()


async def _warm_up(litellm: Any) -> None:
    """Let LiteLLM import what it imports at its first calls, which would stall the gateway."""
    hello = [{"role": "user", "content": "hello"}]
    with socket.socket() as unused:  # bound, not listening: connections to it are refused
        unused.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for more in ({"mock_response": "hello"}, {"api_base": base, "api_key": "none"}):
            with contextlib.suppress(Exception):
                await litellm.acompletion("openai/none", hello, max_retries=0, **more)
