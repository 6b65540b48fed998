"""One completion: request → prompt → tokens → answer, recorded before it leaves.

Knows the parts and the order in which they act. Does not know routes, sockets, credentials or the
client's protocol: the answer is a chat completion, which the request's dialect says, and a
streamed one leaves through a ``write`` function, and a client that went away shows as the
cancellation of ``ChatService.run``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl_proxy import wire
from agentrl_proxy.admission import Admission, Slot
from agentrl_proxy.asgi import Write
from agentrl_proxy.attempts import Attempt, Attempts
from agentrl_proxy.auth import Caller, ask
from agentrl_proxy.choice_stream import ChoiceReader, ChoiceStream
from agentrl_proxy.constraints import Constraint, Constraints
from agentrl_proxy.continuity import Key, Prompt, remember_reply, render_prompt
from agentrl_proxy.deps import GatewayDeps, GatewayStats
from agentrl_proxy.detokenize import first_stop, whole_text
from agentrl_proxy.errors import (
    ApiError,
    context_length_exceeded,
    invalid,
    model_not_found,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.life import Accepted, CallLife, Recording
from agentrl_proxy.openai_types import ChatRequest, sampling_value
from agentrl_proxy.recording import (
    CallRecord,
    Sampled,
    agent_name,
    derived_seed,
    open_calls,
)
from agentrl_proxy.replies import Parser, PlainText, Reply, ToolCall
from agentrl_proxy.sampler import (
    ContextLengthError,
    FinishEvent,
    GrammarError,
    PromptScorer,
    RefusedError,
    SampleEvent,
    SamplingParams,
)
from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

_DEFAULT_MAX_TOKENS = 4096  # only where neither anybody nor the context length sets a limit
_TUNABLE = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


@dataclass(frozen=True, slots=True)
class BarePrompt:
    """Tokens to go on from, no chat: the answer is plain text and no conversation to remember."""

    ids: list[int]
    heading: wire.Heading  # shared by all prompts of a request
    first_choice: int  # index in the response of this prompt's first choice
    scored: bool = False  # the answer tells the log-probs of the prompt's tokens, too


@dataclass(slots=True)
class Job(Accepted):
    """An accepted request, or one of its bare prompts."""

    request: ChatRequest
    prompt: Prompt
    params: SamplingParams
    constraint: Constraint | None
    adapter: str | None
    record: CallRecord
    first_choice: int
    one_call: bool  # the answer ends where a second tool call begins
    scorer: PromptScorer | None  # of the prompt's own tokens, where the client wants them

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt.messages)


class ChatService:
    """Answers chat completions."""

    def __init__(
        self, deps: GatewayDeps, attempts: Attempts, stats: GatewayStats, admission: Admission
    ) -> None:
        self.deps = deps
        self.stats = stats
        self._attempts = attempts
        self._constraints = Constraints(deps.renderer)
        self._admission = admission
        self._life = CallLife(attempts, stats)

    # --- accepting

    def resolve_model(self, model: str, headers: Mapping[str, str]) -> str | None:
        """The adapter that a requested model name means, or its agent; None is the base model."""
        deps = self.deps
        if model in deps.models:
            return deps.models[model]
        if (adapter := deps.agents.get(agent_name(headers) or "")) is not None:
            return adapter
        if deps.accept_any_model:
            return deps.default_adapter
        raise model_not_found(model)

    async def accept(
        self,
        request: ChatRequest,
        body: bytes,
        caller: Caller,
        headers: Mapping[str, str],
        bare: BarePrompt | None = None,
    ) -> Job:
        """Everything that can be refused is refused here, before a row exists."""
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        try:
            slot = self._admission.enter(request.n)
        except ApiError:
            first = bare is None or not bare.first_choice  # else its first prompt is given up
            if memory is not None and first:
                memory.refused(body, headers.get("idempotency-key"))
            raise
        try:
            return await self._accept(request, body, caller, memory, headers, slot, bare)
        except BaseException:
            slot.leave()
            raise

    async def _accept(
        self,
        request: ChatRequest,
        body: bytes,
        caller: Caller,
        memory: Attempt | None,
        headers: Mapping[str, str],
        slot: Slot,
        bare: BarePrompt | None,
    ) -> Job:
        deps = self.deps
        adapter = self.resolve_model(request.model, headers)
        if not deps.sampler.healthy:
            raise unavailable("the sampler is not available", "sampler_unavailable")
        if adapter is not None and adapter not in deps.sampler.adapters:
            raise unavailable(f"adapter {adapter!r} is not loaded", "adapter_not_loaded")
        attempt = caller.attempt
        constraint = scorer = None
        if bare is not None and bare.scored:
            scorer = deps.sampler
            if not isinstance(scorer, PromptScorer):
                raise invalid("echo", "echo and logprobs together ask for the log-probs of the "
                              "prompt, which this sampler does not give; send one of them",
                              code="unsupported_parameter")  # fmt: skip
        if bare is None:
            prompt = self.render(request, caller, headers)
            constraint = await self._constraints.of(request, opened=prompt.opened)
            heading = wire.Heading(new_id(request.dialect.id_prefix), request.model)
            heading.prompt_tokens = len(prompt.ids)
        else:
            prompt = Prompt(bare.ids, [], Key(b"", b"", adapter), goes_on=None)
            heading = bare.heading
        params = self._params(request, caller, len(prompt.ids))
        if constraint is not None:
            params = replace(params, grammar=constraint.grammar)
        seq = 0
        if attempt is not None and memory is not None:
            attempt_id = attempt.attempt_id
            room = await self._admission.within_budget(attempt, memory, params.n, len(prompt.ids))
            if room is not None and room < params.max_tokens:
                params = replace(params, max_tokens=room)
            seq = await memory.take_seq(lambda: ask(deps.store, deps.store.next_seq, attempt_id))
            if params.seed is None:
                params = replace(params, seed=derived_seed(attempt.seed, seq))
        one_call = bool(constraint is None and request.tools and not request.parallel_tool_calls)
        one_call = one_call and deps.renderer.tells_calls_apart
        not_enforced = request.wants_of_calls
        if constraint is not None:
            not_enforced = list(constraint.not_enforced)
        if one_call:
            not_enforced.remove("parallel_tool_calls")
        version = None if adapter is None else deps.sampler.adapters.get(adapter)
        first_choice = 0 if bare is None else bare.first_choice
        record = open_calls(
            deps.writer,
            response_id=heading.id,
            run_id=deps.run_id,
            attempt=attempt,
            seq=seq,
            model=request.model,
            adapter=adapter,
            adapter_version=version,
            prompt_ids=prompt.ids,
            continued=prompt.continued,
            constrained=None if constraint is None else constraint.kind,
            branched=None if prompt.branched is None else prompt.branched.value,
            not_enforced=not_enforced,
            params=params,
            request=request.raw,
            headers=headers,
            first_choice=first_choice,
        )
        self.stats.accepted += params.n
        self.stats.constrained += constraint is not None
        self.stats.continued += prompt.continued
        self.stats.rendered += not prompt.continued
        if prompt.branched is not None:
            branched, why = self.stats.branched, prompt.branched.value
            branched[why] = branched.get(why, 0) + 1
        answer = None
        if memory is not None:
            answer = memory.begin(body, headers.get("idempotency-key"), heading.id)
        return Job(
            caller, memory, answer, heading, slot, request, prompt, params, constraint, adapter,
            record, first_choice, one_call, scorer,
        )  # fmt: skip

    def render(self, request: ChatRequest, caller: Caller, headers: Mapping[str, str]) -> Prompt:
        """The prompt of a request, continuing what its caller's attempt has had so far."""
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
        return render_prompt(
            self.deps.renderer,
            None if memory is None else memory.conversations,
            request.messages,
            request.tools,
            self.resolve_model(request.model, headers),
        )

    def _params(self, request: ChatRequest, caller: Caller, prompt_tokens: int) -> SamplingParams:
        """Forced by the attempt > asked for > the attempt's defaults > the gateway's."""
        deps = self.deps
        sampling = {} if caller.attempt is None else (caller.attempt.sampling or {})
        forced = sampling.get("force") or {}
        values: dict[str, Any] = {}
        for name in _TUNABLE:
            for source in (forced, request.sampling, sampling, deps.defaults):
                value = source.get(name)
                if value is not None:
                    values[name] = (
                        value if source is request.sampling else sampling_value(name, value)
                    )
                    break
        room = self.room(prompt_tokens)
        if request.sampling.get("max_tokens") == 0:  # nothing is sampled, whoever forces what
            values["max_tokens"] = 0
        elif room is not None:
            # A limit is a limit, not a demand: an answer that fits is better than a refusal.
            values["max_tokens"] = min(values.get("max_tokens", room), room)
        values.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
        vocab = deps.renderer.vocab_size
        if any(token_id >= vocab for token_id, _ in request.logit_bias):
            raise invalid("logit_bias", f"logit_bias: this model's token ids are 0 to {vocab - 1}")
        return SamplingParams(
            n=request.n, top_logprobs=request.top_logprobs, logit_bias=request.logit_bias, **values
        )

    def room(self, prompt_tokens: int) -> int | None:
        """How many tokens an answer may have; None: the sampler will say."""
        context_length = self.deps.context_length
        if context_length is None:
            return None
        if prompt_tokens >= context_length:
            raise context_length_exceeded(prompt_tokens, context_length)
        return context_length - prompt_tokens

    async def give_up(self, job: Job) -> None:
        """Ends an accepted job that will not be run: another part of its request was refused."""
        reason = "another prompt of the request was refused"
        sampled = [Sampled() for _ in range(job.params.n)]
        await self._life.give_up(job, _failure(job, sampled, reason))

    # --- answering

    async def run(self, job: Job, write: Write | None) -> dict[str, Any]:
        """Samples, records, answers. With ``write`` the answer leaves in chunks as it is made.

        Returns:
            A chat completion, whatever the dialect.

        Raises:
            ApiError: the sampler failed, or the attempt was sealed meanwhile.
            asyncio.CancelledError: the client went away; the partial answer is recorded.
        """
        return await self._life.run(job, self._run(job, write))

    async def _run(self, job: Job, write: Write | None) -> dict[str, Any]:
        renderer = self.deps.renderer
        tools = job.request.tools or False
        sampled = [Sampled() for _ in range(job.params.n)]
        parsers: list[Parser] = [
            renderer.parser(tools=tools, opened=job.prompt.opened, one_call=job.one_call)
            if job.is_chat
            else PlainText()
            for _ in sampled
        ]
        streams = readers = None
        if write is not None:
            streams = [
                ChoiceStream(
                    job.request,
                    job.heading,
                    job.prompt.ids,
                    job.params.stop,
                    job.first_choice + i,
                    renderer,
                    parser,
                    write,
                )
                for i, parser in enumerate(parsers)
            ]
            readers = streams
        elif job.one_call:
            readers = [ChoiceReader(renderer, parser, job.params.stop) for parser in parsers]
        try:
            scores = None if job.scorer is None else await self._score(job, job.scorer)
            if job.params.max_tokens:
                await self._sample(job, sampled, parsers, readers)
            else:
                for i, one in enumerate(sampled):
                    one.finish = FinishEvent(i, "length")
            texts = [self._text(one, job.params) for one in sampled]
            if readers is not None:
                for reader in readers:
                    reader.feed_rest()
            else:
                for parser, text in zip(parsers, texts, strict=True):
                    parser.feed(text)
            for i, parser in enumerate(parsers):
                if parser.ended_at >= 0:
                    texts[i], sampled[i].cut_at_call = parser.text, True
            replies = [parser.finish() for parser in parsers]
            withdrawn = [parser.withdrawn if streams else [] for parser in parsers]
            response = self._response(job, sampled, replies, withdrawn, scores)
        except asyncio.CancelledError:
            state, why = CallState.CANCELLED, SkipReason.CLIENT_DISCONNECTED
            await self._life.close(job, state, job.record.finish(sampled, state, skip_reason=why))
            raise
        except ContextLengthError as error:
            await self._fail(job, sampled, error)
            param = "messages" if job.is_chat else "prompt"
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from None
        except GrammarError as error:
            await self._fail(job, sampled, error)
            param = None if job.constraint is None else job.constraint.param
            raise invalid(param, f"{param} cannot be enforced: {error}") from None
        except RefusedError as error:
            await self._fail(job, sampled, error)
            raise refused_by_sampler(error.code, str(error)) from None
        except ApiError as error:
            await self._fail(job, sampled, error)
            raise
        except Exception as error:
            log.exception("sampling failed for %s", job.heading.id)
            await self._fail(job, sampled, error)
            raise unavailable(f"the sampler failed: {type(error).__name__}: {error}",
                              "sampler_error") from error  # fmt: skip

        def remember() -> None:
            assert job.memory is not None
            for i, one in enumerate(response["choices"]):
                self._remember(job, job.memory, one["message"], sampled[i], texts[i])
                if withdrawn[i]:  # an agent may drop the calls that never became any
                    self._remember(job, job.memory, wire.message(replies[i]), sampled[i], texts[i])

        recording = _whole(job, sampled, response)
        await self._life.commit(job, recording, response, remember if job.is_chat else None)
        if write is not None and streams is not None:
            await self._finish_stream(job, streams, replies, response, write)
        return response

    async def _score(self, job: Job, scorer: PromptScorer) -> list[dict[str, Any]]:
        """The prompt's tokens, each with its log-prob; the first has none. They never train: the
        row's ``response_ids`` are what was sampled."""
        ids, renderer = job.prompt.ids, self.deps.renderer
        events = await scorer.score(ids, job.adapter, job.params.top_logprobs)
        logprobs = [event.logprob for event in events]
        tops = [event.top or () for event in events]
        rest = wire.logprob_entries(renderer, ids[1:], logprobs, tops, hidden=True)
        [first] = wire.logprob_entries(renderer, ids[:1], [0.0], [()], hidden=True)
        return [{**first, "logprob": None, "top_logprobs": None}, *rest]

    async def _sample(
        self,
        job: Job,
        sampled: list[Sampled],
        parsers: Sequence[Parser],
        readers: Sequence[ChoiceStream | ChoiceReader] | None,
    ) -> None:
        tops = job.params.top_logprobs > 0
        unfinished = len(sampled)
        events = self.deps.sampler.sample(job.prompt.ids, job.params, job.adapter)
        try:
            async for event in events:
                one = sampled[event.choice]
                if one.finish is not None:
                    continue  # ended here already, while the other choices go on
                if isinstance(event, FinishEvent):
                    one.finish = event
                    unfinished -= 1
                    if event.reason in ("error", "cancelled"):
                        raise unavailable(
                            f"the sampler failed: {event.error or event.reason}", "sampler_error"
                        )
                    if not unfinished:
                        break
                    continue
                one.add(event, tops=tops)
                if job.heading.fingerprint is None:
                    job.heading.fingerprint = _fingerprint(job.adapter, event.adapter_version)
                if readers is None:
                    continue
                await readers[event.choice].push(one)
                if parsers[event.choice].ended_at >= 0:
                    one.finish = FinishEvent(event.choice, "stop")
                    unfinished -= 1
                    if not unfinished:
                        break
        finally:
            if job.memory is not None and job.memory.spent is not None:
                job.memory.spent.tokens += sum(len(one.ids) for one in sampled)
            await _aclose(events)
        if unfinished:
            raise unavailable("the sampler ended without finishing", "sampler_error")

    def _response(
        self,
        job: Job,
        sampled: list[Sampled],
        replies: list[Reply],
        withdrawn: list[list[ToolCall]],
        scores: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        heading = job.heading
        if heading.fingerprint is None:  # not one token was sampled
            version = None
            if job.adapter is not None:
                version = self.deps.sampler.adapters.get(job.adapter)
            heading.fingerprint = _fingerprint(job.adapter, version)
        choices: list[dict[str, Any]] = []
        for i, (one, reply) in enumerate(zip(sampled, replies, strict=True)):
            reason = "stop" if one.finish is None else one.finish.reason
            if reply.tool_calls and reason == "stop":
                reason = "tool_calls"
            logprobs = None
            if job.request.logprobs:
                logprobs = wire.logprob_entries(
                    self.deps.renderer, one.ids, one.logprobs, one.tops, hidden=scores is not None
                )
            message = wire.message(reply, withdrawn[i])
            choice = wire.choice(job.first_choice + i, message, reason, logprobs)
            if one.finish is not None and one.finish.stop_string is not None:
                choice["stop_reason"] = one.finish.stop_string  # as vLLM tells it
            if scores is not None:
                choice["prompt_logprobs"] = scores
            if job.request.return_token_ids:
                choice["token_ids"] = one.ids
            choices.append(choice)
        usage = wire.usage(len(job.prompt.ids), sum(len(one.ids) for one in sampled))
        response = wire.completion(heading, choices, usage)
        if job.request.return_token_ids:
            response["prompt_token_ids"] = job.prompt.ids
        return response

    async def _finish_stream(
        self,
        job: Job,
        streams: list[ChoiceStream],
        replies: list[Reply],
        response: dict[str, Any],
        write: Write,
    ) -> None:
        """The last chunks, all in one write: they leave only after the commit."""
        chunks: list[bytes] = []
        for stream, reply, one in zip(streams, replies, response["choices"], strict=True):
            chunks += stream.last_chunks(reply, one)
        chunks.append(job.request.dialect.end(response))
        await write(b"".join(chunks))

    def _text(self, one: Sampled, params: SamplingParams) -> str:
        renderer = self.deps.renderer
        visible = [i for i in one.ids if not renderer.is_hidden(i)]
        return whole_text(renderer.decode_raw, visible, params.stop)

    def _remember(
        self, job: Job, memory: Attempt, message: dict[str, Any], one: Sampled, text: str
    ) -> None:
        """Keeps the conversation for its next turn. The answer is durable: nothing may fail it."""
        renderer, stop = self.deps.renderer, job.params.stop
        try:
            cut = one.cut_at_call or (
                bool(stop) and first_stop(renderer.decode(one.ids), stop) is not None
            )
            remember_reply(
                renderer, memory.conversations, job.prompt, message, one.ids, text, cut=cut
            )
        except Exception:
            log.exception("%s will not be continued", job.heading.id)

    async def _fail(self, job: Job, sampled: list[Sampled], error: Exception) -> None:
        text = error.message if isinstance(error, ApiError) else f"{type(error).__name__}: {error}"
        await self._life.close(job, CallState.ERROR, _failure(job, sampled, text))


def _whole(job: Job, sampled: list[Sampled], response: dict[str, Any]) -> Recording:
    """Records a whole answer, each choice with its own part of the response."""
    whole = job.request.dialect.whole
    parts = [response]
    if len(sampled) > 1:
        parts = [{**response, "choices": [one]} for one in response["choices"]]
    responses = [whole(part) for part in parts]
    return job.record.finish(sampled, CallState.COMPLETED, responses=responses)


def _failure(job: Job, sampled: list[Sampled], text: str) -> Recording:
    text = text.replace("\0", "\ufffd")  # PostgreSQL takes no NUL
    reason = SkipReason.SAMPLER_ERROR
    return job.record.finish(sampled, CallState.ERROR, skip_reason=reason, error=text)


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"


async def _aclose(events: AsyncIterator[SampleEvent]) -> None:
    """Ends the sample; a finished or already cancelled one does not mind."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
