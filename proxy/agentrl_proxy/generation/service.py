"""Answer chat and text completions with our own sampler: prompt, tokens, reply, rows.

Does not know routes, sockets, credentials or the client's protocol. A request's life around these
steps is in requests/lifecycle.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.errors import (
    ApiError,
    invalid,
    model_not_found,
    refused_by_sampler,
    unavailable,
)
from agentrl_proxy.generation.choices import Choice
from agentrl_proxy.generation.decoding import answer_room, decoding_params, recorded_params
from agentrl_proxy.generation.streaming import ChoiceReader, ChoiceStream
from agentrl_proxy.protocols import chat_objects
from agentrl_proxy.protocols.chat import ChatRequest
from agentrl_proxy.rendering.continuity import (
    ConversationKey,
    Prompt,
    remember_reply,
    render_prompt,
)
from agentrl_proxy.rendering.detokenizer import first_stop
from agentrl_proxy.rendering.structured_output import Constraint, Constraints, StructuredOutput
from agentrl_proxy.rendering.tool_call_parser import Parser, PlainTextParser
from agentrl_proxy.requests.attempts import AttemptMemories, AttemptMemory
from agentrl_proxy.requests.auth import Caller, ask
from agentrl_proxy.requests.lifecycle import OpenCall
from agentrl_proxy.requests.rate_limits import Admission
from agentrl_proxy.requests.recording import (
    Sampled,
    agent_name,
    derived_seed,
    finished_call,
    latest_state,
    open_calls,
)
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    PromptScorer,
    RefusedError,
)
from agentrl_proxy.server.sse import Write
from agentrl_proxy.stats import GatewayStats
from agentrl_tracer.schemas import AttemptState, Call, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """One prompt of a text completion: tokens to continue. Its answer is plain text."""

    request: ChatRequest  # what all prompts of the request share; it has no messages
    ids: list[int]
    first_choice: int  # index in the response
    scored: bool  # the answer has the log-probs of the prompt's tokens, too


@dataclass(slots=True)
class SampledCall(OpenCall):
    """An accepted request to our sampler, or one of its prompts."""

    request: ChatRequest
    prompt: Prompt
    params: DecodingParams
    constraint: Constraint | None
    adapter: str | None
    one_call: bool  # the answer ends where a second tool call begins
    scorer: PromptScorer | None  # of the prompt's own tokens
    rows: list[Call] = field(default_factory=list[Call])
    choices: list[Choice] = field(default_factory=list[Choice])

    @property
    def is_chat(self) -> bool:
        return bool(self.prompt.messages)


class ChatService:
    """The Service (requests/lifecycle.py) whose parts are ChatRequests and TextPrompts."""

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

    # --- accept

    async def accept(
        self,
        part: ChatRequest | TextPrompt,
        heading: chat_objects.Heading,
        caller: Caller,
        headers: Mapping[str, str],
    ) -> SampledCall:
        request = part if isinstance(part, ChatRequest) else part.request
        slot = self._admission.enter(request.n)
        try:
            adapter = self._available_adapter(request.model, headers)
            if isinstance(part, TextPrompt):
                prompt = Prompt(part.ids, [], ConversationKey(b"", b"", adapter), continues=None)
                constraint = None
            else:
                prompt = self.render(request, caller, headers)
                constraint = await self._constrain(request, prompt)
                heading.prompt_tokens = len(prompt.ids)
            params = self._decoding(request, prompt, caller, constraint)
            memory = self._memory(caller)
            seq, params = await self._within_budget(caller, memory, params, len(prompt.ids))
            call = SampledCall(
                caller=caller,
                memory=memory,
                heading=heading,
                slot=slot,
                request=request,
                prompt=prompt,
                params=params,
                constraint=constraint,
                adapter=adapter,
                one_call=self._ends_after_one_call(request, constraint),
                scorer=self._scorer(part),
            )
            first_choice = 0 if isinstance(part, ChatRequest) else part.first_choice
            self._open_rows(call, seq, first_choice, headers)
        except BaseException:
            slot.leave()
            raise
        self._count(call)
        return call

    def resolve_model(self, model: str, headers: Mapping[str, str]) -> str | None:
        """Return the adapter for a requested model or its agent; None is the base model."""
        deps = self.deps
        if model in deps.models:
            return deps.models[model]
        if (adapter := deps.agents.get(agent_name(headers) or "")) is not None:
            return adapter
        if deps.accept_any_model:
            return deps.default_adapter
        raise model_not_found(model)

    def render(self, request: ChatRequest, caller: Caller, headers: Mapping[str, str]) -> Prompt:
        """Render a request's prompt, continuing a conversation of the caller's attempt."""
        memory = self._memory(caller)
        return render_prompt(
            self.deps.renderer,
            None if memory is None else memory.conversations,
            request.messages,
            request.tools,
            self.resolve_model(request.model, headers),
        )

    def _memory(self, caller: Caller) -> AttemptMemory | None:
        attempt = caller.attempt
        return None if attempt is None else self._attempts.get(attempt.attempt_id)

    def _available_adapter(self, model: str, headers: Mapping[str, str]) -> str | None:
        adapter = self.resolve_model(model, headers)
        sampler = self.deps.sampler
        if not sampler.healthy:
            raise unavailable("the sampler is not available", "sampler_unavailable")
        if adapter is not None and adapter not in sampler.adapters:
            raise unavailable(f"adapter {adapter!r} is not loaded", "adapter_not_loaded")
        return adapter

    def _scorer(self, part: ChatRequest | TextPrompt) -> PromptScorer | None:
        if isinstance(part, ChatRequest) or not part.scored:
            return None
        sampler = self.deps.sampler
        if isinstance(sampler, PromptScorer):
            return sampler
        raise invalid(
            "echo",
            "echo with logprobs needs the log-probs of the prompt, which this sampler does not "
            "give; send one of them",
            code="unsupported_parameter",
        )

    async def _constrain(self, request: ChatRequest, prompt: Prompt) -> Constraint | None:
        return await self._constraints.of(
            StructuredOutput(
                request.response_format,
                request.tool_choice,
                request.tools,
                request.parallel_tool_calls,
                prompt.opened,
            )
        )

    def _decoding(
        self, request: ChatRequest, prompt: Prompt, caller: Caller, constraint: Constraint | None
    ) -> DecodingParams:
        deps = self.deps
        rollout = {} if caller.attempt is None else (caller.attempt.sampling or {})
        param = "messages" if prompt.messages else "prompt"
        return decoding_params(
            request,
            rollout,
            deps.defaults,
            room=answer_room(len(prompt.ids), deps.context_length, param),
            vocab_size=deps.renderer.vocab_size,
            grammar=None if constraint is None else constraint.grammar,
        )

    async def _within_budget(
        self,
        caller: Caller,
        memory: AttemptMemory | None,
        params: DecodingParams,
        prompt_tokens: int,
    ) -> tuple[int, DecodingParams]:
        """Take the request's place in its attempt's order and budget, and its seed."""
        attempt, store = caller.attempt, self.deps.store
        if attempt is None or memory is None:
            return 0, params
        room = await self._admission.within_budget(attempt, memory, params.n, prompt_tokens)
        if room is not None and room < params.max_tokens:
            params = replace(params, max_tokens=room)
        seq = await memory.take_seq(lambda: ask(store, store.next_seq, attempt.attempt_id))
        if params.seed is None:
            params = replace(params, seed=derived_seed(attempt.seed, seq))
        return seq, params

    def _ends_after_one_call(self, request: ChatRequest, constraint: Constraint | None) -> bool:
        one_call = constraint is None and request.tools and not request.parallel_tool_calls
        return bool(one_call) and self.deps.renderer.tells_calls_apart

    def _open_rows(
        self, call: SampledCall, seq: int, first_choice: int, headers: Mapping[str, str]
    ) -> None:
        deps, request, constraint, prompt = self.deps, call.request, call.constraint, call.prompt
        params = {**recorded_params(call.params), "continued": prompt.continued}
        not_enforced = request.grammar_fields
        if constraint is not None:
            params["constrained"] = constraint.kind
            not_enforced = list(constraint.not_enforced)
        if call.one_call:
            not_enforced.remove("parallel_tool_calls")
        if prompt.branched is not None:
            params["branched"] = prompt.branched.value
        if not_enforced:
            params["not_enforced"] = not_enforced
        call.rows = open_calls(
            deps.writer,
            response_id=call.heading.id,
            choices=range(first_choice, first_choice + request.n),
            run_id=deps.run_id,
            attempt=call.caller.attempt,
            seq=seq,
            model=request.model,
            request=request.raw,
            headers=headers,
            params=params,
            prompt_ids=prompt.ids,
            adapter=call.adapter,
            adapter_version=self._version(call.adapter),
        )

    def _version(self, adapter: str | None) -> int | None:
        return None if adapter is None else self.deps.sampler.adapters.get(adapter)

    def _count(self, call: SampledCall) -> None:
        stats, prompt = self.stats, call.prompt
        stats.accepted += call.params.n
        stats.constrained += call.constraint is not None
        stats.continued += prompt.continued
        stats.rendered += not prompt.continued
        if prompt.branched is not None:
            reason = prompt.branched.value
            stats.branched[reason] = stats.branched.get(reason, 0) + 1

    # --- generate

    async def generate(self, call: SampledCall, write: Write | None) -> dict[str, Any]:
        try:
            return await self._generate(call, write)
        except Exception as error:
            refusal = _refusal(call, error)
            said = refusal.message if error is refusal else f"{type(error).__name__}: {error}"
            call.error = said.replace("\0", "\ufffd")  # PostgreSQL takes no NUL
            if refusal.code == "sampler_error" and error is not refusal:
                log.exception("sampling failed for %s", call.heading.id)
            raise refusal from None

    async def _generate(self, call: SampledCall, write: Write | None) -> dict[str, Any]:
        renderer, request = self.deps.renderer, call.request
        call.choices = [self._choice(call, row.choice, write) for row in call.rows]
        scores = None if call.scorer is None else await self._score(call, call.scorer)
        if call.params.max_tokens:
            await self._sample(call)
        else:
            for i, choice in enumerate(call.choices):
                choice.sampled.finish = FinishEvent(i, "length")
        said: list[dict[str, Any]] = []
        for choice in call.choices:
            choice.read(renderer, call.params.stop)
            said.append(
                choice.response(
                    renderer,
                    logprobs=request.logprobs,
                    token_ids=request.return_token_ids,
                    prompt_logprobs=scores,
                )
            )
        if call.heading.fingerprint is None:  # no token was sampled
            call.heading.fingerprint = _fingerprint(call.adapter, self._version(call.adapter))
        sampled = sum(len(choice.sampled.ids) for choice in call.choices)
        usage = chat_objects.usage(len(call.prompt.ids), sampled)
        response = chat_objects.completion(call.heading, said, usage)
        if request.return_token_ids:
            response["prompt_token_ids"] = call.prompt.ids
        return response

    def _choice(self, call: SampledCall, index: int, write: Write | None) -> Choice:
        renderer, stop = self.deps.renderer, call.params.stop
        parser: Parser = PlainTextParser()
        if call.is_chat:
            parser = renderer.parser(
                tools=call.request.tools or False,
                opened=call.prompt.opened,
                one_call=call.one_call,
            )
        reader = None
        if write is not None:
            reader = ChoiceStream(
                call.request, call.heading, call.prompt.ids, stop, index, renderer, parser, write
            )
        elif call.one_call:
            reader = ChoiceReader(renderer, parser, stop)
        return Choice(index, parser, reader)

    async def _score(self, call: SampledCall, scorer: PromptScorer) -> list[dict[str, Any]]:
        """Return an entry for each prompt token; the first has no log-prob. They never train: a
        row's ``response_ids`` are the sampled tokens."""
        ids, renderer = call.prompt.ids, self.deps.renderer
        events = await scorer.score(ids, call.adapter, call.params.top_logprobs)
        entries = chat_objects.logprob_entries(
            renderer,
            ids,
            [0.0, *(event.logprob for event in events)],
            [(), *(event.top or () for event in events)],
            hidden=True,
        )
        entries[0] |= {"logprob": None, "top_logprobs": None}
        return entries

    async def _sample(self, call: SampledCall) -> None:
        choices, tops = call.choices, call.params.top_logprobs > 0
        unfinished = len(choices)
        failed: ApiError | None = None
        events = self.deps.sampler.sample(call.prompt.ids, call.params, call.adapter)
        try:
            async for event in events:
                choice = choices[event.choice]
                sampled = choice.sampled
                if sampled.finish is not None:
                    continue  # ended here already, while the other choices go on
                if isinstance(event, FinishEvent):
                    sampled.finish = event
                    if event.reason in ("error", "cancelled"):
                        failed = unavailable(
                            f"the sampler failed: {event.error or event.reason}", "sampler_error"
                        )
                else:
                    sampled.add(event, tops=tops)
                    if call.heading.fingerprint is None:
                        call.heading.fingerprint = _fingerprint(call.adapter, event.adapter_version)
                    if choice.reader is None:
                        continue
                    await choice.reader.push(sampled)
                    if choice.parser.ended_at < 0:
                        continue
                    sampled.finish = FinishEvent(event.choice, "stop")
                unfinished -= 1
                if not unfinished:
                    break
        finally:
            if call.memory is not None and call.memory.spent is not None:
                call.memory.spent.tokens += sum(len(one.sampled.ids) for one in choices)
            close = getattr(events, "aclose", None)  # cancels the sample, if it goes on
            if close is not None:
                await close()
        if unfinished:
            raise unavailable("the sampler ended without finishing", "sampler_error")
        if failed is not None:
            raise failed

    # --- record and answer

    async def record(
        self, call: SampledCall, state: CallState, response: dict[str, Any] | None = None
    ) -> AttemptState | None:
        whole = call.request.dialect.whole
        said: list[dict[str, Any] | None] = [None] * len(call.rows)
        if response is not None and len(call.rows) == 1:
            said = [whole(response)]
        elif response is not None:
            said = [whole({**response, "choices": [one]}) for one in response["choices"]]
        skip_reason = {
            CallState.CANCELLED: SkipReason.CLIENT_DISCONNECTED,
            CallState.ERROR: SkipReason.SAMPLER_ERROR,
        }.get(state)
        # A call that was given up before ``generate`` has no choices.
        sampled = [one.sampled for one in call.choices] or [Sampled() for _ in call.rows]
        rows = [
            finished_call(
                row, one, state, response=body, skip_reason=skip_reason, error=call.error or None
            )
            for row, one, body in zip(call.rows, sampled, said, strict=True)
        ]
        return await latest_state([self.deps.writer.finish(row) for row in rows])

    def answered(self, call: SampledCall, response: dict[str, Any]) -> None:
        """Remember the conversation for its next turn."""
        memory = call.memory
        if memory is None or not call.is_chat:
            return
        for choice, said in zip(call.choices, response["choices"], strict=True):
            self._remember(call, memory, choice, said["message"])
            if choice.withdrawn:  # an agent may drop tool calls that did not finish
                self._remember(call, memory, choice, chat_objects.message(choice.reply))

    def _remember(
        self, call: SampledCall, memory: AttemptMemory, choice: Choice, message: dict[str, Any]
    ) -> None:
        renderer, stop, ids = self.deps.renderer, call.params.stop, choice.sampled.ids
        try:
            cut = choice.sampled.cut_at_call or (
                bool(stop) and first_stop(renderer.decode(ids), stop) is not None
            )
            remember_reply(
                renderer, memory.conversations, call.prompt, message, ids, choice.text, cut=cut
            )
        except Exception:  # the answer is durable: nothing may fail it
            log.exception("%s will not be continued", call.heading.id)

    def last_chunks(self, call: SampledCall, response: dict[str, Any]) -> list[bytes]:
        chunks: list[bytes] = []
        for choice, said in zip(call.choices, response["choices"], strict=True):
            assert isinstance(choice.reader, ChoiceStream)
            chunks += choice.reader.last_chunks(choice.reply, said)
        return chunks


def _refusal(call: SampledCall, error: Exception) -> ApiError:
    """The answer to a client whose request the sampler refused or failed."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            param = "messages" if call.is_chat else "prompt"
            return ApiError(400, str(error), param=param, code="context_length_exceeded")
        case GrammarError():
            param = None if call.constraint is None else call.constraint.param
            return invalid(param, f"{param} cannot be enforced: {error}")
        case RefusedError():
            return refused_by_sampler(error.code, str(error))
        case _:
            message = f"the sampler failed: {type(error).__name__}: {error}"
            return unavailable(message, "sampler_error")


def _fingerprint(adapter: str | None, version: int | None) -> str:
    if adapter is None:
        return "base"
    return adapter if version is None else f"{adapter}@{version}"
