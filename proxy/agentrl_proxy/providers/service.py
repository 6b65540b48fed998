"""Send requests to providers' models (a judge, an answerer) through LiteLLM, and record them.

Knows LiteLLM's Router, and what a call leaves behind: rows without tokens, which never train. The
row of a request for embeddings has no answer either: vectors may be megabytes. So a client's retry
asks again. Does not know which protocol the client speaks (requests.py).

- A model that stands in for the policy is sampled as the rollout's settings force. If the provider
  refuses a forced setting (reasoning models take temperature 1 only), it is asked again without it,
  and the row names it in ``params["not_enforced"]``.
- A client that streams gets a provider's chunks as they come. Requests for several choices, of
  which LiteLLM streams one finish reason, and to text completion models, of which it does not say
  whether a streamed usage is an estimate, are answered whole and written as a stream.
- The usage that a provider reports counts in the rollout's budget. LiteLLM invents one where the
  provider reports none; that is not recorded, and ``params["usage_unknown"]`` says why.
- A provider's key goes to that provider only. Of a request's fields only OpenAI's own are passed on
  (LiteLLM would take an ``api_base`` from it), and error texts are cleaned of secrets.
- LiteLLM's coroutines run on a loop of their own (background_loop.py), all others on the gateway's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies, GatewayStats, ProviderModel
from agentrl_proxy.errors import ApiError, invalid, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import PROVIDER_CHAT
from agentrl_proxy.protocols.embeddings import EMBEDDINGS
from agentrl_proxy.providers import litellm_setup
from agentrl_proxy.providers.background_loop import BackgroundLoop
from agentrl_proxy.providers.failures import api_error
from agentrl_proxy.providers.redaction import Redaction
from agentrl_proxy.providers.streaming import StreamedAnswer, normalized
from agentrl_proxy.requests.lifecycle import ClientRequest, OpenCall
from agentrl_proxy.requests.recording import latest_state, open_calls
from agentrl_proxy.server.sse import Write
from agentrl_tracer.schemas import AttemptState, Call, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

# Other fields are ignored, as with our own models; the configuration's ``params`` may set them.
_PASSED_ON = PROVIDER_CHAT.properties.keys() - {
    "model", "stream", "stream_options", "return_token_ids",
}  # fmt: skip
_PASSED_ON_TO_EMBED = EMBEDDINGS.properties.keys() - {"model"}
_RECORDED = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """A checked request to a provider's model, or one of its bare prompts."""

    raw: dict[str, Any]  # the wire request
    chat: Mapping[str, Any]  # the same in the fields of chat completions
    dialect: chat_objects.Dialect
    n: int = 1
    first_choice: int = 0  # index in the response of this prompt's first choice
    texts: int = 0  # to embed; 0: it asks for a chat completion

    @property
    def name(self) -> str:
        return self.raw["model"]


@dataclass(slots=True)
class ProviderCall(OpenCall):
    """An accepted request to a provider's model."""

    request: ProviderRequest
    fields: dict[str, Any]  # LiteLLM's arguments
    rows: list[Call]  # one per choice
    forced: set[str]  # fields that the rollout's settings force
    params: dict[str, Any] = field(  # added to the rows' params
        default_factory=lambda: {"usage_unknown": "the answer did not come to its end"}
    )
    streamed: StreamedAnswer | None = None  # if the provider is asked for a stream
    sent: bool = False  # whether LiteLLM has sent it to the provider
    usage_told: bool = True  # by the provider; else LiteLLM made it up
    notes: dict[str, Any] = field(default_factory=dict[str, Any])  # LiteLLM's about the answer

    def log_event(self, details: dict[str, Any]) -> None:
        """Take an event of LiteLLM's log."""
        self.sent |= details.get("log_event_type") == "pre_api_call"


