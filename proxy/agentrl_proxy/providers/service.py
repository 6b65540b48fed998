"""Models that are not ours to sample (an answerer, a judge, a search model), through LiteLLM.

Knows OpenAI's chat fields, LiteLLM's Router and what a call to somebody else's model leaves behind:
a row without tokens that never trains. Does not know tokens, templates or adapters, nor which
protocol the client speaks (elsewhere.py). Timeouts, retries and fallbacks are the Router's; LiteLLM
(3 CPU-seconds, 170 MB) is imported only where the configuration names other models, in a thread.

A model that stands in for the policy is sampled as the rollout's settings force, whatever the agent
asks for. Some providers refuse that (reasoning models take temperature 1 alone): then they are
asked again without it, and the row says so (``params["not_enforced"]``).

What a provider says it used counts in the rollout's budget, when it has said it. Where it says
nothing LiteLLM makes a number up (an estimate with a stream, zeros without): that is neither
recorded nor counted nor told, and the row says why (``params["usage_unknown"]``).

A provider's key is in a request to that provider and nowhere else: of a request's fields only
OpenAI's own are passed on (LiteLLM would take an ``api_base`` from it too), and whatever an error
quotes is cleaned before it is stored, logged or answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies, ProviderModel
from agentrl_proxy.errors import ApiError, invalid, unavailable
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.completions import legacy_entries, plain_entry
from agentrl_proxy.providers.deltas import Deltas
from agentrl_proxy.providers.litellm import make_router
from agentrl_proxy.providers.redaction import Redaction
from agentrl_proxy.providers.streaming import Gathered, complete
from agentrl_proxy.requests.attempts import AttemptMemories
from agentrl_proxy.requests.auth import Caller, ask
from agentrl_proxy.requests.lifecycle import OpenCall
from agentrl_proxy.requests.rate_limits import Admission, Slot
from agentrl_proxy.requests.recording import latest_state, open_calls
from agentrl_proxy.server.sse import Write
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.schemas import AttemptState, Call, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

# What of a request goes on to the provider. Anything else is ignored, as with our own models;
# what a provider wants beyond it belongs into the configuration's ``params``.
# fmt: off
_PASSED_ON = frozenset(
    [
        "messages", "audio", "frequency_penalty", "function_call", "functions",
        "logit_bias", "logprobs", "max_tokens", "max_completion_tokens", "modalities", "n",
        "output_config", "parallel_tool_calls", "prediction", "presence_penalty",
        "prompt_cache_key", "reasoning_effort", "response_format", "safety_identifier", "seed",
        "service_tier", "stop", "temperature", "thinking", "tool_choice", "tools", "top_k",
        "top_logprobs", "top_p", "user", "verbosity", "web_search_options",
    ]
)
# fmt: on
# What calls record of how they were asked; messages and tools are in the row's request.
_RECORDED = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")
_LONGEST_ERROR = 2000


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """A checked request to another model, or one of its bare prompts."""

    name: str
    chat: Mapping[str, Any]  # what it asks, in the fields of chat completions
    raw: dict[str, Any]  # the wire request
    dialect: chat_objects.Dialect
    stream: bool
    n: int = 1
    first_choice: int = 0  # index in the response of this prompt's first choice


@dataclass(slots=True)
class ProviderCall(OpenCall):
    """An accepted request to another model."""

    name: str
    fields: dict[str, Any]  # the arguments of LiteLLM
    dialect: chat_objects.Dialect
    first_choice: int
    calls: list[Call]  # one per choice
    noted: dict[str, Any] = field(default_factory=dict[str, Any])  # goes into the rows' params
    forced: tuple[str, ...] = ()  # of fields: the rollout's settings, not the agent's
    sent: bool = False  # whether LiteLLM has got as far as asking the provider
    gathered: Gathered | None = None  # a stream's answer so far
    held: list[bytes] = field(default_factory=list[bytes])  # a stream's last chunks


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
        self._router: asyncio.Task[Any] | None = None
        self._unforceable: dict[str, set[str]] = {}  # by model: settings that it refuses

    def named(self, raw: Mapping[str, Any]) -> ProviderModel | None:
        """The model that a request asks for, if it is one of these."""
        name = raw.get("model")
        return self._models.get(name) if isinstance(name, str) else None

    def begin(self) -> None:
        """Starts importing LiteLLM, so that the first request need not wait for it."""
        if self._models:
            self._router = asyncio.create_task(asyncio.to_thread(make_router, self._models))

    async def _ready_router(self) -> Any:
        """
        Raises:
            ApiError: LiteLLM cannot be imported, or makes no Router of the configuration (503).
        """
        router = self._router
        if router is None or (router.done() and router.exception() is not None):
            self.begin()  # what failed once need not fail again
        assert self._router is not None
        try:
            return await asyncio.shield(self._router)
        except Exception as error:
            said = self._clean(f"{type(error).__name__}: {error}")
            log.error("LiteLLM does not start", exc_info=_without_cause(error, said))
            message = f"LiteLLM, which asks the models of other providers, does not start: {said}"
            raise unavailable(message, "other_models_unavailable") from None

    # --- accepting

    async def accept(
        self,
        request: ProviderRequest,
        heading: chat_objects.Heading,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> ProviderCall:
        """What the gateway itself refuses is refused here, before a row exists."""
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
            # Its calls count. Its tokens are the provider's, and known only when it has answered.
            await self._admission.within_budget(attempt, memory, request.n, 0)
            deps, attempt_id = self._deps, attempt.attempt_id
            seq = await memory.take_seq(lambda: ask(deps.store, deps.store.next_seq, attempt_id))
        forced = self._forced(request, caller)
        request = replace(request, chat={**request.chat, **forced})
        chat = request.chat
        fields = {key: chat[key] for key in _PASSED_ON & chat.keys() if chat[key] is not None}
        if request.stream and not _streams_badly(self._models[request.name], request.n):
            # usage is recorded whether or not the client asked for it
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        calls = open_calls(
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
            request.first_choice, calls, forced=tuple(forced),
        )  # fmt: skip

    def _forced(self, request: ProviderRequest, caller: Caller) -> dict[str, Any]:
        """What the rollout forces on the policy's sampling, where this model stands in for it."""
        if caller.attempt is None or not self._models[request.name].is_policy:
            return {}
        forced: Mapping[str, Any] = (caller.attempt.sampling or {}).get("force") or {}
        return {name: value for name, value in forced.items() if name in _PASSED_ON}

    async def count(self, request: ProviderRequest, model: ProviderModel) -> int:
        """How long the prompt of a Messages request is: by the provider's own count where it has
        one, else LiteLLM's estimate. (Anthropic calls its own an estimate, too.)

        An Anthropic model with an ``api_base`` is estimated: LiteLLM's counter would send its key
        and the prompt to api.anthropic.com all the same.

        Raises:
            ApiError: there are too many requests (429), LiteLLM stumbles over this one (400) or
                does not start (503), the count took too long (504) or failed (502).
        """
        slot = self._admission.enter(0)
        try:
            await self._ready_router()
            return await self._counted(request, model)
        finally:
            slot.leave()

    async def _counted(self, request: ProviderRequest, model: ProviderModel) -> int:
        import litellm

        in_time = asyncio.timeout(model.timeout)
        try:
            async with in_time:
                own = model.model.startswith("anthropic/")
                if own and model.api_base is not None:
                    chat = request.chat
                    return await asyncio.to_thread(
                        litellm.token_counter,
                        model=model.model,
                        messages=chat["messages"],
                        tools=chat.get("tools"),
                    )
                said: Mapping[str, Any] = request.raw if own else request.chat
                found = await litellm.acount_tokens(
                    model.model,
                    messages=said["messages"],
                    tools=said.get("tools"),
                    system=said.get("system") if own else None,
                    api_key=model.api_key,
                    api_base=model.api_base,
                )
        except Exception as error:
            message = f"the tokens of a prompt to {request.name!r} were not counted"
            if in_time.expired():
                message += f" within {model.timeout:g} s"
                raise ApiError(504, message, kind="server_error", code="provider_timeout") from None
            message += self._clean(f": {type(error).__name__}: {error}")
            if _counted_here(error) and all(map(_is_of_python, _causes(error))):
                raise invalid(None, message) from None
            raise ApiError(502, message, kind="server_error", code="provider_error") from None
        if found.total_tokens <= 0:  # LiteLLM says zero of an answer without the number
            message = f"the provider of {request.name!r} counted no tokens in a prompt"
            raise ApiError(502, message, kind="server_error", code="provider_error")
        return found.total_tokens

    # --- answering

    async def generate(self, job: ProviderCall, write: Write | None) -> dict[str, Any]:
        """Ask the provider. With ``write``, chunks leave as they come in, except the last ones.

        Raises:
            ApiError: the provider refused or failed.
        """
        job.gathered = Gathered(job.heading)
        job.noted["usage_unknown"] = "the answer did not come to its end"
        try:
            router = await self._ready_router()
            answer = await self._ask(router, job)
            if write is not None and "stream" in job.fields:
                job.held = await self._relay(answer, job, job.gathered, write)
                response = job.gathered.response()
            else:
                response = _whole(answer, job)
                if write is not None:
                    job.held = [*chat_objects.replayed(job.dialect, response)]
            self._spend(job, response["usage"])
            return response
        except Exception as error:
            refusal = self._refusal(job, error)
            log.warning("%s: %s", job.heading.id, refusal.message)
            job.error = refusal.message
            # ``from None``: the cause would quote the provider's words to whoever logs it.
            raise refusal from None

    def answered(self, job: ProviderCall, response: dict[str, Any]) -> None: ...

    def last_chunks(self, job: ProviderCall, response: dict[str, Any]) -> list[bytes]:
        return job.held

    async def _ask(self, router: Any, job: ProviderCall) -> Any:
        """Without what is forced on the model, where it refuses that."""
        refused = self._unforceable.setdefault(job.name, set())
        _leave_out(job, refused & {*job.forced})
        while True:
            try:
                return await router.acompletion(
                    model=job.name, logger_fn=_sets_sent(job), **job.fields
                )
            except Exception as error:
                found = _refused_settings(error, job)
                if not found:
                    raise
                log.warning(
                    "the model %r refuses %s as it is set for evaluation: it is sampled at its own",
                    job.name,
                    " and ".join(sorted(found)),
                )
                refused |= found
                _leave_out(job, found)

    async def _relay(
        self, chunks: Any, job: ProviderCall, gathered: Gathered, write: Write
    ) -> list[bytes]:
        """Passes chunks on as they come; returns those that say how a choice ended."""
        held: list[bytes] = []
        deltas = Deltas()
        try:
            async for chunk in chunks:
                one = chunk.model_dump(exclude_none=True)
                one["choices"] = [_placed(c, job) for c in one.get("choices", ())]
                for choice in one["choices"]:
                    choice["delta"] = deltas.tidied(choice["delta"], choice["index"])
                gathered.add(one)
                for choice in one["choices"]:
                    index, delta = choice["index"], choice["delta"]
                    reason = choice.get("finish_reason")
                    if not delta and reason is None:
                        continue
                    logprobs = choice.get("logprobs")
                    data = job.dialect.chunk(
                        job.heading,
                        index,
                        delta,
                        logprobs=None if logprobs is None else logprobs["content"],
                        finish_reason=reason,
                    )
                    if held or reason:
                        held.append(data)
                    elif data:
                        await write(data)
            # LiteLLM's last chunk tells a usage in any case; whether it was the provider's, the
            # chunks say that came from there.
            if not any(getattr(chunk, "usage", None) for chunk in getattr(chunks, "chunks", ())):
                gathered.usage = None
            _note(job, chunks, gathered.usage, gathered.said)
        finally:
            # Of a stream that ended in its middle, the connection is closed now, not when
            # somebody collects the garbage.
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
        return held

    @staticmethod
    def _spend(job: ProviderCall, usage: Mapping[str, Any]) -> None:
        """What the provider counted is spent, whatever becomes of its answer."""
        if job.memory is not None and job.memory.spent is not None:
            job.memory.spent.tokens += usage.get("total_tokens", 0)

    def _refusal(self, job: ProviderCall, error: Exception) -> ApiError:
        """A provider's failure in OpenAI's shape."""
        if isinstance(error, ApiError):
            return error
        import openai  # LiteLLM's errors are made of OpenAI's; it is imported by now

        text = self._clean(getattr(error, "message", None) or str(error))
        said = f"{type(error).__name__}: {text}"
        status = getattr(error, "status_code", None)
        causes = list(_causes(error))
        stumbled = _is_of_python(causes[-1])  # LiteLLM's code over what it was given, or was told
        if isinstance(error, openai.APITimeoutError):
            status, code = 504, "provider_timeout"
            message = f"the model {job.name!r} did not answer in time: {said}"
        # LiteLLM's own APIConnectionError may be anything; these are what it says.
        elif any(type(c) is openai.APIConnectionError or isinstance(c, OSError) for c in causes):
            status, code = 502, "provider_unreachable"
            message = f"the provider of {job.name!r} cannot be reached: {said}"
        elif not job.sent and (stumbled or (status == 400 and len(causes) == 1)):
            unsupported = type(error).__name__ == "UnsupportedParamsError"
            code = "unsupported_parameter" if unsupported else "invalid_value"
            return invalid(None, f"LiteLLM made no request of this to the model {job.name!r}: "
                           f"{said}", code=code)  # fmt: skip
        elif type(status) is int and 400 <= status < 600 and len(causes) > 1 and not stumbled:
            code = self._clean(next(filter(None, map(_own_code, causes)), "provider_error"))
            message = f"the provider of {job.name!r} answered {status}: {said}"
        else:
            log.error("%s failed", job.heading.id, exc_info=_without_cause(error, said))
            status, code = 502, "provider_error"
            message = f"asking the model {job.name!r} failed: {said}"
        job.noted["provider_status"] = status
        kinds = {400: "invalid_request_error", 401: "authentication_error",
                 403: "permission_error", 429: "rate_limit_error"}  # fmt: skip
        after = next(filter(None, map(_retry_after, causes)), None)
        headers = {} if after is None else {"retry-after": self._clean(after)}
        return ApiError(
            status,
            message,
            kind=kinds.get(status, "server_error" if status >= 500 else "invalid_request_error"),
            code=code,
            headers=headers,
        )

    def _clean(self, text: str) -> str:
        text = self._redaction.clean(text)
        return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + " ..."

    # --- recording

    async def record(
        self, job: ProviderCall, state: CallState, response: dict[str, Any] | None = None
    ) -> AttemptState | None:
        """Makes the rows durable; returns the attempt's state as of that commit."""
        if response is None:
            response = (job.gathered or Gathered(job.heading)).response()
        ended_at = time.time()
        choices = {choice["index"]: choice for choice in response["choices"]}
        rows: list[Call] = []
        for call in job.calls:
            one = choices.get(call.choice)
            missing = one is None and state is CallState.COMPLETED
            rows.append(
                replace(
                    call,
                    state=CallState.ERROR if missing else state,
                    error="the provider gave no such choice" if missing else job.error or None,
                    finish_reason=None if one is None else one.get("finish_reason"),
                    params={**call.params, **job.noted},
                    response=None if one is None else {**response, "choices": [one]},
                    ended_at=ended_at,
                )
            )
        return await latest_state([self._deps.writer.finish(row) for row in rows])


