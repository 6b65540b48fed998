"""Models that are not ours to sample (an answerer, a judge, a search model), through LiteLLM.

Knows OpenAI's chat fields, LiteLLM's Router and what a call to somebody else's model leaves behind:
a row without tokens that never trains. Does not know tokens, templates or adapters. Timeouts,
retries and fallbacks are the Router's; LiteLLM (3 CPU-seconds, 170 MB) is imported only where the
configuration names other models, in a thread.

A provider's key is in a request to that provider and nowhere else: of a request's fields only
OpenAI's own are passed on (LiteLLM would take an ``api_base`` from it too), and whatever an error
quotes is cleaned before it is stored, logged or answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy import wire
from agentrl_proxy.admission import Admission
from agentrl_proxy.asgi import Write
from agentrl_proxy.attempts import Attempts
from agentrl_proxy.auth import Caller, ask
from agentrl_proxy.deps import GatewayDeps, GatewayStats, OtherModel
from agentrl_proxy.errors import ApiError, invalid
from agentrl_proxy.gathered import Gathered, complete
from agentrl_proxy.life import Accepted, CallLife
from agentrl_proxy.openai_types import MAX_CHOICES
from agentrl_proxy.recording import agent_name, trace_context
from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import AttemptState, Call, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

# What of a request goes on to the provider. Anything else is ignored, as with our own models;
# what a provider wants beyond it belongs into the configuration's ``params``.
# fmt: off
_PASSED_ON = frozenset(
    [
        "messages", "audio", "frequency_penalty", "function_call", "functions",
        "logit_bias", "logprobs", "max_tokens", "max_completion_tokens", "modalities", "n",
        "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
        "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier",
        "stop", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_logprobs",
        "top_p", "user", "verbosity", "web_search_options",
    ]
)
# fmt: on
# What calls record of how they were asked; messages and tools are in the row's request.
_RECORDED = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")
_SHORTEST_SECRET = 8
_LONGEST_ERROR = 2000


@dataclass(slots=True)
class OtherJob(Accepted):
    """An accepted request to another model."""

    name: str
    asked: dict[str, Any]  # the arguments of LiteLLM
    include_usage: bool
    calls: list[Call]  # one per choice
    noted: dict[str, Any] = field(default_factory=dict[str, Any])  # goes into the rows' params


class OtherModels:
    """Answers chat completions for the models of the configuration's ``models`` table."""

    def __init__(
        self, deps: GatewayDeps, attempts: Attempts, stats: GatewayStats, admission: Admission
    ) -> None:
        self._deps = deps
        self._attempts = attempts
        self._stats = stats
        self._admission = admission
        self._life = CallLife(attempts, stats)
        self._models = deps.other_models
        self._secrets = _secrets(self._models)
        self._router: asyncio.Task[Any] | None = None

    def has(self, raw: Mapping[str, Any]) -> bool:
        name = raw.get("model")
        return isinstance(name, str) and name in self._models

    def begin(self) -> None:
        """Starts importing LiteLLM, so that the first request need not wait for it."""
        if self._models:
            self._router = asyncio.create_task(asyncio.to_thread(_make_router, self._models))

    async def _ready_router(self) -> Any:
        if self._router is None:
            self.begin()
        assert self._router is not None
        return await asyncio.shield(self._router)

    # --- accepting

    async def accept(
        self, raw: dict[str, Any], body: bytes, caller: Caller, headers: Mapping[str, str]
    ) -> OtherJob:
        """What the gateway itself refuses is refused here, before a row exists."""
        stream, n = _checked(raw)
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        seq = 0
        if attempt is not None and memory is not None:
            # Its calls count. Its tokens are the provider's, and known only when it has answered.
            await self._admission.within_budget(attempt, memory, n, 0)
            deps, attempt_id = self._deps, attempt.attempt_id
            seq = await memory.take_seq(lambda: ask(deps.store, deps.store.next_seq, attempt_id))
        asked = {key: raw[key] for key in _PASSED_ON & raw.keys() if raw[key] is not None}
        if stream:  # usage is recorded whether or not the client asked for it
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        name = raw["model"]
        heading = wire.Heading(new_id("chatcmpl-"), name)
        calls = self._open(heading.id, raw, n, caller, seq, headers)
        answer = None
        if memory is not None:
            answer = memory.begin(body, headers.get("idempotency-key"))
        return OtherJob(caller, memory, answer, heading, None, name, asked, wants_usage(raw), calls)

    def _open(
        self,
        response_id: str,
        raw: dict[str, Any],
        n: int,
        caller: Caller,
        seq: int,
        headers: Mapping[str, str],
    ) -> list[Call]:
        attempt = caller.attempt
        trace_id, span_id = trace_context(headers)
        first = Call(
            id=response_id,
            response_id=response_id,
            choice=0,
            run_id=self._deps.run_id if attempt is None else attempt.run_id,
            rollout_id=None if attempt is None else attempt.rollout_id,
            attempt_id=None if attempt is None else attempt.attempt_id,
            seq=seq,
            agent=agent_name(headers),
            model=raw["model"],
            adapter=None,
            adapter_version=None,
            state=CallState.OPEN,
            prompt_ids=[],
            response_ids=[],
            response_logprobs=[],
            finish_reason=None,
            params={"n": n, **{k: raw[k] for k in _RECORDED if raw.get(k) is not None}},
            request=raw,
            response=None,
            error=None,
            trace_id=trace_id,
            span_id=span_id,
            started_at=time.time(),
            ended_at=None,
            skip_reason=(
                SkipReason.NO_ROLLOUT if attempt is None else SkipReason.NOT_TRAINABLE_MODEL
            ),
        )
        calls = [first, *(replace(first, id=f"{response_id}#{i}", choice=i) for i in range(1, n))]
        for call in calls:
            self._deps.writer.open(call)
        self._stats.accepted += n
        self._stats.other_models += n
        return calls

    # --- answering

    async def run(self, job: OtherJob, write: Write | None) -> dict[str, Any]:
        """Asks the provider, records, answers. With ``write`` chunks leave as they come in.

        Raises:
            ApiError: the provider refused or failed, or the attempt was sealed meanwhile.
            asyncio.CancelledError: the client went away; what there was is recorded.
        """
        return await self._life.run(job, self._run(job, write))

    async def _run(self, job: OtherJob, write: Write | None) -> dict[str, Any]:
        gathered = Gathered(job.heading)
        held: list[bytes] = []
        try:
            router = await self._ready_router()
            answer = await router.acompletion(model=job.name, **job.asked)
            if write is None:
                response = _whole(answer, job)
            else:
                held = await self._relay(answer, job, gathered, write)
                response = gathered.response()
        except asyncio.CancelledError:
            state = CallState.CANCELLED
            await self._life.close(job, state, self._finish(job, state, gathered.response()))
            raise
        except Exception as error:
            refusal = self._refusal(job, error)
            log.warning("%s: %s", job.heading.id, refusal.message)
            state, partial = CallState.ERROR, gathered.response()
            await self._life.close(job, state, self._finish(job, state, partial, refusal.message))
            # ``from None``: the cause would quote the provider's words to whoever logs it.
            raise refusal from None
        await self._life.commit(job, self._finish(job, CallState.COMPLETED, response))
        self._life.answered(job, response)
        if write is not None:
            if job.include_usage:
                held.append(wire.usage_chunk(job.heading, response["usage"]))
            await write(b"".join([*held, wire.DONE]))
        return response

    async def _relay(
        self, chunks: Any, job: OtherJob, gathered: Gathered, write: Write
    ) -> list[bytes]:
        """Passes chunks on as they come; returns those that say how a choice ended."""
        held: list[bytes] = []
        try:
            async for chunk in chunks:
                one = chunk.model_dump(exclude_none=True)
                gathered.add(one)
                choices = [c for c in one.get("choices", ()) if c["delta"] or "finish_reason" in c]
                if not choices:
                    continue
                data = _chunk(job.heading, choices, one)
                if held or any(choice["finish_reason"] for choice in choices):
                    held.append(data)
                else:
                    await write(data)
            _note(job, chunks, gathered.usage, gathered.said)
        finally:
            # Of a stream that ended in its middle, the connection is closed now, not when
            # somebody collects the garbage.
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()
        return held

    def _refusal(self, job: OtherJob, error: Exception) -> ApiError:
        """A provider's failure in OpenAI's shape."""
        if isinstance(error, ApiError):
            return error
        import openai  # LiteLLM's errors are made of OpenAI's; it is imported by now

        text = self._clean(getattr(error, "message", None) or str(error))
        said = f"{type(error).__name__}: {text}"
        status = getattr(error, "status_code", None)
        causes = list(_causes(error))
        if isinstance(error, openai.APITimeoutError):
            status, code = 504, "provider_timeout"
            message = f"the model {job.name!r} did not answer in time: {said}"
        # LiteLLM's own APIConnectionError may be anything; these are what it says.
        elif any(type(c) is openai.APIConnectionError or isinstance(c, OSError) for c in causes):
            status, code = 502, "provider_unreachable"
            message = f"the provider of {job.name!r} cannot be reached: {said}"
        elif type(status) is int and 400 <= status < 600 and len(causes) > 1:
            code = next(filter(None, map(_own_code, causes)), "provider_error")
            message = f"the provider of {job.name!r} answered {status}: {said}"
        else:
            log.error("%s failed", job.heading.id, exc_info=_without_cause(error, said))
            status, code = 502, "provider_error"
            message = f"asking the model {job.name!r} failed: {said}"
        job.noted["provider_status"] = status
        kinds = {400: "invalid_request_error", 401: "authentication_error",
                 403: "permission_error", 429: "rate_limit_error"}  # fmt: skip
        after = next(filter(None, map(_retry_after, causes)), None)
        headers = {} if after is None else {"retry-after": after}
        return ApiError(
            status,
            message,
            kind=kinds.get(status, "server_error" if status >= 500 else "invalid_request_error"),
            code=code,
            headers=headers,
        )

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[key]")
        return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + " ..."

    # --- recording

    async def _finish(
        self, job: OtherJob, state: CallState, response: dict[str, Any], error: str | None = None
    ) -> AttemptState | None:
        """Makes the rows durable; returns the attempt's state as of that commit."""
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
                    error="the provider gave no such choice" if missing else error,
                    finish_reason=None if one is None else one.get("finish_reason"),
                    params={**call.params, **job.noted},
                    response=None if one is None else {**response, "choices": [one]},
                    ended_at=ended_at,
                )
            )
        writer = self._deps.writer
        states = await asyncio.gather(*(writer.finish(row) for row in rows))
        return next((s for s in states if s is not AttemptState.RUNNING), states[0])


