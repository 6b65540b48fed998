"""LiteLLM's Router for the configuration's table of other models.

Knows LiteLLM's settings and how to import it (3 CPU-seconds, 170 MB) without standing in anybody's
way. Does not know requests, answers or rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.protocols.translation import IMPORTING


def make_router(models: Mapping[str, ProviderModel]) -> Any:
    """A Router that has been imported, and warmed up. Takes seconds: call it in a thread."""
    with IMPORTING:
        return _router(models)


def _router(models: Mapping[str, ProviderModel]) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import fetches a file
    import litellm
    from litellm.router import Router

    litellm.suppress_debug_info = True  # it prints advice to stdout at every error
    litellm.turn_off_message_logging = True
    for name in ("LiteLLM", "LiteLLM Router"):
        # They quote errors, which may quote keys; ours says what went wrong, cleaned.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Its DEBUG quotes requests, with all headers but those that it knows to be secret.
    logging.getLogger("openai").setLevel(logging.INFO)
    asyncio.run(_rehearse(litellm))
    deployments = [
        {
            "model_name": name,
            "litellm_params": {
                **one.params,
                "model": one.model,
                "api_base": one.api_base,
                "api_key": one.api_key,
                "timeout": one.timeout,
                "num_retries": one.num_retries,
            },
        }
        for name, one in models.items()
    ]
    return Router(
        model_list=deployments,
        fallbacks=[{name: list(one.fallbacks)} for name, one in models.items() if one.fallbacks],
        num_retries=0,  # each model says its own
        # A name has one deployment: cooling it down would turn one failure into many.
        disable_cooldowns=True,
    )


async def _rehearse(litellm: Any) -> None:
    """Lets LiteLLM import what it imports at its first calls: on the gateway's event loop that
    would stall everybody's streams for half a second and more."""
    hello = [{"role": "user", "content": "hello"}]
    nobody = socket.socket()  # bound, not listening: connections to it are refused
    with nobody:
        nobody.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with contextlib.suppress(Exception):
            await litellm.acompletion(
                model="openai/nobody", messages=hello, api_base=base, api_key="none", max_retries=0
            )
    with contextlib.suppress(Exception):
        mock: dict[str, Any] = {"model": "openai/nobody", "mock_response": "hello"}
        await litellm.acompletion(messages=hello, **mock)
        async for _ in await litellm.acompletion(messages=hello, stream=True, **mock):
            pass