def _whole(answer: Any, job: ProviderCall) -> dict[str, Any]:
    said = answer.model_dump(exclude_none=True)
    job.heading.fingerprint = said.get("system_fingerprint")
    usage = said.get("usage") or {}
    if not usage.get("total_tokens"):  # LiteLLM says zeros of what it was not told
        usage = {}
    _note(job, answer, usage, said)
    choices: list[dict[str, Any]] = []
    for choice in said["choices"]:
        choice["message"] = {"content": None, **choice["message"]}
        choices.append(complete(_placed(choice, job)))
    return chat_objects.completion(job.heading, choices, usage)


def _streams_badly(model: ProviderModel, n: int) -> bool:
    """What is asked whole, and told as a stream: of several choices LiteLLM streams one finish
    reason only, and whether a text completion's streamed usage is an estimate it does not say."""
    return n > 1 or model.model.startswith("text-completion-")


def _placed(choice: dict[str, Any], job: ProviderCall) -> dict[str, Any]:
    """A provider's choice as ours: its place in the whole response, log-probs in chat's form."""
    choice["index"] = choice.get("index", 0) + job.first_choice
    logprobs = choice.pop("logprobs", None)
    if logprobs is not None:
        content = logprobs.get("content")
        if content is None and "tokens" in logprobs:
            content = legacy_entries(logprobs)
        content = [_filled(entry) for entry in content or ()]
        choice["logprobs"] = {"refusal": None, **logprobs, "content": content}
    return choice


