"""Answer chat and text completions with our own sampler: prompt, tokens, reply, rows.

Does not know routes, sockets, credentials or the client's protocol. A request's life around these
steps is in requests/lifecycle.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentrl_proxy.dependencies import GatewayDependencies, GatewayStats
from agentrl_proxy.errors import (
    ApiError,
    context_length_exceeded,
    invalid,
    model_not_found,
    unavailable,
)
from agentrl_proxy.generation.recall import recall_reply
from agentrl_proxy.generation.response import Choice, SampledCall, generate_response
from agentrl_proxy.protocols.chat import ChatRequest, sampling_value
from agentrl_proxy.rendering.continuity import (
    ConversationKey,
    Conversations,
    Prompt,
    remember_reply,
    render_prompt,
)
from agentrl_proxy.rendering.renderer import MAX_VARIANTS, Renderer
from agentrl_proxy.rendering.structured_output import Constraint, Constraints
from agentrl_proxy.requests.attempts import AttemptMemory
from agentrl_proxy.requests.lifecycle import ClientRequest
from agentrl_proxy.requests.recording import (
    Sampled,
    derived_seed,
    finished_call,
    latest_state,
    open_calls,
)
from agentrl_proxy.sampler import DecodingParams, PromptScorer
from agentrl_proxy.server.large_requests import LargeRequests
from agentrl_proxy.server.sse import Write
from agentrl_tracer.schemas import AttemptState, CallState, SkipReason

log = logging.getLogger("agentrl.proxy")

_DEFAULT_MAX_TOKENS = 4096  # where neither a setting nor the context length limits the answer
_UNREAD_BYTES = 64 * 1024
_BYTES_PER_TOKEN = 64
_TUNABLE = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")


@dataclass(eq=False, repr=False)
class ChatService:
    """The Service (requests/lifecycle.py) whose parts are ChatRequests."""

    deps: GatewayDependencies
    stats: GatewayStats
    large: LargeRequests

    def __post_init__(self) -> None:
        self._constraints = lru_cache(MAX_VARIANTS)(Constraints)

    async def accept(self, request: ChatRequest, client: ClientRequest) -> SampledCall:
        deps, sampler, stats, memory = self.deps, self.deps.sampler, self.stats, client.memory
        adapter = self.resolve_model(request.raw["model"], client.agent)
        if not sampler.healthy:
            raise unavailable("the sampler is not available", "sampler_unavailable")
        version = None if adapter is None else sampler.adapters.get(adapter)
        if adapter is not None and version is None:
            raise unavailable(f"adapter {adapter!r} is not loaded", "adapter_not_loaded")
        renderer, constraint = self._renderer(request), None
        prompt = await self._prompt(request, client, adapter)
        if request.prompt_ids is None:
            constraint = await self._constraints(renderer).of(request, opening=prompt.opening)
        if request.scored and not isinstance(sampler, PromptScorer):
            raise invalid(
                "echo",
                "echo with logprobs needs the log-probs of the prompt, which this sampler does not "
                "give; send one of them",
                code="unsupported_parameter",
            )
        attempt = None if memory is None else memory.attempt
        rollout = {} if attempt is None else attempt.sampling or {}
        values = _sampling_values(deps, request, rollout, len(prompt.ids))
        room, seq = await client.take_turn(request.n, len(prompt.ids))
        if room is not None:
            values["max_tokens"] = min(values["max_tokens"], room)
        if attempt is not None and "seed" not in values:
            values["seed"] = derived_seed(attempt.seed, seq)
        params = DecodingParams(
            n=request.n,
            top_logprobs=request.top_logprobs,
            logit_bias=request.logit_bias,
            grammar=None if constraint is None else constraint.grammar,
            rollout=None if attempt is None else attempt.rollout_id,
            **values,
        )
        one_call = constraint is None and bool(request.tools) and not request.parallel_tool_calls
        one_call = one_call and deps.renderer.tells_calls_apart
        continued = prompt.continues is not None
        recorded = {**_recorded_params(params), "continued": continued}
        if renderer.template_kwargs:
            recorded["chat_template_kwargs"] = renderer.template_kwargs
        if request.left_out:
            recorded["left_out"] = list(request.left_out)
        if constraint is not None:
            recorded["constrained"] = constraint.kind
        if not_enforced := _not_enforced(request, constraint, one_call):
            recorded["not_enforced"] = not_enforced
        branched = (
            prompt.branched if memory is None else memory.begins(client.agent, prompt.branched)
        )
        if branched is not None:
            reason = recorded["branched"] = branched.value
            stats.branched[reason] = stats.branched.get(reason, 0) + 1
        rows = open_calls(
            client, request, seq, recorded, prompt_ids=prompt.ids, adapter=adapter,
            adapter_version=version,
        )  # fmt: skip
        stats.accepted += params.n
        stats.constrained += constraint is not None
        stats.continued += continued
        stats.rendered += not continued
        return SampledCall(
            client, request, renderer, prompt, params, constraint, adapter, one_call, rows
        )

    async def _prompt(
        self, request: ChatRequest, client: ClientRequest, adapter: str | None
    ) -> Prompt:
        """Return the prompt as the client's token ids or as rendered messages.

        Raises:
            ApiError: the model does not read most of the request, which its rows would hold.
        """
        if request.prompt_ids is not None:
            key = ConversationKey(b"", b"", adapter)
            return Prompt(request.prompt_ids, "", [], key, continues=None)
        prompt = await self.large.run(client.large, self.render, request, client.memory, adapter)
        client.heading.prompt_tokens = len(prompt.ids)
        most = _UNREAD_BYTES + _BYTES_PER_TOKEN * len(prompt.ids)
        if client.size > most:
            raise ApiError(
                413,
                f"the body has {client.size} bytes for a prompt of {len(prompt.ids)} tokens; "
                f"up to {most} are recorded: leave out what the model does not read",
                code="body_too_large",
            )
        return prompt

    def resolve_model(self, model: str, agent: str | None) -> str | None:
        """Return the adapter for a requested model or its agent; None is the base model."""
        deps = self.deps
        if model in deps.models:
            return deps.models[model]
        if (adapter := deps.agents.get(agent or "")) is not None:
            return adapter
        if deps.accept_any_model:
            return deps.default_adapter
        raise model_not_found(model)

    def render(
        self,
        request: ChatRequest,
        memory: AttemptMemory | None,
        adapter: str | None,
        *,
        longest: int = 1,
    ) -> Prompt:
        """Render a request's prompt, continuing a conversation of the attempt.

        Args:
            longest: context lengths, above which the prompt need not be tokenized.
        """
        limit = self.deps.context_length and longest * self.deps.context_length
        known = None if memory is None else memory.conversations
        asked = (request.messages, request.tools, adapter, limit)
        prompt = render_prompt(self._renderer(request), known, *asked)
        if prompt.continues is None and request.earlier is not None:
            # Outside rollouts, or an earlier process answered it.
            known = Conversations() if known is None else known
            with contextlib.suppress(ApiError):  # what was valid then may be refused now
                recall_reply(self.deps.renderer, known, request.earlier)
            prompt = render_prompt(self._renderer(request), known, *asked)
        return prompt

    def _renderer(self, request: ChatRequest) -> Renderer:
        """Return the renderer with the switches of the request, else of the settings."""
        if request.prompt_ids is not None:  # no template writes it
            return self.deps.renderer
        thinking = request.thinking
        if thinking is None:
            thinking = self.deps.defaults.get("thinking")
        return self.deps.renderer.with_switches(
            thinking, request.reasoning_effort, request.template_kwargs
        )

    async def generate(self, call: SampledCall, write: Write | None) -> dict[str, Any]:
        return await generate_response(self.deps, call, write)

    async def record(
        self, call: SampledCall, state: CallState, response: dict[str, Any] | None = None
    ) -> AttemptState | None:
        said: list[dict[str, Any] | None] = [None] * len(call.rows)
        if response is not None:
            said = [{**response, "choices": [one]} for one in response["choices"]]
        skip_reason = {
            CallState.CANCELLED: SkipReason.CLIENT_DISCONNECTED,
            CallState.ERROR: SkipReason.SAMPLER_ERROR,
        }.get(state)
        # A call that was given up before ``generate`` has no choices.
        sampled = [one.sampled for one in call.choices] or [Sampled() for _ in call.rows]
        rows = [
            finished_call(row, one, state, body, skip_reason, call.error or None, call.error_status)
            for row, one, body in zip(call.rows, sampled, said, strict=True)
        ]
        return await latest_state([self.deps.writer.finish(row) for row in rows])

    def answered(self, call: SampledCall, response: dict[str, Any]) -> None:
        """Remember the conversation for its next turn."""
        memory = call.client.memory
        if memory is None or not call.is_chat:
            return
        memory.hear(call.client.agent)
        for choice, said in zip(call.choices, response["choices"], strict=True):
            self._remember(call, memory, choice, said["message"])

    def _remember(
        self, call: SampledCall, memory: AttemptMemory, choice: Choice, message: dict[str, Any]
    ) -> None:
        renderer, stop, ids = call.renderer, call.params.stop, choice.sampled.ids
        try:
            whole = renderer.decode(ids) if stop else ""
            cut = choice.sampled.cut_at_call or any(one in whole for one in stop)
            remember_reply(
                renderer, memory.conversations, call.prompt, message, ids, choice.text, cut=cut
            )
        except Exception:  # the answer is durable: nothing may fail it
            log.exception("%s will not be continued", call.client.heading.id)

    def last_chunks(self, call: SampledCall, response: dict[str, Any]) -> list[bytes]:
        pairs = zip(call.choices, response["choices"], strict=True)
        return [chunk for choice, said in pairs for chunk in choice.last_chunks(said)]


def _sampling_values(
    deps: GatewayDependencies, request: ChatRequest, rollout: Mapping[str, Any], prompt_tokens: int
) -> dict[str, Any]:
    """Take each value from the first source that sets it: the rollout's ``force``, the request, the
    rollout, the gateway's defaults.

    Args:
        rollout: the rollout's sampling settings.

    Raises:
        ApiError: the prompt leaves no room, or a value is out of range (400).
    """
    context_length, vocab_size = deps.context_length, deps.renderer.vocab_size
    room = None if context_length is None else context_length - prompt_tokens
    if context_length is not None and prompt_tokens >= context_length:
        param = "messages" if request.prompt_ids is None else "prompt"
        raise context_length_exceeded(prompt_tokens, context_length, param)
    values: dict[str, Any] = {}
    for name in _TUNABLE:
        for source in (rollout.get("force") or {}, request.sampling, rollout, deps.defaults):
            value = source.get(name)
            if value is not None:
                checked = source is request.sampling
                values[name] = value if checked else sampling_value(name, value)
                break
    if request.sampling.get("max_tokens") == 0:  # echo alone; ``force`` must not sample
        values["max_tokens"] = 0
    elif room is not None:
        # max_tokens is a limit, so an answer that fits is better than a refusal.
        values["max_tokens"] = min(values.get("max_tokens", room), room)
    values.setdefault("max_tokens", _DEFAULT_MAX_TOKENS)
    if any(token_id >= vocab_size for token_id, _ in request.logit_bias):
        raise invalid("logit_bias", f"logit_bias: token ids go from 0 to {vocab_size - 1}")
    return values


def _recorded_params(params: DecodingParams) -> dict[str, Any]:
    """Return what ``Call.params`` says of the sampling."""
    # Not by ``asdict``: it copies deeply, for every request.
    recorded: dict[str, Any] = {name: getattr(params, name) for name in (*_TUNABLE, "n")}
    recorded["stop"] = list(params.stop)
    if params.logit_bias:
        recorded["logit_bias"] = {str(i): value for i, value in params.logit_bias}
    return recorded


def _not_enforced(request: ChatRequest, constraint: Constraint | None, one_call: bool) -> list[str]:
    """Name the fields of a request that hold only as far as the model obeys them."""
    if constraint is not None:
        return [*request.not_enforced, *constraint.not_enforced]
    several = bool(request.tools) and not request.parallel_tool_calls and not one_call
    strict = any(tool["function"].get("strict") for tool in request.tools or ())
    only_by_grammar = {"parallel_tool_calls": several, "strict": strict}
    return [*request.not_enforced, *(name for name, sent in only_by_grammar.items() if sent)]
