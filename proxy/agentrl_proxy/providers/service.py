"""Answer requests to providers' models (a judge, an answerer), and record them.

Knows what such a call leaves behind: rows without tokens, which never train. Does not know how it
is sent (litellm.py), nor which protocol the client speaks (requests.py).

- A model that stands in for the policy is sampled as the rollout's settings force. If the provider
  refuses a forced setting (reasoning models take temperature 1 only), it is asked again without it,
  and the row names it in ``params["not_enforced"]``.
- The usage that a provider reports counts in the rollout's budget. LiteLLM invents one where the
  provider reports none; that is not recorded, and ``params["usage_unknown"]`` says why.
- A provider's key goes to that provider only. Of a request's fields only OpenAI's own are passed on
  (LiteLLM would take an ``api_base`` from it), and error texts are cleaned of secrets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies, ProviderModel
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import PROVIDER_CHAT
from agentrl_proxy.providers.failures import api_error
from agentrl_proxy.providers.litellm import ProviderClient
from agentrl_proxy.providers.redaction import Redaction
from agentrl_proxy.providers.streaming import StreamedAnswer, normalized
from agentrl_proxy.requests.attempts import AttemptMemories
from agentrl_proxy.requests.auth import Caller, ask
from agentrl_proxy.requests.lifecycle import OpenCall
from agentrl_proxy.requests.rate_limits import Admission, Slot
from agentrl_proxy.requests.recording import latest_state, open_calls
from agentrl_proxy.server.sse import Write
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.schemas import AttemptState, Call, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

# Other fields are ignored, as with our own models; the configuration's ``params`` may set them.
_PASSED_ON = PROVIDER_CHAT.properties.keys() - {
    "model", "stream", "stream_options", "return_token_ids",
}  # fmt: skip
_RECORDED = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """A checked request to a provider's model, or one of its bare prompts."""

    name: str
    chat: Mapping[str, Any]  # the request in the fields of chat completions
    raw: dict[str, Any]  # the wire request
    dialect: chat_objects.Dialect
    stream: bool
    n: int = 1
    first_choice: int = 0  # index in the response of this prompt's first choice


@dataclass(slots=True)
class ProviderCall(OpenCall):
    """An accepted request to a provider's model."""

    name: str
    fields: dict[str, Any]  # LiteLLM's arguments
    dialect: chat_objects.Dialect
    first_choice: int
    rows: list[Call]  # one per choice
    forced: tuple[str, ...]  # fields that the rollout's settings force
    params: dict[str, Any] = field(default_factory=dict[str, Any])  # added to the rows' params
    streamed: StreamedAnswer | None = None
    last_chunks: list[bytes] = field(default_factory=list[bytes])
    sent: bool = False  # whether LiteLLM has sent it to the provider

    def on_sent(self) -> None:
        self.sent = True