def _whole(answer: Any, job: OtherJob) -> dict[str, Any]:
    said = answer.model_dump(exclude_none=True)
    job.heading.fingerprint = said.get("system_fingerprint")
    usage = said.get("usage")
    _note(job, answer, usage, said)
    choices: list[dict[str, Any]] = []
    for choice in said["choices"]:
        choice["message"] = {"content": None, **choice["message"]}
        choices.append(complete(choice))
    return wire.completion(job.heading, choices, usage or {})


def _chunk(heading: wire.Heading, choices: list[dict[str, Any]], said: dict[str, Any]) -> bytes:
    for choice in choices:
        choice.setdefault("finish_reason", None)
    return wire.sse(
        {
            "id": heading.id,
            "object": "chat.completion.chunk",
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": said.get("system_fingerprint"),
            "choices": choices,
        }
    )


def _note(job: OtherJob, answer: Any, usage: Any, said: dict[str, Any]) -> None:
    """What the Router and the provider say of an answer: which model, at what price."""
    hidden: dict[str, Any] = getattr(answer, "_hidden_params", None) or {}
    extra = hidden.get("additional_headers") or {}
    noted = {
        "usage": usage,
        "cost": hidden.get("response_cost"),
        "provider_model": said.get("model"),
        "provider_id": said.get("id"),
        "retries": extra.get("x-litellm-attempted-retries"),
        "fallbacks": extra.get("x-litellm-attempted-fallbacks"),
    }
    job.noted |= {key: value for key, value in noted.items() if value is not None}


