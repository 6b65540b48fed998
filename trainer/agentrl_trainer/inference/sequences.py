"""The sequences of one adapter version: prefilling, decoding, their keys and values, stop strings.

Knows tokens and rows, not forwards, threads, queues or callbacks.

Each adapter version has a lane of its own, so a step is one forward per lane, no sequence ever
changes version, and a superseded version disappears with its lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from agentrl_trainer.inference.adapter_swap import PreparedAdapter
from agentrl_trainer.inference.forward import Forward
from agentrl_trainer.inference.grammar import GrammarState
from agentrl_trainer.inference.kv_cache import MIN_PREFIX, KVPool, Prefix, Rows, Stored
from agentrl_trainer.inference.llama_cpu import BLOCK
from agentrl_trainer.inference.requests import FinishReason, SampleRequest
from agentrl_trainer.models.prefix_attention import longer_prefix

_OVERHEAD_TOKENS = 256
"""Cost of a forward before its first token, in tokens: weighs padding against more forwards."""
_HEADROOM = 64
"""Tokens that every sequence is expected to grow by: a full pool would preempt at once."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the ``n`` answers of a request."""

    request: SampleRequest
    index: int
    tokens: list[int]
    """Prompt and answer so far."""
    limit: int
    """Length at which it ends, prompt included."""
    uniforms: Iterator[float]
    stops: StopStrings | None
    grammar: GrammarState | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    """Token ids and the numbers added to their logits, on the model's device."""
    lane: Lane | None = None
    """Set when first admitted, and kept: a sequence has one adapter version."""
    admitted: int = 0
    """Serial number of its *first* admission; preemption does not make it younger."""
    cancelled: bool = False
    ended: FinishReason | None = None
    """After an error its keys and values may be wrong, even NaN, and must not be reused."""

    @property
    def held(self) -> int:
        """Tokens whose keys and values are in its row: all but the last."""
        return len(self.tokens) - 1


