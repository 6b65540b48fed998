"""The sequences of one adapter version: prefilling, decoding, their keys and values, stop strings.

Knows tokens and rows, not forwards, threads, queues or callbacks.

Each adapter version has a lane of its own, so a step is one forward per lane, no sequence ever
changes version, and a superseded version disappears with its lane. The sequences of a lane whose
prompts begin with the same long stem form a branch: the stem is held, and read in a step, once for
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from agentrl_trainer.inference.adapter_swap import PreparedAdapter
from agentrl_trainer.inference.forward import Forward
from agentrl_trainer.inference.grammar import GrammarState
from agentrl_trainer.inference.kv_cache import Rows
from agentrl_trainer.inference.prefix_cache import KV, MIN_PREFIX, KVPool, Prefix, Stored
from agentrl_trainer.inference.requests import FinishReason, SampleRequest
from agentrl_trainer.models.prefix_attention import common_prefix, longer_prefix

_OVERHEAD_TOKENS = 256
"""Cost of a forward before its first token, in tokens: weighs padding against more forwards."""
_HEADROOM = 64
"""Tokens that every sequence is expected to grow by: a full pool would preempt at once."""
_SHORTEST_STEM = 512
"""What shorter prompts share is copied into the row of each."""


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
            new = self._streamed(self._backend, token_id)
        else:  # a tokenizer written in Python cannot stream: decode everything again, O(n) a token
            self._ids.append(token_id)
            answer, new = str(self._tokenizer.decode(self._ids)), ""
            if not answer.endswith("�"):  # of an incomplete character
                new, self._seen = answer[self._seen :], len(answer)
        text = self._tail + new
        hits = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        self._tail = text[-self._keep :] if self._keep else ""
        return min(hits)[1] if hits else None

    def _streamed(self, backend: Tokenizer, token_id: int) -> str:
        try:
            return self._stream.step(backend, token_id) or ""
        except Exception:  # "Invalid prefix": bytes that are no text have changed the text before
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(backend, token_id) or ""


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens being computed once for all ``sequences`` that have exactly these."""

    tokens: list[int]
    sequences: list[Sequence]
    held: int
    """How many leading tokens have their keys and values."""

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
    forward: Forward
    most: int | None = None
    """Sequences to compute at once after a forward that failed; None: as many as fit."""
    current: bool = True
    """False once a newer version took its place: it only finishes what it has."""
    branches: list[Branch] = field(init=False)
    """The first one has no stem."""

    def __post_init__(self) -> None:
        self.branches = [Branch(self)]

    @property
    def jobs(self) -> list[Prefill]:
        return [job for branch in self.branches for job in branch.jobs]

    @property
    def sequences(self) -> list[Sequence]:
        decoding = (s for branch in self.branches for s in branch.decoding)
        return [*decoding, *(s for job in self.jobs for s in job.sequences)]

    @property
    def resident(self) -> int:
        return sum(branch.resident for branch in self.branches)

    def find_source(self, tokens: list[int]) -> tuple[int, Stored | None, bool]:
        """Find the longest stored prefix of ``tokens``, short of its last (which needs logits).

        Also returns whether another sequence begins with it and goes on otherwise.
        """
        length, found, where = 0, None, None
        kept = ((entry, None) for entry in self.pool.prefixes(self))
        running = ((x, b) for b in self.branches for x in (*b.decoding, *b.jobs))
        for other, branch in (*kept, *running):
            size = min(longer_prefix(other.tokens, tokens, length), other.held, len(tokens) - 1)
            if size > length and (self.branches[0].rows.parts or size == other.held):
                length, found, where = size, other, branch
        if found is None or length < MIN_PREFIX:
            return 0, None, False
        if isinstance(found, Prefix):
            self.pool.touch(found)
            return length, found.kv, length < found.held
        assert where is not None
        rows = where.rows if isinstance(found, Sequence) else where.filling
        return length, rows.peek(rows.owners.index(found), length), True

    def worth_waiting(self, tokens: list[int], have: int) -> bool:
        """Whether a running prefill will soon offer a much longer prefix than ``have``."""
        want = have + 4 * MIN_PREFIX
        return self.branches[0].filling.parts and any(
            longer_prefix(j.tokens, tokens, want) > want for j in self.jobs
        )

    def branch_of(self, tokens: list[int], source: Stored | None = None, shared: int = 0) -> Branch:
        """Choose the branch of the longest stem that ``tokens`` begin with.

        Make a new one if the first ``shared`` tokens, which ``source`` holds and another sequence
        begins with, are much longer.
        """
        self.forget_branches()
        best = max((b for b in self.branches if b.begins(tokens)), key=lambda b: b.first)
        if best.stem is not None and best.stem in self.pool:
            self.pool.touch(best.stem)
        if best.worth_a_stem(shared):
            assert isinstance(source, KV)
            stem = self.pool.keep_whole(self, tokens[:shared], source)
            if stem is not None:
                stem.in_use = lambda: any(b.resident for b in self.branches if b.stem is stem)
                self.branches.append(best := Branch(self, stem, shared))
        return best

    def forget_branches(self) -> None:
        """Drop branches without sequences whose stems gave way."""
        for branch in self.branches[1:]:
            if not branch.resident and branch.stem not in self.pool:
                branch.free()
                self.branches.remove(branch)

    def clear(self) -> None:
        for branch in self.branches:
            branch.free()


