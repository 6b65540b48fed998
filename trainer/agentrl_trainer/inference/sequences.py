"""The sequences of one adapter version: prefilling ones, decoding ones, and their keys and values.

Knows: tokens, rows, forwards. Does not know: threads, queues, callbacks.

Each adapter version has a lane of its own, so a step is one forward per lane, no sequence ever
changes version, and a swapped-out version disappears with its lane.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from agentrl_trainer.inference.adapters import Prepared
from agentrl_trainer.inference.forward import BLOCK, Forward
from agentrl_trainer.inference.grammar import GrammarState
from agentrl_trainer.inference.kv_cache import (
    MIN_PREFIX,
    Budget,
    Prefix,
    PrefixStore,
    Rows,
    Stored,
)
from agentrl_trainer.inference.requests import SampleRequest
from agentrl_trainer.inference.sampling import Uniforms
from agentrl_trainer.inference.stops import StopWatch
from agentrl_trainer.models.common_prefix import common_prefix

log = logging.getLogger(__name__)

# What a forward costs before its first token, in tokens: weighs padding against more forwards.
_OVERHEAD_TOKENS = 256
# Tokens every sequence is expected to grow by: admitting to the brim means preempting at once.
_HEADROOM = 64


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
    stops: StopWatch | None
    grammar: GrammarState | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    """Token ids and what is added to their logits, on the model's device."""
    lane: Lane | None = None
    """Set when first admitted, and for good: a sequence has one adapter version."""
    admitted: int = 0
    """Grows with the time when it was *first* admitted: one sent back is no younger for it."""
    reused: int = 0
    cancelled: bool = False
    done: bool = False
    failed: bool = False
    """Its keys and values may be wrong: never to be reused."""


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens being computed once for all ``sequences`` which have exactly these."""

    tokens: list[int]
    sequences: list[Sequence]
    computed: int
    """How many leading tokens have their keys and values in the row."""


@dataclass(slots=True, eq=False)
class Source:
    """Where a prefix of a prompt already is."""

    length: int
    kv: Stored | None = None
    entry: Prefix | None = None


@dataclass(slots=True, eq=False)
class Lane:
    adapter: str | None
    version: int | None
    weights: Prepared | None
    forward: Forward
    budget: Budget
    prefixes: PrefixStore
    current: bool = True
    """False once a newer version took its place: it only finishes what it has."""
    users: int = 0
    """Sequences bound to this lane, those sent back to the queue included."""
    jobs: list[Prefill] = field(default_factory=list)
    """Row i of ``filling`` is of job i."""
    decoding: list[Sequence] = field(default_factory=list)
    """Row i of ``rows`` is of sequence i, and holds all its tokens but the last.

    Every ``BLOCK`` rows are at most as long as the next ones: rows grow together, so that order
    keeps, and attention over a block of short rows need not look as far as the longest.
    """
    filling: Rows = field(init=False)
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.filling = self.forward.new_rows(self.budget)
        self.rows = self.forward.new_rows(self.budget)

    # -- admission ------------------------------------------------------------------------------

    @property
    def resident(self) -> int:
        return len(self.decoding) + sum(len(j.sequences) for j in self.jobs)

    def find_source(self, tokens: list[int]) -> Source:
        """The longest stored prefix of ``tokens``, short of its last (whose logits are needed)."""
        best = Source(0)
        most = len(tokens) - 1

        def better(kv: Stored, size: int, entry: Prefix | None = None) -> None:
            nonlocal best
            if (size := kv.usable(min(size, most))) > best.length:
                best = Source(size, kv, entry)

        for entry in self.prefixes.of(self):
            if (size := _beats(entry.tokens, tokens, best.length)) > best.length:
                better(entry.kv, size, entry)
        for row, seq in enumerate(self.decoding):
            if (size := _beats(seq.tokens, tokens, best.length)) > best.length:
                size = min(size, len(seq.tokens) - 1)
                better(self.rows.peek(row, size), size)
        for row, job in enumerate(self.jobs):
            if (size := _beats(job.tokens, tokens, best.length)) > best.length:
                size = min(size, job.computed)
                if size > best.length:
                    better(self.filling.peek(row, size), size)
        return best if best.length >= MIN_PREFIX else Source(0)

    def same_prompt(self, tokens: list[int]) -> Prefill | None:
        return next((j for j in self.jobs if j.tokens == tokens), None)

    def worth_waiting(self, tokens: list[int], have: int) -> bool:
        """Whether a prefill under way will soon offer a much longer prefix than ``have``."""
        want = have + 4 * MIN_PREFIX
        return self.filling.parts and any(_beats(j.tokens, tokens, want) > want for j in self.jobs)

    def room_for(self, tokens: list[int], *, joins: bool) -> bool:
        """Whether the budget allows one more sequence (its answer may still outgrow it)."""
        lengths = [len(tokens), *(len(s.tokens) for s in self.decoding)]
        time = max([*lengths, *(len(j.tokens) for j in self.jobs)]) + _HEADROOM
        extra = (self.resident + 1) * time - self.rows.rows * self.rows.time
        if not joins:
            widest = max([len(tokens), *(len(j.tokens) for j in self.jobs)])
            extra += max(0, (len(self.jobs) + 1) * widest - self.filling.rows * self.filling.time)
        return extra <= 0 or self.budget.fits(extra)

    def start_prefill(self, seq: Sequence, source: Source, *, force: bool) -> bool:
        longest = max([len(seq.tokens), *(len(j.tokens) for j in self.jobs)])
        if not self.filling.reserve(len(self.jobs) + 1, longest, force=force):
            return False
        row = self.filling.append()
        if source.kv is not None and source.length:
            self.filling.load(row, source.kv, source.length)
            if source.entry is not None:
                self.prefixes.touch(source.entry)
        self.jobs.append(Prefill(list(seq.tokens), [seq], source.length))
        return True

    # -- computing ------------------------------------------------------------------------------

    def prefill(self, most_tokens: int) -> tuple[int, list[tuple[Prefill, torch.Tensor]]]:
        """Compute up to ``most_tokens`` (padding included) of the jobs.

        Returns the tokens computed, and the jobs now complete with their logits ``[vocab]``; they
        still hold their rows: call ``finish_prefill``.
        """
        jobs = self.jobs[:most_tokens]
        left = [len(j.tokens) - j.computed for j in jobs]
        size = _chunk_size(left, most_tokens)
        chunks = [j.tokens[j.computed : j.computed + size] for j in jobs]
        logits = self.forward(self.filling, chunks, [j.computed for j in jobs])
        for job, chunk in zip(jobs, chunks, strict=True):
            job.computed += len(chunk)
        complete = [(j, logits[i]) for i, j in enumerate(jobs) if j.computed == len(j.tokens)]
        return sum(map(len, chunks)), complete

    def finish_prefill(self, job: Prefill, *, force: bool) -> list[Sequence]:
        """Move the living sequences of a complete job among the decoding ones.

        They have their next token already. Returns those the budget has no room for.
        """
        living = [s for s in job.sequences if not s.done]
        row, length = self.jobs.index(job), len(job.tokens)
        refused: list[Sequence] = []
        for seq in living:
            time = max([length + 1, *(len(s.tokens) for s in self.decoding)])
            if not self.rows.reserve(len(self.decoding) + 1, time, force=force):
                refused.append(seq)
                continue
            self._join(seq, self.filling.peek(row, length))
        if (refused or not living) and self.current and not any(s.failed for s in job.sequences):
            self._park(job.tokens, self.filling, row, length)
        self.drop_job(job)
        return refused

    def make_room(self, *, force: bool) -> bool:
        """Room for one more token in every decoding row."""
        return self.rows.reserve(
            len(self.decoding), max(len(s.tokens) for s in self.decoding), force=force
        )

    def decode(self) -> torch.Tensor:
        """Logits ``[decoding, vocab]`` after each sequence's last token; make_room() first."""
        return self.forward(
            self.rows,
            [s.tokens[-1:] for s in self.decoding],
            [len(s.tokens) - 1 for s in self.decoding],
        )

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out of the decoding ones; ``keep`` its prefix for later prompts."""
        row = self.decoding.index(seq)
        length = len(seq.tokens) - 1
        if keep and self.current and not seq.failed:
            self._park(seq.tokens[:length], self.rows, row, length)
        # The shortest of each later block moves one block down, the last row to the end's hole.
        for start in range(row - row % BLOCK + BLOCK, len(self.decoding), BLOCK):
            row = self._move(min(self._block(start), key=self._length), row)
        last = self.decoding.pop()
        self.rows.remove(row, len(last.tokens) - 1)
        if row < len(self.decoding):
            self.decoding[row] = last

    def _join(self, seq: Sequence, kv: Stored) -> None:
        """Give ``seq``, whose keys and values but for its last token are ``kv``, a row."""
        row = self.rows.append()
        self.decoding.append(seq)
        # The longest of each earlier block that is longer moves one block up.
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
        """Returns ``row``, which is free then."""
        self.rows.move(row, to, self._length(row))
        self.decoding[to] = self.decoding[row]
        return row

    def drop_job(self, job: Prefill) -> None:
        row = self.jobs.index(job)
        last = self.jobs.pop()
        self.filling.remove(row, last.computed)
        if last is not job:
            self.jobs[row] = last

    def scrub(self, seq: Sequence) -> None:
        """Zero the row of a sequence whose keys hold NaN, for the sake of the row's next user."""
        if seq in self.decoding:
            self.rows.scrub(self.decoding.index(seq))
        for row, job in enumerate(self.jobs):
            if seq in job.sequences:
                self.filling.scrub(row)

    def clear(self) -> None:
        self.jobs.clear()
        self.decoding.clear()
        self.filling.free()
        self.rows.free()

    def _park(self, tokens: list[int], rows: Rows, row: int, length: int) -> None:
        if not self.prefixes.wants(self, tokens):
            return
        try:
            copied = rows.export(row, length)
        except RuntimeError:  # out of memory: a prefix is only a convenience
            log.warning("no memory to keep a prefix of %d tokens", length)
            return
        self.prefixes.add(self, tokens, copied)


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