@dataclass(eq=False, repr=False)
class ProviderService:
    """Answers for the models of the configuration's ``models`` table."""

    deps: GatewayDependencies
    stats: GatewayStats

    def __post_init__(self) -> None:
        self._models = self.deps.provider_models
        self._redaction = Redaction(self._models.values())
        self._litellm: BackgroundLoop | None = None
        self._router: asyncio.Task[Any] | None = None
        self._refused: dict[str, set[str]] = {}  # forced settings that a model refuses

    async def start(self) -> None:
        """Import LiteLLM if there are models for it. Its import would stall running requests."""
        if self._models:
            self._litellm = BackgroundLoop(litellm_setup.close_connections)
            with suppress(ApiError):  # logged; the next request tries again
                await self.ready()
            gc.freeze()  # a full collection among LiteLLM's objects would stop requests for 0.2 s

    async def close(self) -> None:
        if self._litellm is not None:
            await self._litellm.close()

    def model_of(self, raw: Mapping[str, Any]) -> ProviderModel | None:
        """Return the provider's model that a request names, if it does."""
        name = raw.get("model")
        return self._models.get(name) if isinstance(name, str) else None

    async def accept(self, request: ProviderRequest, client: ClientRequest) -> ProviderCall:
        # Its tokens are known only when the provider has answered.
        _, seq = await client.take_turn(request.n, 0)
        forced = dict[str, Any]()
        if client.memory is not None and self._models[request.name].is_policy:
            forced = (client.memory.attempt.sampling or {}).get("force") or {}
        chat = {**request.chat, **forced}
        passed_on = _PASSED_ON_TO_EMBED if request.texts else _PASSED_ON
        fields = {key: chat[key] for key in passed_on & chat.keys() if chat[key] is not None}
        if request.n == 1:
            fields.pop("n", None)
        params = {"n": request.n} | {k: chat[k] for k in _RECORDED if chat.get(k) is not None}
        if request.texts:
            params = {"embeddings": request.texts}
        skip_reason = SkipReason.NOT_TRAINABLE_MODEL
        rows = open_calls(client, request, seq, params, skip_reason=skip_reason)
        self.stats.accepted += request.n
        self.stats.other_models += request.n
        return ProviderCall(client, request, fields, rows, forced.keys() & fields.keys())

    async def generate(self, call: ProviderCall, write: Write | None) -> dict[str, Any]:
        request = call.request
        in_text = self._models[request.name].model.startswith("text-completion-")
        if write is not None and request.n == 1 and not in_text:
            call.streamed = StreamedAnswer(request.first_choice)
            # Usage is recorded whether or not the client wants it.
            call.fields |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            litellm, router = await self.ready()
            if write is None or call.streamed is None:
                said = await litellm.run(self._whole(router, call))
                if request.texts:
                    return _chat_completion(call, said, []) | {"data": said["data"]}
                if not (choices := said["choices"]):  # as content filters give
                    message = f"the provider of {request.name!r} gave no choice"
                    raise ApiError(502, message, kind="server_error", code="provider_error")
                first = request.first_choice
                choices = [normalized(one, one.get("index", 0) + first) for one in choices]
                for one in choices:
                    one["message"] = {"content": None, **one["message"]}
            else:
                async with aclosing(litellm.iterate(self._chunks(router, call))) as chunks:
                    await _relay(chunks, call, call.streamed, write)
                said, choices = call.streamed.said, call.streamed.choices
            return _chat_completion(call, said, choices)
        except Exception as error:  # the cause would quote the provider
            raise self._failed(call, error) from None

    def last_chunks(self, call: ProviderCall, response: dict[str, Any]) -> list[bytes]:
        if call.streamed is not None:
            return call.streamed.held
        return [*chat_objects.replayed(call.request.dialect, response)]

    def answered(self, call: ProviderCall, response: dict[str, Any]) -> None: ...

    async def record(
        self, call: ProviderCall, state: CallState, response: dict[str, Any] | None = None
    ) -> AttemptState | None:
        if response is None and call.streamed is not None:  # it broke off: keep what has come
            response = chat_objects.completion(call.client.heading, call.streamed.choices, {})
        choices = {one["index"]: one for one in (response or {}).get("choices", ())}
        not_enforced = call.params.get("not_enforced", ())
        rows: list[Call] = []
        for row in call.rows:
            one = choices.get(row.choice)
            missing = one is None and state is CallState.COMPLETED and not call.request.texts
            params = {k: v for k, v in row.params.items() if k not in not_enforced}
            rows.append(
                replace(
                    row,
                    state=CallState.ERROR if missing else state,
                    error="the provider gave no such choice" if missing else call.error or None,
                    finish_reason=None if one is None else one["finish_reason"],
                    params={**params, **call.params},
                    response=None if one is None else {**(response or {}), "choices": [one]},
                    ended_at=time.time(),
                )
            )
        return await latest_state([self.deps.writer.finish(row) for row in rows])

    def _failed(self, call: ProviderCall, error: Exception) -> ApiError:
        """Record why a call failed, and return the client's error."""
        refusal, status = api_error(
            error, call.request.name, sent=call.sent, clean=self._redaction.clean
        )
        if status is not None:
            call.params["error_status"] = status
        log.warning("%s: %s", call.client.heading.id, refusal.message)
        call.error = refusal.message
        return refusal

    async def count(self, request: ProviderRequest) -> int:
        """Estimate the tokens of a prompt with LiteLLM's counter. The provider is not asked.

        Raises:
            ApiError: LiteLLM cannot read the prompt (400) or does not start (503).
        """
        await self.ready()
        import litellm

        model, chat = self._models[request.name].model, request.chat
        try:
            return await asyncio.to_thread(
                litellm.token_counter, model, messages=chat["messages"], tools=chat.get("tools")
            )
        except Exception as error:
            said = self._redaction.clean(f"{type(error).__name__}: {error}")
            message = f"the tokens of a prompt to {request.name!r} were not counted: {said}"
            raise invalid(None, message) from None

    # --- on LiteLLM's loop

    async def _whole(self, router: Any, call: ProviderCall) -> dict[str, Any]:
        answer = await self._send(router, call)
        call.notes = _hidden(answer)
        return answer.model_dump(exclude_none=True)

    async def _chunks(self, router: Any, call: ProviderCall) -> AsyncGenerator[dict[str, Any]]:
        chunks = await self._send(router, call)
        async with aclosing(chunks):  # the provider's connection, not at garbage collection
            async for chunk in chunks:
                yield chunk.model_dump(exclude_none=True)
        call.notes = _hidden(chunks)
        # LiteLLM's last chunk always has a usage; the provider's own chunks have only its.
        own = getattr(chunks, "chunks", ())
        call.usage_told = any(getattr(chunk, "usage", None) for chunk in own)

    async def _send(self, router: Any, call: ProviderCall) -> Any:
        """Send a call to its provider, without the forced settings that its model refuses."""
        name = call.request.name
        refused = self._refused.setdefault(name, set())
        while True:
            left_out = call.forced & refused
            if left_out:
                call.params["not_enforced"] = sorted(left_out)
            fields = {key: value for key, value in call.fields.items() if key not in left_out}
            send = router.aembedding if call.request.texts else router.acompletion
            try:
                return await send(model=name, logger_fn=call.log_event, **fields)
            except Exception as error:
                said = str(getattr(error, "message", None) or error)
                found = {one for one in call.forced & fields.keys() if one in said}
                if not found or getattr(error, "status_code", None) != 400:
                    raise
                log.warning(
                    "the model %r refuses %s as it is set for evaluation: it is sampled at its own",
                    name,
                    " and ".join(sorted(found)),
                )
                refused |= found

    # --- on the gateway's loop

    async def ready(self) -> tuple[BackgroundLoop, Any]:
        """Return LiteLLM's loop and Router.

        Raises:
            ApiError: LiteLLM is not importable or rejects the configuration (503).
        """
        assert self._litellm is not None
        router = self._router
        if router is None or (router.done() and router.exception() is not None):
            making = self._litellm.run(litellm_setup.make_router(self._models))
            router = self._router = asyncio.create_task(making)  # again: a failure may pass
        try:
            return self._litellm, await asyncio.shield(router)
        except Exception as error:
            said = self._redaction.clean(f"{type(error).__name__}: {error}")
            message = f"LiteLLM, which calls providers' models, does not start: {said}"
            log.error(message)
            raise unavailable(message, "other_models_unavailable") from None