def _filled(entry: dict[str, Any]) -> dict[str, Any]:
    """A log-prob entry with all its fields. Some providers tell no bytes or no alternatives."""
    tops = [_filled_token(top) for top in entry.get("top_logprobs") or ()]
    return {**_filled_token(entry), "top_logprobs": tops}


def _filled_token(one: dict[str, Any]) -> dict[str, Any]:
    return {**plain_entry(one["token"], one["logprob"]), **one}


def _note(job: ProviderCall, answer: Any, usage: Any, said: dict[str, Any]) -> None:
    """What the Router and the provider say of an answer: which model, at what price."""
    hidden: dict[str, Any] = getattr(answer, "_hidden_params", None) or {}
    extra = hidden.get("additional_headers") or {}
    job.noted.pop("usage_unknown", None)
    noted = {
        "usage": usage or None,
        "usage_unknown": None if usage else "the provider did not tell it",
        "cost": hidden.get("response_cost"),
        "provider_model": said.get("model"),
        "provider_id": said.get("id"),
        "retries": extra.get("x-litellm-attempted-retries"),
        "fallbacks": extra.get("x-litellm-attempted-fallbacks"),
    }
    job.noted |= {key: value for key, value in noted.items() if value is not None}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refused_settings(error: Exception, job: ProviderCall) -> set[str]:
    """Forced settings that the model cannot take: LiteLLM knows so, or the provider says so."""
    if getattr(error, "status_code", None) != 400:
        return set()
    said = str(getattr(error, "message", None) or error)
    return {name for name in job.forced if name in job.fields and name in said}


