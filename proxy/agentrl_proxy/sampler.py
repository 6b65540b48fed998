"""Define the Sampler protocol: token ids in, token events out.

The embedded engine, vLLM and Tinker are each adapted to it. It does not know chat messages, HTTP,
the store or torch.

Stop strings: the sampler stops as soon as a choice's text contains one. The events include every
token sampled up to then, the stop token too, so recorded ids stay what was sampled. The gateway
cuts the text that the client sees.

Grammars and biases decide what is drawn, never what is reported: a token's log-probability is the
raw policy's, so a token that a grammar forced may have a very low one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """How to sample. Every value is set: none means "the sampler's default"."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()
    seed: int | None = None  # choice i of n derives its own stream from (seed, i)
    n: int = 1
    top_logprobs: int = 0  # how many alternatives each TokenEvent lists
    grammar: str | None = None  # for the answer, in llguidance's Lark
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    rollout: str | None = None
    """Requests of one rollout share prefixes: a sampler of several engines gives them to one."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token.

    ``logprob`` is natural, of the temperature-1 policy before bias, grammar, top-p and top-k.
    """

    choice: int
    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] | None = None  # (token id, logprob), likeliest first
    adapter_version: int | None = None  # None: the base model


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a choice. A sample ends when every choice has one."""

    choice: int
    reason: FinishReason
    error: str | None = None
    stop_string: str | None = None  # that ended it; None: another reason
    log_mass: float | None = None
    """With a grammar: Σ over the answer's tokens of log(raw probability that the mask left)."""


SampleEvent: TypeAlias = TokenEvent | FinishEvent


class ContextLengthError(ValueError):
    """The prompt leaves no room for an answer. The gateway answers 400."""


class GrammarError(ValueError):
    """The sampler cannot enforce this grammar. It never samples without it."""


RefusalCode: TypeAlias = Literal[
    "invalid_parameter", "unknown_adapter", "stopped", "deferred", "files_not_found"
]
"""``deferred``: of an adapter, which the sampler loads when its server is back;
``files_not_found``: of an adapter, whose files the sampler's server does not see yet."""


class RefusedError(ValueError):
    """The sampler refuses this request; ``code`` decides the HTTP status."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


@runtime_checkable
class PromptScorer(Protocol):
    """A sampler that also scores given tokens. Without it, the gateway refuses ``echo`` with
    ``logprobs``."""

    async def score(
        self, prompt_ids: Sequence[int], adapter: str | None, top: int
    ) -> list[TokenEvent]:
        """Score each token but the first, given those before it, with ``top`` alternatives.

        Raises:
            ContextLengthError, RefusedError: as ``Sampler.sample``.
        """
        ...


@runtime_checkable
class PrefixCache(Protocol):
    """A sampler that takes memory for prefixes of finished calls, or for the next ones."""

    async def drop_prefixes(self) -> None:
        """Free that memory, which no call is expected to use."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Samples from one base model with any of its loaded adapters."""

    @property
    def adapters(self) -> Mapping[str, int]:
        """Loaded adapters and their current versions."""
        ...

    @property
    def healthy(self) -> bool: ...

    def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        """Yield interleaved events of ``params.n`` choices; closing the iterator cancels them.

        Raises:
            ContextLengthError: prompt or answer do not fit.
            RefusedError: the request is refused for another reason.
        """
        ...

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        """Sample with this version from the next token on; return once that holds.

        Raises:
            RefusedError: ``invalid_parameter`` is final, other codes are not.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Return values for /healthz; ``waiting``, if present, is the length of the queue."""
        ...
