"""The sequences of one adapter version: prefilling, decoding, their keys and values, stop strings.

Knows tokens, rows and forwards, not threads, queues or callbacks.

Each adapter version has a lane of its own, so a step is one forward per lane, no sequence ever
changes version, and a superseded version disappears with its lane.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from agentrl_trainer.inference.adapter_swap import PreparedAdapter
from agentrl_trainer.inference.batched_forward import BLOCK
from agentrl_trainer.inference.forward import Forward
from agentrl_trainer.inference.grammar import GrammarState
from agentrl_trainer.inference.kv_cache import MIN_PREFIX, KVPool, Prefix, Rows, Stored
from agentrl_trainer.inference.requests import SampleRequest
from agentrl_trainer.inference.sampling import Uniforms
from agentrl_trainer.models.prefix_attention import common_prefix

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
    uniforms: Uniforms
    stops: StopStrings | None
    grammar: GrammarState | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    """Token ids and the numbers added to their logits, on the model's device."""
    lane: Lane | None = None
    """Set when first admitted, and kept: a sequence has one adapter version."""
    admitted: int = 0
    """Serial number of its *first* admission; preemption does not make it younger."""
    reused: int = 0
    cancelled: bool = False
    done: bool = False
    failed: bool = False
    """Its keys and values may be wrong, even NaN, and must not be reused."""


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
    computed: int
    """How many leading tokens have their keys and values in the row."""