async def _relay(
    chunks: AsyncIterator[dict[str, Any]],
    call: ProviderCall,
    streamed: StreamedAnswer,
    write: Write,
) -> None:
    """Send chunks to the client as they come. Those from the finish reason on are held."""
    async for chunk in chunks:
        choice = streamed.add(chunk)
        if choice is None or not (choice["delta"] or choice["finish_reason"]):
            continue
        call.client.heading.fingerprint = streamed.said.get("system_fingerprint")
        data = call.request.dialect.chunk(call.client.heading, choice)
        if streamed.held or choice["finish_reason"]:
            streamed.held.append(data)
        elif data:
            await write(data)
    if not call.usage_told:
        streamed.said.pop("usage", None)


def _hidden(answer: Any) -> dict[str, Any]:
    """Return what LiteLLM notes beside an answer or stream: its cost, retries and fallbacks."""
    return getattr(answer, "_hidden_params", None) or {}


def _chat_completion(
    call: ProviderCall, said: dict[str, Any], choices: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the gateway's chat completion, and note what LiteLLM and the provider say of it.

    Args:
        said: the fields of the answer or stream.
    """
    call.client.heading.fingerprint = said.get("system_fingerprint")
    usage = said.get("usage") or {}
    if not usage.get("total_tokens"):  # LiteLLM's zeros for a usage that was not reported
        usage = {}
    extra = call.notes.get("additional_headers") or {}
    notes = {
        "usage": usage or None,
        "usage_unknown": None if usage else "the provider did not tell it",
        "cost": call.notes.get("response_cost"),
        "provider_model": said.get("model"),
        "provider_id": said.get("id"),
        "retries": extra.get("x-litellm-attempted-retries"),
        "fallbacks": extra.get("x-litellm-attempted-fallbacks"),
    }
    del call.params["usage_unknown"]
    call.params |= {key: value for key, value in notes.items() if value is not None}
    memory = call.client.memory
    if memory is not None and memory.spent is not None:
        memory.spent.tokens += usage.get("total_tokens", 0)
    return chat_objects.completion(call.client.heading, choices, usage)
