"""Call providers' models through LiteLLM. A judge's call leaves the gateway here, nowhere else.

Knows LiteLLM's Router, its settings and its token counter. Does not know rows or protocols.
Timeouts, retries and fallbacks are the Router's. LiteLLM takes 3 CPU-seconds and 170 MB to import,
so that happens in a thread, and only where the configuration has a ``models`` table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from agentrl_proxy.dependencies import ProviderModel
from agentrl_proxy.errors import ApiError, invalid, unavailable
from agentrl_proxy.protocols.translation import IMPORTING
from agentrl_proxy.providers.failures import is_python_error, without_cause
from agentrl_proxy.providers.redaction import Redaction

log = logging.getLogger("agentrl.proxy")


class ProviderClient:
    """LiteLLM's Router for a table of models, imported in the background."""

    def __init__(self, models: Mapping[str, ProviderModel], redaction: Redaction) -> None:
        self._models = models
        self._redaction = redaction
        self._router: asyncio.Task[Any] | None = None

    def start(self) -> None:
        """Start importing LiteLLM, so that the first request need not wait for it."""
        if self._models:
            self._router = asyncio.create_task(asyncio.to_thread(make_router, self._models))

    async def complete(
        self, model: str, fields: Mapping[str, Any], on_sent: Callable[[], None]
    ) -> Any:
        """Request a chat completion.

        Args:
            fields: LiteLLM's arguments.
            on_sent: called when LiteLLM sends the request to the provider.

        Returns:
            LiteLLM's response, or its stream of chunks.

        Raises:
            ApiError: LiteLLM does not start (503).
            Exception: any of LiteLLM's; see failures.py.
        """
        router = await self._ready_router()

        def note(details: dict[str, Any]) -> None:
            if details.get("log_event_type") == "pre_api_call":
                on_sent()

        return await router.acompletion(model=model, logger_fn=note, **fields)

    async def count_tokens(self, name: str, raw: Mapping[str, Any], chat: Mapping[str, Any]) -> int:
        """Count the tokens of a prompt: by the provider's counter where it has one, else LiteLLM's
        estimate.

        An Anthropic model with an ``api_base`` is estimated: LiteLLM's counter would send the key
        and the prompt to api.anthropic.com.

        Args:
            raw: the Messages request, which Anthropic's counter reads.
            chat: the same as chat completions' fields.

        Raises:
            ApiError: LiteLLM cannot read the prompt (400) or does not start (503), the count took
                too long (504) or failed (502).
        """
        await self._ready_router()
        import litellm

        model = self._models[name]
        anthropic = model.model.startswith("anthropic/")
        said = raw if anthropic else chat
        in_time = asyncio.timeout(model.timeout)
        failed = f"the tokens of a prompt to {name!r} were not counted"
        try:
            async with in_time:
                if anthropic and model.api_base is not None:
                    count = await asyncio.to_thread(
                        litellm.token_counter,
                        model=model.model,
                        messages=chat["messages"],
                        tools=chat.get("tools"),
                    )
                else:
                    answer = await litellm.acount_tokens(
                        model.model,
                        messages=said["messages"],
                        tools=said.get("tools"),
                        system=raw.get("system") if anthropic else None,
                        api_key=model.api_key,
                        api_base=model.api_base,
                    )
                    count = answer.total_tokens
        except Exception as error:
            if in_time.expired():
                message = f"{failed} within {model.timeout:g} s"
                raise ApiError(504, message, kind="server_error", code="provider_timeout") from None
            message = f"{failed}: {self._redaction.clean(f'{type(error).__name__}: {error}')}"
            if is_python_error(error):  # litellm falls back to its own counter, which reads this
                raise invalid(None, message) from None
            raise ApiError(502, message, kind="server_error", code="provider_error") from None
        if count <= 0:  # LiteLLM's number for an answer without one
            message = f"the provider of {name!r} counted no tokens in a prompt"
            raise ApiError(502, message, kind="server_error", code="provider_error")
        return count

    async def _ready_router(self) -> Any:
        """
        Raises:
            ApiError: LiteLLM cannot be imported, or rejects the configuration (503).
        """
        router = self._router
        if router is None or (router.done() and router.exception() is not None):
            self.start()  # a failure may pass
        assert self._router is not None
        try:
            return await asyncio.shield(self._router)
        except Exception as error:
            said = self._redaction.clean(f"{type(error).__name__}: {error}")
            log.error("LiteLLM does not start", exc_info=without_cause(error, said))
            message = f"LiteLLM, which calls providers' models, does not start: {said}"
            raise unavailable(message, "other_models_unavailable") from None


def make_router(models: Mapping[str, ProviderModel]) -> Any:
    """Import LiteLLM, make its Router and warm it up. Takes seconds: call it in a thread."""
    with IMPORTING:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import fetches a file
        import litellm
        from litellm.router import Router

        litellm.suppress_debug_info = True  # it prints advice to stdout at every error
        litellm.turn_off_message_logging = True
        for name in ("LiteLLM", "LiteLLM Router"):
            # They quote errors, which may quote keys; our own log has cleaned ones.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        # Its DEBUG level quotes requests with most of their headers.
        logging.getLogger("openai").setLevel(logging.INFO)
        asyncio.run(_warm_up(litellm))
        return Router(
            model_list=[_deployment(name, model) for name, model in models.items()],
            fallbacks=[
                {name: list(model.fallbacks)} for name, model in models.items() if model.fallbacks
            ],
            num_retries=0,  # each model has its own number
            # A name has one deployment: cooling it down would turn one failure into many.
            disable_cooldowns=True,
        )


def _deployment(name: str, model: ProviderModel) -> dict[str, Any]:
    own = ("model", "api_base", "api_key", "timeout", "num_retries")
    params = {**model.params, **{field: getattr(model, field) for field in own}}
    return {"model_name": name, "litellm_params": params}


async def _warm_up(litellm: Any) -> None:
    """Let LiteLLM import what it imports at its first calls. On the gateway's event loop that
    would stall all streams for half a second or more."""
    hello = [{"role": "user", "content": "hello"}]
    with socket.socket() as unused:  # bound, not listening: connections to it are refused
        unused.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with contextlib.suppress(Exception):
            await litellm.acompletion(
                model="openai/none", messages=hello, api_base=base, api_key="none", max_retries=0
            )
    with contextlib.suppress(Exception):
        mock: dict[str, Any] = {"model": "openai/none", "mock_response": "hello"}
        await litellm.acompletion(messages=hello, **mock)
        async for _ in await litellm.acompletion(messages=hello, stream=True, **mock):
            pass
