"""Define what a gateway is given (sampler, renderer, store, models, limits) and what it counts.

Defaults of settings are in agentrl/config/settings/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.sampler import Sampler
from agentrl_tracer.schemas import AttemptState, Call, Reward, Span

if TYPE_CHECKING:
    from agentrl_proxy.requests.speakers import SpeakerRule
    from agentrl_proxy.telemetry.otlp_export import OtlpExporter
    from agentrl_tracer.store import Store


class TraceSink(Protocol):
    """agentrl_tracer's TraceWriter."""

    def open(self, call: Call) -> None: ...
    async def finish(self, call: Call) -> AttemptState | None: ...
    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None: ...


@dataclass(frozen=True, slots=True)
class ProviderModel:
    """A provider's model, as LiteLLM reaches it."""

    model: str  # LiteLLM's name: provider/model
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0  # seconds
    num_retries: int = 2
    fallbacks: Sequence[str] = ()  # names of other provider models, in order
    params: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    is_policy: bool = False
    """It answers in place of the policy, so a rollout's forced sampling applies to it."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of every connection. Request heads are not limited: see docs/serving.md."""

    receive_s: float  # for a request's body to arrive
    receive_bytes: int
    """Of all bodies that are still arriving, together; further large bodies get 429."""
    stall_s: float  # that a client may leave an answer unread before it is disconnected
    grace_s: int  # for running answers after the server is told to stop


MAX_BODY_BYTES = 8 * 1024 * 1024
"""Parsing, encoding and storing a body hold other requests up, by 10 ms a MiB."""


@dataclass(slots=True)
class GatewayDependencies:
    """The parts, models and limits of one gateway."""

    sampler: Sampler
    renderer: Renderer
    store: Store
    writer: TraceSink
    boot_id: str
    _: KW_ONLY
    accept_any_model: bool
    """Whether ``default_adapter`` answers unknown model names (agents hard-code names like
    gpt-4o-mini); else they get 404."""
    max_concurrent: int
    """Requests answered at once, providers' included; further ones get 429."""
    max_queued: int
    """Answers waiting in the sampler's queue, at which further requests get 429."""
    limits: ConnectionLimits
    """Of each connection."""
    models: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Requested model name → adapter name; None: the base model."""
    agents: Mapping[str, str] = field(default_factory=dict[str, str])
    """Agent (role) → adapter name, for model names that are not in ``models``."""
    speakers: Sequence[SpeakerRule] = ()
    """Name the agent of a request whose client names none; the first that fits does."""
    default_adapter: str | None = None
    """None: the base model."""
    provider_models: Mapping[str, ProviderModel] = field(default_factory=dict[str, ProviderModel])
    """Requested model name → a provider's model: recorded, never trained."""
    leave_out_tools: bool = False
    """Whether tools that only a provider runs (web search) are left out of requests in the
    Responses and Messages APIs, and noted on the call; else the request is refused."""
    operator_key: str | None = None
    """None: anyone who reaches the port may sample outside rollouts; only on loopback."""
    allowed_hosts: Sequence[str] = ()
    """Names besides its own by which clients may address the gateway, see server/hosts.py."""
    run_id: str | None = None
    """Recorded with calls outside any rollout."""
    base_model: str | None = None
    """The same: the name of the sampler's base model, to which tokens belong."""
    context_length: int | None = None
    """Tokens of prompt and answer together; None: only the sampler knows."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling values that neither the request nor its rollout sets."""
    max_body_bytes: int = MAX_BODY_BYTES
    max_calls_per_rollout: int | None = None
    """Choices that one attempt may request; None: no limit."""
    max_tokens_per_rollout: int | None = None
    """Prompt and sampled tokens that one attempt may use; None: no limit."""
    forward: OtlpExporter | None = None
    """Exports what is recorded. The app closes it."""


@dataclass(slots=True)
class GatewayStats:
    """Counts since start: ``accepted`` and ``other_models`` of choices, the rest of requests."""

    accepted: int = 0
    in_flight: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    late: int = 0  # 409: the attempt was sealed while sampling
    undelivered: int = 0  # answers of rollouts that did not reach their client
    replayed: int = 0  # client retries answered with a replayed answer
    continued: int = 0  # prompts that kept the exact tokens of an earlier call
    rendered: int = 0
    constrained: int = 0  # sampled under a grammar: response_format, tool_choice
    branched: dict[str, int] = field(default_factory=dict[str, int])
    """Prompts that did not continue the last reply, by reason: see rendering.continuity.Branch."""
    other_models: int = 0  # choices of providers' models
    refused: int = 0  # 401 and 403
    mismatched: int = 0  # of those, header, path and key named different rollouts
    sealed: int = 0  # 409 at once: the attempt had ended
    overloaded: int = 0  # 429: too many requests at once
    over_budget: int = 0  # 429: the rollout's budget is used up
