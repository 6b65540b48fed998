"""What the gateway asks of whatever produces tokens: token ids in, token events out.

Knows tokens, adapters by name and version, and how a sample ends. Does not know chat messages,
HTTP, the store or torch: the embedded engine, vLLM and Tinker are each bridged to this protocol.

The contract on stop strings: the sampler stops as soon as the text of a choice contains one; the
events include every token sampled up to then, the stop token too. Cutting the text that the
client sees is the gateway's business, so the recorded ids stay what was sampled.

The contract on grammars and biases: they decide what is drawn, never what is reported. A token's
log-probability is the raw policy's, so a token that the grammar forced may have a very low one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """How to sample. Everything is already decided here: no field means "the sampler's default"."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()
    seed: int | None = None  # choice i of n derives its own stream from (seed, i)
    n: int = 1
    top_logprobs: int = 0  # how many alternatives each TokenEvent lists
    grammar: str | None = None  # what the answer must conform to, in llguidance's Lark
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)


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
    """The last event of one choice. A sample is over when every choice has had one."""

    choice: int
    reason: FinishReason
    error: str | None = None
    stop_string: str | None = None  # the one that ended it; None: a stop token, or another reason
    log_mass: float | None = None
    """With a grammar: Σ over the answer's tokens of log(raw probability that the mask left)."""


SampleEvent: TypeAlias = TokenEvent | FinishEvent


class ContextLengthError(ValueError):
    """The prompt leaves the model no room to answer. The gateway answers 400, not 503."""


class GrammarError(ValueError):
    """The sampler cannot enforce this grammar. It never samples as if there were none."""


RefusalCode: TypeAlias = Literal["invalid_parameter", "unknown_adapter", "stopped"]


class RefusedError(ValueError):
    """The sampler does not take this request; ``code`` decides the HTTP status."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


@runtime_checkable
class PromptScorer(Protocol):
    """What a sampler may be besides: one that says how likely given tokens are. A gateway whose
    sampler is none refuses ``echo`` with ``logprobs``."""

    async def score(
        self, prompt_ids: Sequence[int], adapter: str | None, top: int
    ) -> list[TokenEvent]:
        """Each token but the first, given those before it, with ``top`` alternatives. Nothing is
        sampled.

        Raises:
            ContextLengthError, RefusedError: as ``Sampler.sample``.
        """
        ...


@runtime_checkable
class Sampler(Protocol):
    """Samples from one base model with any of its loaded adapters."""

    @property
    def adapters(self) -> Mapping[str, int]:
        """Loaded adapters and the version each one answers with now."""
        ...

    @property
    def healthy(self) -> bool: ...

    def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        """Events of ``params.n`` choices, interleaved. Closing the iterator cancels the sample.

        Raises:
            ContextLengthError: prompt or answer do not fit.
            RefusedError: it is not taken for another reason.
        """
        ...

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        """Answer with this version from the next token on; return once that holds.

        Raises:
            RefusedError: not now; or, ``invalid_parameter``, not this one.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """For /healthz. ``waiting``, if there, is the length of the queue."""
        ...
