"""What goes into the sampler and what comes out of it. Token ids only: no text, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentrl_tracer.schemas import GREEDY_BELOW

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
    """The engine refuses a request; the gateway maps ``code`` to its HTTP status."""

    def __init__(self, code: RequestErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: RequestErrorCode = code


@dataclass(frozen=True, slots=True)
class SampleParams:
    max_tokens: int
    """Most tokens to sample, stop token included; the context length caps it further."""
    temperature: float = 1.0
    """Below ``GREEDY_BELOW`` it is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    stop_ids: frozenset[int] = frozenset()
    """Sampling ends with the first of these, which is part of the answer. Nothing is added to
    them: pass ``BaseModel.eos_ids`` for an ordinary chat answer."""
    stop: tuple[str, ...] = ()
    """Sampling ends as soon as the decoded answer contains one of these strings."""
    seed: int | None = None
    """With a seed the tokens of sequence i depend on (seed, i, step, logits) and nothing else."""
    n: int = 1
    top_logprobs: int = 0
    """How many of the likeliest alternatives to report with each token."""
    grammar: str | None = None
    """Grammar of the answer: llguidance's Lark, or the JSON of ``grammar_from_json_schema``."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit before temperature and filters)."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


LARGEST_COUNT = 2**31 - 1
"""More would not fit into the tensors of a batch."""


def check_params(p: SampleParams) -> None:
    """Raise RequestError naming the first parameter that is out of range."""
    for wrong, message in (
        (p.max_tokens < 1, f"max_tokens must be at least 1, not {p.max_tokens}"),
        (not 0 <= p.temperature <= 100, f"temperature must be in 0..100, not {p.temperature}"),
        (not 0 < p.top_p <= 1, f"top_p must be above 0 and at most 1, not {p.top_p}"),
        (not 0 <= p.top_k <= LARGEST_COUNT, f"top_k must be in 0..{LARGEST_COUNT}, not {p.top_k}"),
        (p.n < 1, f"n must be at least 1, not {p.n}"),
        (p.top_logprobs < 0, f"top_logprobs must be at least 0, not {p.top_logprobs}"),
        ("" in p.stop, "stop strings must not be empty"),
        (
            not all(math.isfinite(bias) for _, bias in p.logit_bias),
            "logit_bias must hold finite numbers",
        ),
    ):
        if wrong:
            raise RequestError("invalid_parameter", message)


@dataclass(slots=True)  # not frozen, which makes it slower to construct
class Token:
    """One sampled token. ``logprob`` is the log-softmax in float32 of the *raw* logits: at
    temperature 1 and before bias, grammar, top-k and top-p, as the trainer recomputes it."""

    index: int
    """Which of the ``n`` sequences."""
    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(id, logprob) of the likeliest tokens, best first; empty unless ``top_logprobs`` is set."""
    adapter_version: int | None
    """Version of the adapter that sampled it, the same for a whole sequence; None: base model."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of sequence ``index``; every submitted sequence gets exactly one."""

    index: int
    reason: FinishReason
    error: str | None = None
    stop: str | None = None
    """The stop string that ended the answer, if one did."""
    log_mass: float | None = None
    """With a grammar: sum over the answer's tokens of the log of the raw probability that the mask
    left. At temperature 1 without filters and bias, the answer was sampled with log-probability
    ``sum(logprob) - log_mass``."""


Event: TypeAlias = Token | Finished


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of a given row of tokens under one policy."""

    logprobs: list[float]
    """Of each token given the tokens before it, at temperature 1; 0 for the first token."""
    top: list[list[tuple[int, float]]]
    """(id, log-prob) of the likeliest tokens at each position, best first; empty for the first
    token, and everywhere if ``top`` was 0."""
    adapter_version: int | None
    """None: the base model."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    prompt_ids: list[int]
    params: SampleParams
    adapter: str | None
    """Name of a loaded adapter; None for the base model."""
    on_event: Callable[[Event], None]
    """Called on the engine's thread; it must return at once."""


@dataclass(slots=True)
class SamplerStats:
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    reused_tokens: int = 0
    """Prompt tokens taken from the prefix cache or shared with a sibling."""
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    swaps: int = 0
    """Adapter versions loaded."""
    preemptions: int = 0
    """Sequences sent back to the queue because keys and values outgrew their budget."""
    running: int = 0
    """Sequences in the batch, prefilling ones included."""
    waiting: int = 0
    """Sequences in the queue."""
    kv_tokens: int = 0
    """Tokens of key/value storage allocated, prefix cache included."""
    kv_budget: int = 0