class StopStrings:
    """Decodes one answer token by token and looks for stop strings, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        """The last characters, too few to hold a stop string by themselves."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        backend = getattr(tokenizer, "_tokenizer", None)
        self._backend = backend if isinstance(backend, Tokenizer) else None
        self._stream = DecodeStream(skip_special_tokens=False)
        self._seen = 0

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the earliest stop string that the text now contains."""
        if self._backend is not None:
            new = self._stream.step(self._backend, token_id) or ""
        else:  # a tokenizer written in Python cannot stream: decode everything again, O(n) a token
            self._ids.append(token_id)
            answer, new = str(self._tokenizer.decode(self._ids)), ""
            if not answer.endswith("�"):  # of an incomplete character
                new, self._seen = answer[self._seen :], len(answer)
        text = self._tail + new
        hits = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(hits)[1] if hits else None


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens being computed once for all ``sequences`` that have exactly these."""

    tokens: list[int]
    sequences: list[Sequence]
    held: int
    """How many leading tokens have their keys and values in the row."""

    @property
    def failed(self) -> bool:
        return any(seq.ended == "error" for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Lane:
    """The batch of one adapter version."""

    adapter: str | None
    version: int | None
    weights: PreparedAdapter | None
    pool: KVPool
    forward: InitVar[Forward]
    most: int | None = None
    """Sequences to compute at once after a forward that failed; None: as many as fit."""
    current: bool = True
    """False once a newer version took its place: it only finishes what it has."""
    filling: Rows = field(init=False)
    rows: Rows = field(init=False)
    jobs: list[Prefill] = field(init=False)
    """They own the rows of ``filling``."""
    decoding: list[Sequence] = field(init=False)
    """They own the rows of ``rows``.

    Every ``BLOCK`` rows are at most as long as the next ones. Rows grow together, which keeps that
    order, and attention over a block of short rows need not look as far as the longest row.
    """

    def __post_init__(self, forward: Forward) -> None:
        self.filling, self.rows = forward.new_rows(self.pool), forward.new_rows(self.pool)
        self.jobs, self.decoding = self.filling.owners, self.rows.owners

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decoding, *(s for job in self.jobs for s in job.sequences)]

    # -- admission ------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        return len(self.decoding) + sum(len(j.sequences) for j in self.jobs)

    def find_source(self, tokens: list[int]) -> tuple[int, Stored | None]:
        """Find the longest stored prefix of ``tokens``, short of its last (which needs logits)."""
        length, source = 0, None
        for other in (*self.pool.prefixes(self), *self.decoding, *self.jobs):
            size = min(longer_prefix(other.tokens, tokens, length), other.held, len(tokens) - 1)
            if size > length and (self.rows.parts or size == other.held):
                length, source = size, other
        if source is None or length < MIN_PREFIX:
            return 0, None
        if isinstance(source, Prefix):
            self.pool.touch(source)
            return length, source.kv
        rows = self.rows if isinstance(source, Sequence) else self.filling
        return length, rows.peek(rows.owners.index(source), length)

    def worth_waiting(self, tokens: list[int], have: int) -> bool:
        """Whether a running prefill will soon offer a much longer prefix than ``have``."""
        want = have + 4 * MIN_PREFIX
        return self.filling.parts and any(
            longer_prefix(j.tokens, tokens, want) > want for j in self.jobs
        )

    def room_for(self, tokens: list[int], *, joins: bool) -> bool:
        """Whether the pool has room for one more sequence (its answer may still outgrow it)."""
        widest = max([len(tokens), *(len(j.tokens) for j in self.jobs)])
        time = max([widest, *(len(s.tokens) for s in self.decoding)]) + _HEADROOM
        extra = (self.resident + 1) * time - self.rows.rows * self.rows.time
        if not joins:
            extra += max(0, (len(self.jobs) + 1) * widest - self.filling.rows * self.filling.time)
        return extra <= 0 or self.pool.fits(extra)

    def start_prefill(
        self, seq: Sequence, computed: int, source: Stored | None, *, force: bool
    ) -> bool:
        longest = max([len(seq.tokens), *(len(j.tokens) for j in self.jobs)])
        if not self.filling.reserve(len(self.jobs) + 1, longest, force=force):
            return False
        job = Prefill(list(seq.tokens), [seq], computed)
        row = self.filling.append(job)
        if source is not None:
            try:
                self.filling.load(row, source, computed)
            except BaseException:  # out of memory
                self.drop_job(job)
                raise
        return True

    def finish_prefill(self, job: Prefill, *, force: bool) -> list[Sequence]:
        """Move the living sequences of a complete job to the decoding ones.

        They have their next token already. Returns those that the pool has no room for.
        """
        living = [s for s in job.sequences if s.ended is None]
        row, length = self.jobs.index(job), len(job.tokens)
        refused: list[Sequence] = []
        for seq in living:
            time = max([length + 1, *(len(s.tokens) for s in self.decoding)])
            if self.rows.reserve(len(self.decoding) + 1, time, force=force):
                self._join(seq, self.filling.peek(row, length))
            else:
                refused.append(seq)
        if (refused or not living) and self.current and not job.failed:
            self.pool.keep(self, job.tokens, self.filling.peek(row, length))
        self.drop_job(job)
        return refused

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, seq: Sequence, *, keep: bool = True) -> None:
        """Remove a decoding sequence; ``keep`` its prefix for later prompts."""
        row = self.decoding.index(seq)
        if seq.ended == "error":
            self.rows.scrub(row)
        elif keep and self.current:
            self.pool.keep(self, seq.tokens[:-1], self.rows.peek(row, seq.held))
        # The shortest row of each later block moves one block down, the last row into the hole.
        for start in range(row - row % BLOCK + BLOCK, len(self.decoding), BLOCK):
            shortest = min(self._block(start), key=lambda at: self.decoding[at].held)
            self.rows.move(shortest, row)
            row = shortest
        self.rows.remove(row)

    def _join(self, seq: Sequence, kv: Stored) -> None:
        """Give ``seq`` a row; ``kv`` holds all its tokens but the last."""
        row = self.rows.append(seq)
        # The longest row of each earlier block that is longer moves one block up.
        for start in range(row - row % BLOCK - BLOCK, -1, -BLOCK):
            longest = max(self._block(start), key=lambda at: self.decoding[at].held)
            if self.decoding[longest].held <= seq.held:
                break
            self.rows.move(longest, row)
            row = longest
        self.rows.load(row, kv, seq.held)
        self.decoding[row] = seq

    def _block(self, start: int) -> range:
        return range(start, min(start + BLOCK, len(self.decoding)))

    def drop_job(self, job: Prefill) -> None:
        row = self.jobs.index(job)
        if job.failed:
            self.filling.scrub(row)
        self.filling.remove(row)

    def clear(self) -> None:
        self.filling.free()
        self.rows.free()


def chunk_size(left: list[int], most_tokens: int) -> int:
    """Choose tokens per row of the next prefill forward: the most useful work per padded work."""
    cap = max(1, most_tokens // len(left))
    sizes = {min(n, cap) for n in left}
    return max(
        sizes, key=lambda q: sum(min(n, q) for n in left) / (_OVERHEAD_TOKENS + len(left) * q)
    )