def _leave_out(job: ProviderCall, settings: Collection[str]) -> None:
    if not settings:
        return
    for name in settings:
        job.fields.pop(name, None)
    job.noted["not_enforced"] = sorted({*job.noted.get("not_enforced", ()), *settings})
    job.calls = [
        replace(call, params={k: v for k, v in call.params.items() if k not in settings})
        for call in job.calls
    ]


def _sets_sent(job: ProviderCall) -> Callable[[dict[str, Any]], None]:
    """LiteLLM calls it with what it is about to do, and has done."""

    def note(details: dict[str, Any]) -> None:
        job.sent |= details.get("log_event_type") == "pre_api_call"

    return note


def _is_of_python(error: BaseException) -> bool:
    """Whether it says that code met what it was not made for; sockets' troubles are something else.
    LiteLLM raises bare ``Exception`` of messages that it cannot read."""
    return type(error).__module__ == "builtins" and not isinstance(error, OSError)


def _counted_here(error: BaseException) -> bool:
    """Whether it comes from LiteLLM's own counter, which knows the request and no provider."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "token_counter" for frame, _ in frames)


def _own_code(error: BaseException) -> str | None:
    """What the provider calls it (``context_length_exceeded``, ...), where it says."""
    code = getattr(error, "code", None)
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        inner = body.get("error")
        code = (inner if isinstance(inner, dict) else body).get("code", code)
    return code if isinstance(code, str) and code.isidentifier() else None


def _retry_after(error: BaseException) -> str | None:
    for headers in (
        getattr(error, "litellm_response_headers", None),
        getattr(getattr(error, "response", None), "headers", None),
    ):
        value = None if headers is None else headers.get("retry-after")
        if isinstance(value, str) and value.isascii() and value.isprintable():
            return value
    return None


def _without_cause(error: Exception, said: str) -> tuple[Any, BaseException, Any]:
    """Where it happened, for the log, in words that were cleaned."""
    return RuntimeError, RuntimeError(said), error.__traceback__