@dataclass(slots=True, eq=False)
class Lane:
    """The batch of one adapter version."""

    adapter: str | None
    version: int | None
    weights: PreparedAdapter | None
    forward: Forward
    pool: KVPool
    current: bool = True
    """False once a newer version took its place: it only finishes what it has."""
    users: int = 0
    """Sequences bound to this lane, preempted ones included."""
    jobs: list[Prefill] = field(default_factory=list)
    """Row i of ``filling`` belongs to job i."""
    decoding: list[Sequence] = field(default_factory=list)
    """Row i of ``rows`` belongs to sequence i, and holds all its tokens but the last.

    Every ``BLOCK`` rows are at most as long as the next ones. Rows grow together, which keeps that
    order, and attention over a block of short rows need not look as far as the longest row.
    """
    filling: Rows = field(init=False)
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.filling = self.forward.new_rows(self.pool)
        self.rows = self.forward.new_rows(self.pool)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decoding, *(s for job in self.jobs for s in job.sequences)]

    # -- admission ------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        return len(self.decoding) + sum(len(j.sequences) for j in self.jobs)

    def find_source(self, tokens: list[int]) -> tuple[int, Stored | None]:
        """Find the longest stored prefix of ``tokens``, short of its last (which needs logits)."""
        length, source, used = 0, None, None
        held: list[tuple[list[int], int, Prefix | Rows, int]] = [
            *((e.tokens, len(e.tokens), e, 0) for e in self.pool.prefixes(self)),
            *((s.tokens, len(s.tokens) - 1, self.rows, i) for i, s in enumerate(self.decoding)),
            *((j.tokens, j.computed, self.filling, i) for i, j in enumerate(self.jobs)),
        ]
        for have, computed, place, row in held:
            size = min(_beats(have, tokens, length), computed, len(tokens) - 1)
            if size > length:
                kv = place.kv if isinstance(place, Prefix) else place.peek(row, size)
                if kv.usable(size) > length:
                    length, source, used = kv.usable(size), kv, place
        if length < MIN_PREFIX:
            return 0, None
        if isinstance(used, Prefix):
            self.pool.touch(used)
        return length, source

    def worth_waiting(self, tokens: list[int], have: int) -> bool:
        """Whether a running prefill will soon offer a much longer prefix than ``have``."""
        want = have + 4 * MIN_PREFIX
        return self.filling.parts and any(_beats(j.tokens, tokens, want) > want for j in self.jobs)

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
        row = self.filling.append()
        if source is not None:
            self.filling.load(row, source, computed)
        self.jobs.append(Prefill(list(seq.tokens), [seq], computed))
        return True

    # -- computing ------------------------------------------------------------------------------

    def prefill(self, most_tokens: int) -> tuple[int, list[tuple[Prefill, torch.Tensor]]]:
        """Compute up to ``most_tokens`` (padding included) of the jobs.

        Returns the number of tokens computed, and the complete jobs with their logits ``[vocab]``;
        they keep their rows until ``finish_prefill``.
        """
        jobs = self.jobs[:most_tokens]
        size = _chunk_size([len(j.tokens) - j.computed for j in jobs], most_tokens)
        chunks = [j.tokens[j.computed : j.computed + size] for j in jobs]
        logits = self.forward(self.filling, chunks, [j.computed for j in jobs])
        for job, chunk in zip(jobs, chunks, strict=True):
            job.computed += len(chunk)
        complete = [(j, logits[i]) for i, j in enumerate(jobs) if j.computed == len(j.tokens)]
        return sum(map(len, chunks)), complete

    def finish_prefill(self, job: Prefill, *, force: bool) -> list[Sequence]:
        """Move the living sequences of a complete job to the decoding ones.

        They have their next token already. Returns those that the pool has no room for.
        """
        living = [s for s in job.sequences if not s.done]
        row, length = self.jobs.index(job), len(job.tokens)
        refused: list[Sequence] = []
        for seq in living:
            time = max([length + 1, *(len(s.tokens) for s in self.decoding)])
            if self.rows.reserve(len(self.decoding) + 1, time, force=force):
                self._join(seq, self.filling.peek(row, length))
            else:
                refused.append(seq)
        if (refused or not living) and self.current and not any(s.failed for s in job.sequences):
            self.pool.keep(self, job.tokens, self.filling.peek(row, length))
        self.drop_job(job)
        return refused

    def make_room(self, *, force: bool) -> bool:
        """Reserve room for one more token in every decoding row."""
        longest = max(len(s.tokens) for s in self.decoding)
        return self.rows.reserve(len(self.decoding), longest, force=force)

    def decode(self) -> torch.Tensor:
        """Logits ``[decoding, vocab]`` after each sequence's last token; make_room() first."""
        chunks = [s.tokens[-1:] for s in self.decoding]
        return self.forward(self.rows, chunks, [len(s.tokens) - 1 for s in self.decoding])

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, seq: Sequence, *, keep: bool = True) -> None:
        """Remove a decoding sequence; ``keep`` its prefix for later prompts."""
        row = self.decoding.index(seq)
        length = len(seq.tokens) - 1
        if seq.failed:
            self.rows.scrub(row)
        elif keep and self.current:
            self.pool.keep(self, seq.tokens[:length], self.rows.peek(row, length))
        # The shortest row of each later block moves one block down, the last row into the hole.
        for start in range(row - row % BLOCK + BLOCK, len(self.decoding), BLOCK):
            row = self._move(min(self._block(start), key=self._length), row)
        last = self.decoding.pop()
        self.rows.remove(row, len(last.tokens) - 1)
        if row < len(self.decoding):
            self.decoding[row] = last

    def _join(self, seq: Sequence, kv: Stored) -> None:
        """Give ``seq`` a row; ``kv`` holds all its tokens but the last."""
        row = self.rows.append()
        self.decoding.append(seq)
        # The longest row of each earlier block that is longer moves one block up.
        for start in range(row - row % BLOCK - BLOCK, -1, -BLOCK):
            longest = max(self._block(start), key=self._length)
            if self._length(longest) <= len(kv):
                break
            row = self._move(longest, row)
        self.rows.load(row, kv, len(kv))
        self.decoding[row] = seq

    def _block(self, start: int) -> range:
        return range(start, min(start + BLOCK, len(self.decoding)))

    def _length(self, row: int) -> int:
        return len(self.decoding[row].tokens) - 1

    def _move(self, row: int, to: int) -> int:
        """Move a row; returns ``row``, which is free then."""
        self.rows.move(row, to, self._length(row))
        self.decoding[to] = self.decoding[row]
        return row

    def drop_job(self, job: Prefill) -> None:
        row = self.jobs.index(job)
        if any(seq.failed for seq in job.sequences):
            self.filling.scrub(row)
        last = self.jobs.pop()
        self.filling.remove(row, last.computed)
        if last is not job:
            self.jobs[row] = last

    def clear(self) -> None:
        self.jobs.clear()
        self.decoding.clear()
        self.filling.free()
        self.rows.free()


def _beats(have: list[int], want: list[int], best: int) -> int:
    """Common prefix if longer than ``best``, else 0: one comparison rules most out."""
    if len(have) <= best or len(want) <= best or have[best] != want[best]:
        return 0
    return common_prefix(have, want)


def _chunk_size(left: list[int], most_tokens: int) -> int:
    """Tokens per row for the next prefill forward: the most useful work per padded work."""
    cap = max(1, most_tokens // len(left))
    sizes = {min(n, cap) for n in left}
    return max(
        sizes, key=lambda q: sum(min(n, q) for n in left) / (_OVERHEAD_TOKENS + len(left) * q)
    )
