"""One completion: request → prompt → tokens → answer, recorded before it leaves.

Knows the parts and the order in which they act. Does not know routes, sockets, credentials or the
client's protocol: the answer is a chat completion, which the request's dialect says, and a
streamed one leaves through a ``write`` function, and a client that went away shows as the
cancellation of ``ChatService.run``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import (
    ApiError,
    context_length_exceeded,
    invalid,
    model_not_found,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.generation.streaming import ChoiceReader, ChoiceStream
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest, sampling_value
from agentrl_proxy.rendering.continuity import Key, Prompt, remember_reply, render_prompt
from agentrl_proxy.rendering.detokenizer import first_stop, whole_text
from agentrl_proxy.rendering.structured_output import Constraint, Constraints
from agentrl_proxy.rendering.tool_call_parser import ParsedReply, Parser, PlainTextParser, ToolCall
from agentrl_proxy.requests.attempts import AttemptMemories, AttemptMemory
from agentrl_proxy.requests.auth import Caller, ask
from agentrl_proxy.requests.idempotency import Asked, Part
from agentrl_proxy.requests.lifecycle import Accepted, CallLife, Recording
from agentrl_proxy.requests.rate_limits import Admission, Slot
from agentrl_proxy.requests.recording import (
    CallRecord,
    Sampled,
    agent_name,
    derived_seed,
    open_calls,
)
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    PromptScorer,
    RefusedError,
    SampleEvent,
)
from agentrl_proxy.server.sse import Write
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

_DEFAULT_MAX_TOKENS = 4096  # only where neither anybody nor the context length sets a limit
_TUNABLE = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


@dataclass(frozen=True, slots=True)
class BarePrompt:
    """Tokens to go on from, no chat: the answer is plain text and no conversation to remember."""

    ids: list[int]
    heading: chat_objects.Heading  # shared by all prompts of a request
    choices: list[int]  # those of the response that go on from this prompt, and are missing
    scored: bool = False  # the answer tells the log-probs of the prompt's tokens, too


@dataclass(slots=True)
class Job(Accepted):
    """An accepted request, or one of its bare prompts."""

    request: ChatRequest
    prompt: Prompt
    params: DecodingParams
    constraint: Constraint | None
    adapter: str | None
    record: CallRecord
    choices: list[int]  # indices in the response, of each choice that is sampled
    finished: list[Part]  # what an earlier try of the same request has of its answer
    one_call: bool  # the answer ends where a second tool call begins
    scorer: PromptScorer | None  # of the prompt's own tokens, where the client wants them

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt.messages)


class ChatService:
    """Answers chat completions."""

    def __init__(
        self,
        deps: GatewayDependencies,
        attempts: AttemptMemories,
        stats: GatewayStats,
        admission: Admission,
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
        asked: Asked | None,
        caller: Caller,
        headers: Mapping[str, str],
        bare: BarePrompt | None = None,
    ) -> Job:
        """Everything that can be refused is refused here, before a row exists.

        Args:
            asked: what is remembered of the request; None: nothing is.
        """
        finished = [] if asked is None else asked.parts()
        choices = chat_objects.missing(finished, 1, request.n)[0] if bare is None else bare.choices
        slot = self._admission.enter(len(choices))
        try:
            return await self._accept(
                request, asked, caller, headers, slot, bare, choices, finished
            )
        except BaseException:
            slot.leave()
            raise

    async def _accept(
        self,
        request: ChatRequest,
        asked: Asked | None,
        caller: Caller,
        headers: Mapping[str, str],
        slot: Slot,
        bare: BarePrompt | None,
        choices: list[int],
        finished: list[Part],
    ) -> Job:
        deps = self.deps
        adapter = self.resolve_model(request.model, headers)
        if not deps.sampler.healthy:
            raise unavailable("the sampler is not available", "sampler_unavailable")
        if adapter is not None and adapter not in deps.sampler.adapters:
            raise unavailable(f"adapter {adapter!r} is not loaded", "adapter_not_loaded")
        attempt = caller.attempt
        memory = None if attempt is None else self._attempts.get(attempt.attempt_id)
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
            if finished:
                heading = chat_objects.heading_of(finished[0])
            else:
                heading = chat_objects.Heading(new_id(request.dialect.id_prefix), request.model)
            heading.prompt_tokens = len(prompt.ids)
        else:
            prompt = Prompt(bare.ids, [], Key(b"", b"", adapter), goes_on=None)
            heading = bare.heading
        params = self._params(request, len(choices), caller, len(prompt.ids))
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
            elif len(choices) < request.n:  # not again what the choices that are there have said
                params = replace(params, seed=derived_seed(params.seed, choices[0]))
        one_call = bool(constraint is None and request.tools and not request.parallel_tool_calls)
        one_call = one_call and deps.renderer.tells_calls_apart
        not_enforced = request.grammar_fields
        if constraint is not None:
            not_enforced = list(constraint.not_enforced)
        if one_call:
            not_enforced.remove("parallel_tool_calls")
        version = None if adapter is None else deps.sampler.adapters.get(adapter)
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
            choices=choices,
            again=bool(finished),
        )
        self.stats.accepted += params.n
        self.stats.constrained += constraint is not None
        self.stats.continued += prompt.continued
        self.stats.rendered += not prompt.continued
        if prompt.branched is not None:
            branched, why = self.stats.branched, prompt.branched.value
            branched[why] = branched.get(why, 0) + 1
        return Job(
            caller, memory, asked, heading, slot, request, prompt, params, constraint, adapter,
            record, choices, finished, one_call, scorer,
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

    def _params(
        self, request: ChatRequest, n: int, caller: Caller, prompt_tokens: int
    ) -> DecodingParams:
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
        return DecodingParams(
            n=n, top_logprobs=request.top_logprobs, logit_bias=request.logit_bias, **values
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
        await self._life.give_up(job, _recorded(job, self._begin(job, None), None, reason))

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
        choices = self._begin(job, write)
        try:
            scores = None if job.scorer is None else await self._score(job, job.scorer)
            if job.params.max_tokens:
                await self._sample(job, choices)
            else:
                for i, one in enumerate(choices):
                    one.sampled.finish = FinishEvent(i, "length")
            for one in choices:
                self._read(job, one)
            response = self._response(job, choices, scores)
        except asyncio.CancelledError:
            state, why = CallState.CANCELLED, SkipReason.CLIENT_DISCONNECTED
            sampled = [one.sampled for one in choices]
            await self._life.close(job, state, job.record.finish(sampled, state, skip_reason=why))
            raise
        except ContextLengthError as error:
            await self._fail(job, choices, error)
            param = "messages" if job.is_chat else "prompt"
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from None
        except GrammarError as error:
            await self._fail(job, choices, error)
            param = None if job.constraint is None else job.constraint.param
            raise invalid(param, f"{param} cannot be enforced: {error}") from None
        except RefusedError as error:
            await self._fail(job, choices, error)
            raise refused_by_sampler(error.code, str(error)) from None
        except ApiError as error:
            await self._fail(job, choices, error)
            raise
        except Exception as error:
            log.exception("sampling failed for %s", job.heading.id)
            await self._fail(job, choices, error)
            raise unavailable(f"the sampler failed: {type(error).__name__}: {error}",
                              "sampler_error") from error  # fmt: skip
        recording = _recorded(job, choices, response)
        await self._life.commit(job, recording, response, self._remembering(job, choices, response))
        if write is not None:
            await self._finish_stream(job, choices, response, write)
        return response

    def _begin(self, job: Job, write: Write | None) -> list[_Choice]:
        renderer, choices = self.deps.renderer, list[_Choice]()
        for index in job.choices:
            parser: Parser = PlainTextParser()
            if job.is_chat:
                tools = job.request.tools or False
                parser = renderer.parser(
                    tools=tools, opened=job.prompt.opened, one_call=job.one_call
                )
            reader = None
            if write is not None:
                reader = ChoiceStream(
                    job.request,
                    job.heading,
                    job.prompt.ids,
                    job.params.stop,
                    index,
                    renderer,
                    parser,
                    write,
                )
            elif job.one_call:
                reader = ChoiceReader(renderer, parser, job.params.stop)
            choices.append(_Choice(index, Sampled(), parser, reader))
        return choices

    async def _score(self, job: Job, scorer: PromptScorer) -> list[dict[str, Any]]:
        """The prompt's tokens, each with its log-prob; the first has none. They never train: the
        row's ``response_ids`` are what was sampled."""
        ids, renderer = job.prompt.ids, self.deps.renderer
        events = await scorer.score(ids, job.adapter, job.params.top_logprobs)
        logprobs = [event.logprob for event in events]
        tops = [event.top or () for event in events]
        rest = chat_objects.logprob_entries(renderer, ids[1:], logprobs, tops, hidden=True)
        [first] = chat_objects.logprob_entries(renderer, ids[:1], [0.0], [()], hidden=True)
        return [{**first, "logprob": None, "top_logprobs": None}, *rest]

    async def _sample(self, job: Job, choices: list[_Choice]) -> None:
        tops = job.params.top_logprobs > 0
        unfinished = len(choices)
        failed: ApiError | None = None
        events = self.deps.sampler.sample(job.prompt.ids, job.params, job.adapter)
        try:
            async for event in events:
                choice = choices[event.choice]
                one = choice.sampled
                if one.finish is not None:
                    continue  # ended here already, while the other choices go on
                if isinstance(event, FinishEvent):
                    one.finish = event
                    if event.reason in ("error", "cancelled"):
                        failed = unavailable(
                            f"the sampler failed: {event.error or event.reason}", "sampler_error"
                        )
                else:
                    one.add(event, tops=tops)
                    if job.heading.fingerprint is None:
                        job.heading.fingerprint = _fingerprint(job.adapter, event.adapter_version)
                    if choice.reader is None:
                        continue
                    await choice.reader.push(one)
                    if choice.parser.ended_at < 0:
                        continue
                    one.finish = FinishEvent(event.choice, "stop")
                unfinished -= 1
                if not unfinished:
                    break
        finally:
            if job.memory is not None and job.memory.spent is not None:
                job.memory.spent.tokens += sum(len(one.sampled.ids) for one in choices)
            await _aclose(events)
        if unfinished:
            raise unavailable("the sampler ended without finishing", "sampler_error")
        if failed is not None:
            raise failed

    def _read(self, job: Job, one: _Choice) -> None:
        """Reads a choice whose tokens are all there."""
        renderer, parser = self.deps.renderer, one.parser
        visible = [i for i in one.sampled.ids if not renderer.is_hidden(i)]
        one.text = whole_text(renderer.decode_raw, visible, job.params.stop)
        if one.reader is not None:
            one.reader.feed_rest()
        else:
            parser.feed(one.text)
        if parser.ended_at >= 0:
            one.text, one.sampled.cut_at_call = parser.text, True
        one.reply = parser.finish()
        one.withdrawn = parser.withdrawn if isinstance(one.reader, ChoiceStream) else []

    def _response(
        self, job: Job, made: list[_Choice], scores: list[dict[str, Any]] | None = None
    ) -> Part:
        heading = job.heading
        if heading.fingerprint is None:  # not one token was sampled
            version = None
            if job.adapter is not None:
                version = self.deps.sampler.adapters.get(job.adapter)
            heading.fingerprint = _fingerprint(job.adapter, version)
        choices: list[dict[str, Any]] = []
        for choice in made:
            one = choice.sampled
            reason = "stop" if one.finish is None else one.finish.reason
            if choice.reply.tool_calls and reason == "stop":
                reason = "tool_calls"
            logprobs = None
            if job.request.logprobs:
                logprobs = chat_objects.logprob_entries(
                    self.deps.renderer, one.ids, one.logprobs, one.tops, hidden=scores is not None
                )
            message = chat_objects.message(choice.reply, choice.withdrawn)
            said = chat_objects.choice(choice.index, message, reason, logprobs)
            if one.finish is not None and one.finish.stop_string is not None:
                said["stop_reason"] = one.finish.stop_string  # as vLLM tells it
            if scores is not None:
                said["prompt_logprobs"] = scores
            if job.request.return_token_ids:
                said["token_ids"] = one.ids
            choices.append(said)
        usage = chat_objects.usage(len(job.prompt.ids), sum(len(one.sampled.ids) for one in made))
        response = chat_objects.completion(heading, choices, usage)
        if job.request.return_token_ids:
            response["prompt_token_ids"] = job.prompt.ids
        return response

    async def _finish_stream(
        self, job: Job, choices: list[_Choice], response: Part, write: Write
    ) -> None:
        """The last chunks, all in one write: they leave only after the commit."""
        chunks: list[bytes] = []
        for one, said in zip(choices, response["choices"], strict=True):
            assert isinstance(one.reader, ChoiceStream)
            chunks += one.reader.last_chunks(one.reply, said)
        whole = chat_objects.together([*job.finished, response], job.request.n)
        chunks.append(job.request.dialect.end(whole))
        await write(b"".join(chunks))

    def _remembering(
        self, job: Job, made: list[_Choice], response: Part
    ) -> Callable[[], None] | None:
        """What keeps the conversation for its next turn, once the answer is durable."""
        memory = job.memory
        if memory is None or not job.is_chat:
            return None

        def remember() -> None:
            for one, said in zip(made, response["choices"], strict=True):
                self._remember(job, memory, said["message"], one.sampled, one.text)
                if one.withdrawn:  # an agent may drop the calls that never became any
                    self._remember(
                        job, memory, chat_objects.message(one.reply), one.sampled, one.text
                    )

        return remember

    def _remember(
        self, job: Job, memory: AttemptMemory, message: dict[str, Any], one: Sampled, text: str
    ) -> None:
        """The answer is durable: nothing may fail it."""
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

    async def _fail(self, job: Job, choices: list[_Choice], error: Exception) -> None:
        """Records what failed. Choices that are whole are answers: a retry is given them, and
        has the others sampled."""
        text = error.message if isinstance(error, ApiError) else f"{type(error).__name__}: {error}"
        whole = [one for one in choices if one.is_whole]
        if not whole or len(whole) == len(choices):
            await self._life.close(job, CallState.ERROR, _recorded(job, choices, None, text))
            return
        for one in whole:
            self._read(job, one)
        response = self._response(job, whole)
        recording = _recorded(job, choices, response, text)
        remember = self._remembering(job, whole, response)
        await self._life.commit(job, recording, response, remember, whole=False)
        self.stats.failed += 1