class ProviderService:
    """Answers for the models of the configuration's ``models`` table."""

    def __init__(
        self,
        deps: GatewayDependencies,
        attempts: AttemptMemories,
        stats: GatewayStats,
        admission: Admission,
    ) -> None:
        self._deps = deps
        self._attempts = attempts
        self._stats = stats
        self._admission = admission
        self._models = deps.provider_models
        self._redaction = Redaction(self._models.values())
        self._client = ProviderClient(self._models, self._redaction)
        self._refused: dict[str, set[str]] = {}  # forced settings that a model refuses

    def start(self) -> None:
        self._client.start()

    def model_of(self, raw: Mapping[str, Any]) -> ProviderModel | None:
        """Return the provider's model that a request names, if it does."""
        name = raw.get("model")
        return self._models.get(name) if isinstance(name, str) else None

    async def accept(
        self,
        request: ProviderRequest,
        heading: chat_objects.Heading,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> ProviderCall:
        """Open the rows of a request.

        Raises:
            ApiError: the gateway refuses it. Then it has no row.
        """
        slot = self._admission.enter(0)
        try:
            return await self._accept(request, heading, caller, headers, slot)
        except BaseException:
            slot.leave()
            raise

    async def _accept(
        self,
        request: ProviderRequest,
        heading: chat_objects.Heading,
        caller: Caller,
        headers: Mapping[str, str],
        slot: Slot,
    ) -> ProviderCall:
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        seq = 0
        if attempt is not None and memory is not None:
            # Its tokens are known only when the provider has answered.
            await self._admission.within_budget(attempt, memory, request.n, 0)
            store, attempt_id = self._deps.store, attempt.attempt_id
            seq = await memory.take_seq(lambda: ask(store, store.next_seq, attempt_id))
        forced = self._forced(request, caller)
        chat = {**request.chat, **forced}
        fields = {key: chat[key] for key in _PASSED_ON & chat.keys() if chat[key] is not None}
        if request.stream and _can_stream(self._models[request.name], request.n):
            # Usage is recorded whether or not the client wants it.
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        rows = open_calls(
            self._deps.writer,
            response_id=heading.id,
            choices=range(request.first_choice, request.first_choice + request.n),
            run_id=self._deps.run_id,
            attempt=attempt,
            seq=seq,
            model=request.name,
            request=request.raw,
            headers=headers,
            params={"n": request.n} | {k: chat[k] for k in _RECORDED if chat.get(k) is not None},
            skip_reason=SkipReason.NOT_TRAINABLE_MODEL,
        )
        self._stats.accepted += request.n
        self._stats.other_models += request.n
        return ProviderCall(
            caller, memory, heading, slot, request.name, fields, request.dialect,
            request.first_choice, rows, tuple(forced),
        )  # fmt: skip

    def _forced(self, request: ProviderRequest, caller: Caller) -> dict[str, Any]:
        """Return the sampling that the rollout forces on a model in the policy's place."""
        if caller.attempt is None or not self._models[request.name].is_policy:
            return {}
        forced: Mapping[str, Any] = (caller.attempt.sampling or {}).get("force") or {}
        return {name: value for name, value in forced.items() if name in _PASSED_ON}

    async def count(self, request: ProviderRequest) -> int:
        """Count the tokens of a Messages request's prompt; see ``ProviderClient.count_tokens``.

        Raises:
            ApiError: there are too many requests (429), or the count failed.
        """
        slot = self._admission.enter(0)
        try:
            return await self._client.count_tokens(request.name, request.raw, request.chat)
        finally:
            slot.leave()

    async def generate(self, call: ProviderCall, write: Write | None) -> dict[str, Any]:
        """Call the provider. With ``write``, chunks leave as they come in, except the last ones.

        Raises:
            ApiError: the provider refused or failed.
        """
        call.params["usage_unknown"] = "the answer did not come to its end"
        try:
            answer = await self._complete(call)
            if write is not None and "stream" in call.fields:
                response = await self._relay(answer, call, write)
            else:
                response = _whole(answer, call)
                if write is not None:
                    call.last_chunks = [*chat_objects.replayed(call.dialect, response)]
        except Exception as error:
            refusal, status = api_error(
                error, call.name, sent=call.sent, clean=self._redaction.clean
            )
            if status is not None:
                call.params["provider_status"] = status
            log.warning("%s: %s", call.heading.id, refusal.message)
            call.error = refusal.message
            raise refusal from None  # the cause would quote the provider to the log
        if call.memory is not None and call.memory.spent is not None:
            call.memory.spent.tokens += response["usage"].get("total_tokens", 0)
        return response

    def last_chunks(self, call: ProviderCall, response: dict[str, Any]) -> list[bytes]:
        return call.last_chunks

    def answered(self, call: ProviderCall, response: dict[str, Any]) -> None: ...

    async def record(
        self, call: ProviderCall, state: CallState, response: dict[str, Any] | None = None
    ) -> AttemptState | None:
        """Make the rows durable. Return the attempt's state as of that commit."""
        ended_at = time.time()
        if response is None and call.streamed is not None:
            response = call.streamed.response()
        choices = {one["index"]: one for one in (response or {}).get("choices", ())}
        rows: list[Call] = []
        for row in call.rows:
            one = choices.get(row.choice)
            missing = one is None and state is CallState.COMPLETED
            rows.append(
                replace(
                    row,
                    state=CallState.ERROR if missing else state,
                    error="the provider gave no such choice" if missing else call.error or None,
                    finish_reason=None if one is None else one["finish_reason"],
                    params={**row.params, **call.params},
                    response=None if one is None else {**(response or {}), "choices": [one]},
                    ended_at=ended_at,
                )
            )
        return await latest_state([self._deps.writer.finish(row) for row in rows])

    async def _complete(self, call: ProviderCall) -> Any:
        """Call the provider, without the forced settings that its model refuses."""
        refused = self._refused.setdefault(call.name, set())
        _leave_out(call, refused & {*call.forced})
        while True:
            try:
                return await self._client.complete(call.name, call.fields, call.on_sent)
            except Exception as error:
                if getattr(error, "status_code", None) != 400:
                    raise
                said = str(getattr(error, "message", None) or error)
                found = {one for one in call.forced if one in call.fields and one in said}
                if not found:
                    raise
                log.warning(
                    "the model %r refuses %s as it is set for evaluation: it is sampled at its own",
                    call.name,
                    " and ".join(sorted(found)),
                )
                refused |= found
                _leave_out(call, found)

    async def _relay(self, chunks: Any, call: ProviderCall, write: Write) -> dict[str, Any]:
        """Pass chunks on as they come. Those that end the choice wait in ``last_chunks``."""
        streamed = call.streamed = StreamedAnswer(call.heading, call.first_choice)
        try:
            async for chunk in chunks:
                choice = streamed.add(chunk.model_dump(exclude_none=True))
                if choice is None or not (choice["delta"] or choice["finish_reason"]):
                    continue
                data = call.dialect.chunk(call.heading, choice)
                if call.last_chunks or choice["finish_reason"]:
                    call.last_chunks.append(data)
                elif data:
                    await write(data)
            # LiteLLM's last chunk always has a usage; the provider's own chunks have only its.
            if not any(getattr(chunk, "usage", None) for chunk in getattr(chunks, "chunks", ())):
                streamed.usage = None
            _note(call, chunks, streamed.usage, streamed.said)
        finally:  # close the connection of a broken stream now, not at garbage collection
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()
        return streamed.response()


def _whole(answer: Any, call: ProviderCall) -> dict[str, Any]:
    said = answer.model_dump(exclude_none=True)
    call.heading.fingerprint = said.get("system_fingerprint")
    usage = said.get("usage") or {}
    if not usage.get("total_tokens"):  # LiteLLM's zeros for a usage that was not reported
        usage = {}
    _note(call, answer, usage, said)
    choices: list[dict[str, Any]] = []
    for choice in said["choices"]:
        one = normalized(choice, choice.get("index", 0) + call.first_choice)
        choices.append({**one, "message": {"content": None, **choice["message"]}})
    return chat_objects.completion(call.heading, choices, usage)


def _can_stream(model: ProviderModel, n: int) -> bool:
    """Whether LiteLLM streams this exactly. Of several choices it streams one finish reason, and
    it does not say whether a text completion's usage is an estimate. Such requests are sent
    without ``stream``, and answered as a stream."""
    return n == 1 and not model.model.startswith("text-completion-")


def _note(call: ProviderCall, answer: Any, usage: Any, said: dict[str, Any]) -> None:
    """Record what Router and provider say of an answer: its model, price and retries."""
    hidden: dict[str, Any] = getattr(answer, "_hidden_params", None) or {}
    extra = hidden.get("additional_headers") or {}
    del call.params["usage_unknown"]
    notes = {
        "usage": usage or None,
        "usage_unknown": None if usage else "the provider did not tell it",
        "cost": hidden.get("response_cost"),
        "provider_model": said.get("model"),
        "provider_id": said.get("id"),
        "retries": extra.get("x-litellm-attempted-retries"),
        "fallbacks": extra.get("x-litellm-attempted-fallbacks"),
    }
    call.params |= {key: value for key, value in notes.items() if value is not None}


def _leave_out(call: ProviderCall, settings: set[str]) -> None:
    if not settings:
        return
    for name in settings:
        call.fields.pop(name, None)
    call.params["not_enforced"] = sorted({*call.params.get("not_enforced", ()), *settings})
    call.rows = [
        replace(row, params={k: v for k, v in row.params.items() if k not in settings})
        for row in call.rows
    ]