@dataclass(slots=True, eq=False)
class Branch:
    """Sequences of a lane that begin with the same ``first`` tokens of ``stem``."""

    lane: Lane
    stem: Prefix | None = None
    first: int = 0
    filling: Rows = field(init=False)
    rows: Rows = field(init=False)
    jobs: list[Prefill] = field(init=False)
    """They own the rows of ``filling``."""
    decoding: list[Sequence] = field(init=False)
    """They own the rows of ``rows``."""

    def __post_init__(self) -> None:
        pool, forward = self.lane.pool, self.lane.forward
        stem = None if self.stem is None else cast(KV, self.stem.kv)
        self.filling, self.rows = (forward.new_rows(pool, stem, self.first) for _ in range(2))
        self.jobs, self.decoding = self.filling.owners, self.rows.owners

    def begins(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` begin with the stem and go on."""
        if self.stem is None:
            return True
        same = len(tokens) > self.first and tokens[0] == self.stem.tokens[0]
        return same and common_prefix(self.stem.tokens, tokens) >= self.first

    def free(self) -> None:
        self.filling.free()
        self.rows.free()

    # -- admission ------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        return len(self.decoding) + sum(len(j.sequences) for j in self.jobs)

    @property
    def stands(self) -> bool:
        """Whether the pool still has its stem; making room for a sequence may evict it."""
        return self.stem is None or self.stem in self.lane.pool

    def worth_a_stem(self, shared: int) -> bool:
        """Whether so many tokens, which sequences share, should be the stem of a new branch."""
        return self.lane.forward.takes_stems and shared >= max(2 * self.first, _SHORTEST_STEM)

    def room_for(self, tokens: list[int], *, joins: bool) -> bool:
        """Whether the pool has room for one more sequence (its answer may still outgrow it)."""
        if joins and self.worth_a_stem(len(tokens)):
            return self.lane.pool.fits(len(tokens) + (self.resident + 1) * _HEADROOM)
        widest = max([len(tokens), *(len(j.tokens) for j in self.jobs)]) - self.first
        time = max([widest, *(len(s.tokens) - self.first for s in self.decoding)]) + _HEADROOM
        extra = (self.resident + 1) * time - self.rows.rows * self.rows.time
        if not joins:
            extra += max(0, (len(self.jobs) + 1) * widest - self.filling.rows * self.filling.time)
        return extra <= 0 or self.lane.pool.fits(extra)

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
        to, refused = self, list[Sequence]()
        if len(living) > 1 and self.lane.current:
            to = self.lane.branch_of(living[0].tokens, self.filling.peek(row, length), length)
        for seq in living:
            time = max([length + 1, *(len(s.tokens) for s in to.decoding)])
            if to.rows.reserve(len(to.decoding) + 1, time, force=force):
                to.rows.load(to.rows.append(seq), self.filling.peek(row, length), seq.held)
            else:
                refused.append(seq)
        if (refused or not living) and self.lane.current and not job.failed:
            self.lane.pool.keep(self.lane, job.tokens, self.filling.peek(row, length))
        self.drop_job(job)
        return refused

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, seq: Sequence, *, keep: bool = True) -> None:
        """Remove a decoding sequence; ``keep`` its prefix for later prompts."""
        row = self.decoding.index(seq)
        if seq.ended == "error":
            self.rows.scrub(row)
        elif keep and self.lane.current:
            self.lane.pool.keep(self.lane, seq.tokens[:-1], self.rows.peek(row, seq.held))
        self.rows.remove(row)

    def drop_job(self, job: Prefill) -> None:
        row = self.jobs.index(job)
        if job.failed:
            self.filling.scrub(row)
        self.filling.remove(row)


def chunk_sizes(jobs: list[Prefill], most_tokens: int, *, ragged: bool) -> dict[Prefill, int]:
    """Choose how many tokens of each job the next forward computes, at least one.

    Older jobs come first if the forward is ``ragged``. Else all get the same number of tokens, the
    one that gives the most useful work per padded work.
    """
    left = {job: len(job.tokens) - job.held for job in jobs}
    if ragged:
        found: dict[Prefill, int] = {}
        spare = max(0, most_tokens - len(jobs))
        for job in sorted(jobs, key=lambda j: j.sequences[0].admitted):
            more = min(left[job] - 1, spare)
            found[job], spare = 1 + more, spare - more
        return found

    def worth(size: int) -> float:
        return sum(min(n, size) for n in left.values()) / (_OVERHEAD_TOKENS + len(jobs) * size)

    cap = max(1, most_tokens // max(len(jobs), 1))
    best = max({min(n, cap) for n in left.values()}, key=worth, default=0)
    return {job: min(n, best) for job, n in left.items()}
