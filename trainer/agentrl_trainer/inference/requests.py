"""What goes into the sampler and what comes out of it. Tokens only: no text, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]

RequestErrorCode: TypeAlias = Literal[
    "invalid_parameter",
    "invalid_grammar",
    "context_length_exceeded",
    "kv_budget_exceeded",
    "unknown_adapter",
    "engine_stopped",
]


class RequestError(ValueError):
    """A request the engine refuses; ``code`` lets the gateway choose its HTTP status."""

    def __init__(self, code: RequestErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: RequestErrorCode = code


@dataclass(frozen=True, slots=True)
class SampleParams:
    max_tokens: int
    """Most tokens to sample, stop token included; the context length caps it further."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    stop_ids: frozenset[int] = frozenset()
    """Sampling ends with the first of these, which is itself part of the answer. Nothing is added
    to them: pass ``BaseModel.eos_ids`` for an ordinary chat answer."""
    stop: tuple[str, ...] = ()
    """Sampling ends as soon as the decoded answer contains one of these."""
    seed: int | None = None
    """With a seed the tokens of sequence i depend on (seed, i, step, logits) and nothing else."""
    n: int = 1
    top_logprobs: int = 0
    """How many of the likeliest alternatives to report with each token."""
    grammar: str | None = None
    """The answer conforms to this (llguidance's Lark; ``grammar_from_json_schema``'s JSON too)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit before temperature and filters)."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. ``logprob`` is the log-softmax in float32 of the *raw* logits, that is at
    temperature 1 and before bias, grammar, top-k and top-p: what the trainer recomputes."""

    index: int
    """Which of the ``n`` sequences."""
    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(id, logprob) of the likeliest tokens, best first; empty unless ``top_logprobs`` asks."""
    adapter_version: int | None
    """Version of the adapter that sampled it; None for the base model. One sequence has one."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of sequence ``index``; every submitted sequence gets exactly one."""

    index: int
    reason: FinishReason
    error: str | None = None
    stop: str | None = None
    """The stop string that was hit, when that is what ended it."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    log_mass: float | None = None
    """With a grammar: the sum over the answer's tokens of the log of the raw probability that the
    mask left. At temperature 1 without filters and bias, the answer was sampled with
    log-probability ``sum(logprob) - log_mass``."""


Event: TypeAlias = Token | Finished


@dataclass(frozen=True, slots=True)
class Scored:
    """A given row of tokens as the policy sees it."""

    logprobs: list[float]
    """Of each token given those before it, at temperature 1; 0 for the first."""
    top: list[list[tuple[int, float]]]
    """(id, log-prob) of the likeliest tokens in each one's place, best first; none for the first,
    and none unless asked for."""
    adapter_version: int | None
    """None: the base model."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    prompt_ids: list[int]
    params: SampleParams
    adapter: str | None
    """Name of a loaded adapter; None for the base model."""
    on_event: Callable[[Event], None]
    """Called on the engine's thread: hand over and return at once."""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class SamplerStats:
    running: int
    """Sequences in the batch, prefilling included."""
    waiting: int
    """Sequences in the queue."""
    prefill_tokens: int
    """Prompt tokens computed."""
    reused_tokens: int
    """Prompt tokens taken from the prefix cache or shared with a sibling instead."""
    generated_tokens: int
    decode_steps: int
    prefill_steps: int
    swaps: int
    """Adapter versions loaded."""
    preemptions: int
    """Sequences sent back to the queue because keys and values outgrew their budget."""
    kv_tokens: int
    """Tokens of key/value storage allocated, prefix cache included."""
    kv_budget: int
