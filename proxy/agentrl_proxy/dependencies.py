"""What a gateway is made of, and what it counts.

Knows the parts by their protocols: any store and writer that answer like agentrl_tracer's will
do. Does not know how a request is handled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.sampler import Sampler
from agentrl_proxy.server.limits import ConnectionLimits
from agentrl_tracer.schemas import AttemptRef, AttemptState, Call, PastCall, Reward, Span

MAX_BODY_BYTES = 32 * 1024 * 1024


class GatewayStore(Protocol):
    """The part of agentrl_tracer's Store that a gateway uses."""

    is_remote: bool

    def authenticate(self, key: str) -> AttemptRef | None: ...
    def attempt_state(self, attempt_id: str) -> AttemptState | None: ...
    def next_seq(self, attempt_id: str) -> int: ...
    def spent(self, attempt_id: str) -> tuple[int, int]: ...
    def same_requests(self, attempt_id: str, request: dict[str, Any]) -> list[PastCall]: ...


class TraceSink(Protocol):
    """agentrl_tracer's TraceWriter."""

    def open(self, call: Call) -> None: ...
    async def finish(self, call: Call) -> AttemptState | None: ...
    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None: ...


class SpanExporter(Protocol):
    """telemetry's OtlpExporter."""

    def put(self, spans: Sequence[Span]) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProviderModel:
    """A model that somebody else serves, as LiteLLM reaches it."""

    model: str  # LiteLLM's name: provider/model
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    num_retries: int = 2
    fallbacks: Sequence[str] = ()  # names of other models, asked in this order
    params: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    is_policy: bool = False
    """It answers in the policy's place: what the rollout forces on its sampling holds for it."""


@dataclass(slots=True)
class GatewayDependencies:
    sampler: Sampler
    renderer: Renderer
    store: GatewayStore
    writer: TraceSink
    boot_id: str
    models: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Requested model name → adapter name; None: the base model."""
    agents: Mapping[str, str] = field(default_factory=dict[str, str])
    """Agent (role) → adapter name: who answers an agent that asks for no name in ``models``."""
    default_adapter: str | None = None
    """Answers unknown model names when ``accept_any_model``; None: the base model does."""
    accept_any_model: bool = True
    """Agents hard-code names like gpt-4o-mini; False answers 404 to those not in ``models``."""
    provider_models: Mapping[str, ProviderModel] = field(default_factory=dict[str, ProviderModel])
    """Requested model name → a model behind LiteLLM: recorded, never trained."""
    operator_key: str | None = None
    """None: whoever reaches the port may sample without a rollout. Loopback only, see server."""
    run_id: str | None = None
    """Recorded with calls made outside any rollout."""
    context_length: int | None = None
    """Tokens of prompt and answer together; None: the sampler raises ContextLengthError itself."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling defaults of requests and attempts that set nothing."""
    max_body_bytes: int = MAX_BODY_BYTES
    max_concurrent: int = 1024
    """Requests answered at once, whoever answers; those beyond are told to come back (429)."""
    max_queued: int = 1024
    """Answers waiting in the sampler's queue; while there are more, no request is added."""
    max_calls_per_rollout: int | None = None
    """Answers that one attempt may have sampled; None: no limit."""
    max_tokens_per_rollout: int | None = None
    """Prompt and sampled tokens that one attempt may use; None: no limit."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Of a connection."""
    forward: SpanExporter | None = None
    """Gets what is recorded, too. The app closes it."""