def _checked(raw: dict[str, Any]) -> tuple[bool, int]:
    """(stream, n). Everything else is the provider's to judge."""
    messages, stream, n = raw.get("messages"), raw.get("stream"), raw.get("n")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "messages must be a non-empty list")
    if not isinstance(stream, bool | None):
        raise invalid("stream", "stream must be true or false")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_CHOICES):
        raise invalid("n", f"n must be an integer from 1 to {MAX_CHOICES}")
    options = raw.get("stream_options")
    if not isinstance(options, dict | None):
        raise invalid("stream_options", "stream_options must be an object")
    return bool(stream), n or 1


def wants_usage(raw: Mapping[str, Any]) -> bool:
    """Whether a stream's last chunk shall say the usage."""
    options = raw.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _make_router(models: Mapping[str, OtherModel]) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import fetches a file
    import litellm
    from litellm.router import Router

    litellm.suppress_debug_info = True  # it prints advice to stdout at every error
    litellm.turn_off_message_logging = True
    for name in ("LiteLLM", "LiteLLM Router"):
        # They quote errors, which may quote keys; ours says what went wrong, cleaned.
        logging.getLogger(name).setLevel(logging.CRITICAL)
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


def _secrets(models: Mapping[str, OtherModel]) -> list[str]:
    """Every key that an error could quote: ours, and those LiteLLM finds in the environment."""
    found = {one.api_key for one in models.values() if one.api_key}
    if models:
        endings = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
        found |= {value for name, value in os.environ.items() if name.upper().endswith(endings)}
    return sorted((s for s in found if len(s) >= _SHORTEST_SECRET), key=len, reverse=True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