@dataclass(slots=True)
class _Choice:
    """One choice of an answer on its way."""

    index: int  # in the response
    sampled: Sampled
    parser: Parser
    reader: ChoiceStream | ChoiceReader | None
    # When it has been read:
    text: str = ""
    reply: ParsedReply = field(default_factory=ParsedReply)
    withdrawn: list[ToolCall] = field(default_factory=list[ToolCall])

    @property
    def is_whole(self) -> bool:
        finish = self.sampled.finish
        return finish is not None and finish.reason not in ("error", "cancelled")


def _recorded(
    job: Job, choices: list[_Choice], response: Part | None, error: str = ""
) -> Recording:
    """Records an answer, each choice with its own part of the response; the others failed."""
    whole = job.request.dialect.whole
    said: dict[int, dict[str, Any]] = {}
    if response is not None and len(choices) == 1:
        said = {choices[0].index: whole(response)}
    elif response is not None:
        said = {one["index"]: whole({**response, "choices": [one]}) for one in response["choices"]}
    return job.record.finish(
        [one.sampled for one in choices],
        CallState.ERROR,
        responses=[said.get(one.index) for one in choices],
        skip_reason=SkipReason.SAMPLER_ERROR,
        error=error.replace("\0", "\ufffd"),  # PostgreSQL takes no NUL
    )


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"


async def _aclose(events: AsyncIterator[SampleEvent]) -> None:
    """Ends the sample; a finished or already cancelled one does not mind."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
