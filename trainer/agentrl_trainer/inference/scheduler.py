"""What to compute next: admission, prefill, decode, preemption, and which adapter version serves.

Knows lanes and sequences, not threads or HTTP. Everything here runs on one thread.

Every round: admit what fits, then run one decode step and one chunk of prefill per lane (one lane
per adapter version). Sequences join and leave between steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import torch

from agentrl_trainer.inference.adapter_swap import AdapterWeights, PreparedAdapter
from agentrl_trainer.inference.forward import Forward, Scorer
from agentrl_trainer.inference.grammar import Grammars
from agentrl_trainer.inference.kv_cache import Part
from agentrl_trainer.inference.prefix_cache import KVPool
from agentrl_trainer.inference.requests import (
    Event,
    Finished,
    FinishReason,
    RequestError,
    SamplerStats,
    Scored,
    Token,
)
from agentrl_trainer.inference.sampling import Picked, Steering, pick
from agentrl_trainer.inference.sequences import Branch, Lane, Prefill, Sequence, chunk_sizes

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Scheduler:
    forward: Forward
    weights: AdapterWeights
    pool: KVPool
    grammars: Grammars
    scorer: Scorer
    max_batch: int
    prefill_chunk: int
    waiting: deque[Sequence] = field(default_factory=deque)
    count: SamplerStats = field(default_factory=SamplerStats)
    current: dict[str | None, Lane] = field(init=False)
    """Adapter name to the lane that new sequences join; None is the base model."""
    lanes: list[Lane] = field(init=False)
    """The current lanes, and superseded ones that still have sequences."""
    _admissions: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        base = Lane(None, None, None, self.pool, self.forward)
        self.current, self.lanes = {None: base}, [base]

    @property
    def running(self) -> int:
        return sum(lane.resident for lane in self.lanes)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.running > 0

    # -- adapter versions: a running sequence keeps the one that it started with -----------------

    def swap(self, name: str, version: int, prepared: PreparedAdapter) -> None:
        """Make a version the current one; the old one finishes what it has."""
        self.weights.install(prepared)
        superseded = self.current.get(name)
        self.current[name] = lane = Lane(name, version, prepared, self.pool, self.forward)
        self.lanes.append(lane)
        self._supersede(superseded)
        self.count.swaps += 1

    def unload(self, name: str) -> None:
        self._supersede(self.current.pop(name, None))

    def _supersede(self, old: Lane | None) -> None:
        if old is not None:
            old.current = False
            self.pool.drop_owner(old)
            self._retire()

    def _retire(self) -> None:
        """Free superseded versions without sequences, preempted ones included."""
        if not self.waiting:
            for lane in self.lanes:
                lane.most = lane.most if lane.resident else None
        for lane in self.lanes:
            lane.forget_branches()
        for lane in [x for x in self.lanes if not x.current]:
            if lane.resident or any(s.lane is lane for s in self.waiting):
                continue
            self.lanes.remove(lane)
            lane.clear()
            self.pool.drop_owner(lane)  # the stems that its last sequences had
            if lane.weights is not None:
                self.weights.drop(lane.weights)

    def rest(self) -> None:
        """Free what later requests might reuse, or can make again."""
        self.pool.drop_all()
        if not self.busy:
            for lane in self.lanes:
                lane.forget_branches()
                lane.clear()
            self.weights.rest(lane.weights for lane in self.lanes if lane.weights is not None)

    def score(self, rows: Sequences[list[int]], adapter: str | None, top: int) -> list[Scored]:
        """Score rows by one adapter version, with ``top`` alternatives to each token."""
        lane = self.current.get(adapter)
        if lane is None:
            raise RequestError("unknown_adapter", f"no adapter {adapter!r} is loaded")
        self.weights.activate_modules(lane.weights)
        return self.scorer(rows, top, lane.version)

    # -- a round --------------------------------------------------------------------------------

    def round(self) -> None:
        self._drop_cancelled()
        self._admit()
        for lane in self.lanes:
            if lane.resident:
                try:
                    self._step(lane)
                except Exception as error:
                    self._fail(lane, error)
        self._retire()

    def _fail(self, lane: Lane, error: Exception) -> None:
        """A forward that failed is tried again with half of its sequences, so that one of them
        which makes it fail ends alone. The others keep their tokens."""
        log.error(
            "adapter %s version %s: a forward failed", lane.adapter, lane.version, exc_info=error
        )
        hit = [s for s in dict.fromkeys(lane.sequences) if s.ended is None]
        lane.clear()
        lane.most = len(hit) // 2 or None
        if len(hit) == 1:
            self._end_by(hit[0], error)
        else:
            self._requeue(sorted(hit, key=lambda s: s.admitted))

    def _drop_cancelled(self) -> None:
        for seq in [s for s in self.waiting if s.cancelled]:
            self.waiting.remove(seq)
            self.finish(seq, "cancelled")
        for branch in [b for lane in self.lanes for b in lane.branches]:
            for seq in [s for s in branch.decoding if s.cancelled]:
                branch.leave(seq)
                self.finish(seq, "cancelled")
            for job in list(branch.jobs):
                for seq in [s for s in job.sequences if s.cancelled]:
                    job.sequences.remove(seq)
                    self.finish(seq, "cancelled")
                if not job.sequences:
                    branch.drop_job(job)

    def _admit(self) -> None:
        """Admit in order of arrival; a sequence that waits for a sibling's prefill is passed."""
        if not self.waiting:
            return
        running = self.running
        passed: list[Sequence] = []
        while self.waiting and running < self.max_batch:
            seq = self.waiting.popleft()
            lane = seq.lane or self.current.get(seq.request.adapter)
            if lane is None:
                self.finish(seq, "error", f"adapter {seq.request.adapter!r} was unloaded")
                continue
            if lane.most is not None and lane.resident >= lane.most:
                passed.append(seq)
                continue
            siblings = ((b, j) for b in lane.branches for j in b.jobs if j.tokens == seq.tokens)
            branch, sibling = next(siblings, (None, None))
            reused, source = len(seq.tokens), None
            try:
                if branch is None:
                    reused, source, shared = lane.find_source(seq.tokens)
                    if lane.worth_waiting(seq.tokens, reused):
                        passed.append(seq)
                        continue
                    branch = lane.branch_of(seq.tokens, source, reused if shared else 0)
                joins = sibling is not None
                room = not running or (branch.room_for(seq.tokens, joins=joins) and branch.stands)
                if sibling is not None and room:
                    sibling.sequences.append(seq)
                elif not room or not branch.start_prefill(seq, reused, source, force=not running):
                    self.waiting.appendleft(seq)
                    break
            except Exception as error:  # out of memory, most likely
                log.exception("a prompt of %d tokens was not admitted", len(seq.tokens))
                self._end_by(seq, error)
                continue
            self.count.reused_tokens += reused
            if seq.lane is None:
                seq.lane = lane
                seq.admitted = next(self._admissions)
            running += 1
        self.waiting.extendleft(reversed(passed))

    def _step(self, lane: Lane) -> None:
        """Compute a token for each decoding sequence, and up to ``prefill_chunk`` tokens of the
        lane's jobs, padding included. It is one forward, so that the weights are read once."""
        decoding = [(b, own) for b in lane.branches if (own := self._room_to_decode(b))]
        parts = [
            Part(branch.rows, [s.tokens[-1:] for s in own], [len(s.tokens) - 1 for s in own])
            for branch, own in decoding
        ]
        filling = [(b, b.jobs[: self.prefill_chunk]) for b in lane.branches if b.jobs]
        sizes = chunk_sizes(
            [job for _, jobs in filling for job in jobs],
            self.prefill_chunk,
            ragged=self.forward.ragged,
        )
        for branch, jobs in filling:
            chunks = [j.tokens[j.held : j.held + sizes[j]] for j in jobs]
            ends = [i for i, j in enumerate(jobs) if j.held + sizes[j] == len(j.tokens)]
            parts.append(Part(branch.filling, chunks, [j.held for j in jobs], ends))
        if not parts:
            return
        self.weights.activate(lane.weights)
        logits = iter(self.forward(parts))
        self.count.decode_steps += bool(decoding)
        self.count.prefill_steps += bool(filling)
        for branch, own in decoding:
            self._sample(own, next(logits))
            for seq in own:
                if seq.ended is not None:
                    branch.leave(seq)
        for branch, jobs in filling:
            for job in jobs:
                job.held += sizes[job]
                self.count.prefill_tokens += sizes[job]
            self._prefilled(branch, jobs, next(logits))

    def _room_to_decode(self, branch: Branch) -> list[Sequence]:
        """Return the sequences that the pool has room for, for one more token each."""
        while branch.decoding:
            longest = max(len(s.tokens) for s in branch.decoding)
            if branch.rows.reserve(len(branch.decoding), longest, force=self.running <= 1):
                break
            # The youngest returns to the queue; its tokens stay, its keys are computed again.
            seq = max(branch.decoding, key=lambda s: s.admitted)
            branch.leave(seq, keep=False)
            self._requeue([seq])
        return list(branch.decoding)

    def _prefilled(self, branch: Branch, jobs: list[Prefill], logits: torch.Tensor) -> None:
        """``logits``: of the complete jobs."""
        complete = [job for job in jobs if job.held == len(job.tokens)]
        if not complete:
            return
        sequences = [s for job in complete for s in job.sequences]
        rows = [row for row, job in enumerate(complete) for _ in job.sequences]
        self._sample(sequences, logits[rows])
        for job in complete:
            # Nothing else may hold keys and values that could be given up: then exceed the pool.
            alone = self.running <= len(job.sequences)
            self._requeue(branch.finish_prefill(job, force=alone))

    def _requeue(self, sequences: list[Sequence]) -> None:
        self.count.preemptions += len(sequences)
        self.waiting.extendleft(reversed(sequences))

    # -- tokens ---------------------------------------------------------------------------------

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Append the next token to each sequence; those that end have ``ended`` set.

        What fails for one row ends its sequence alone, whatever it is.
        """
        # Drawn once: rows that are picked one by one after a failure get the same tokens. A greedy
        # row consumes no number.
        numbers = [0.0 if s.request.params.greedy else next(s.uniforms) for s in sequences]
        picked: Picked | None = None
        with contextlib.suppress(Exception):  # row by row, the one at fault says what it is
            picked = self._pick(sequences, logits, numbers)
        for row, seq in enumerate(sequences):
            alone = slice(row, row + 1)
            try:
                if picked is not None:
                    self._append(seq, picked, row)
                else:
                    self._append(seq, self._pick([seq], logits[alone], numbers[alone]), 0)
            except Exception as error:
                log.exception("a token could not be sampled")
                self._end_by(seq, error)

    def _pick(
        self, sequences: list[Sequence], logits: torch.Tensor, numbers: list[float]
    ) -> Picked:
        params = [s.request.params for s in sequences]
        return pick(logits, params, numbers, self._steering(sequences, logits.device))

    def _append(self, seq: Sequence, picked: Picked, row: int) -> None:
        """Append the row's token to a sequence, and end it where it ends."""
        token, logprob, lane = picked.ids[row], picked.logprobs[row], seq.lane
        assert lane is not None
        if not math.isfinite(logprob):
            why = f"the model gave token {token} log-probability {logprob}"
            self.finish(seq, "error", why)
            return
        if seq.grammar is not None:
            if not seq.grammar.push(token):
                self.finish(seq, "error", f"the grammar failed: {seq.grammar.error}")
                return
            seq.grammar.log_mass += picked.log_masses[row]
        seq.tokens.append(token)
        self.count.generated_tokens += 1
        self._deliver(seq, Token(seq.index, token, logprob, picked.tops[row], lane.version))
        hit = seq.stops.push(token) if seq.stops is not None else None
        complete = seq.grammar is not None and seq.grammar.complete
        if token in seq.request.params.stop_ids or hit is not None or complete:
            self.finish(seq, "stop", stop=hit)
        elif len(seq.tokens) >= seq.limit:
            self.finish(seq, "length")

    def _steering(self, sequences: list[Sequence], device: torch.device) -> Steering | None:
        rows = [i for i, s in enumerate(sequences) if s.grammar or s.bias is not None]
        grammars = [sequences[i].grammar for i in rows]
        allowed = self.grammars.allowed(grammars).to(device) if any(grammars) else None
        return Steering(rows, [sequences[i].bias for i in rows], allowed) if rows else None

    def _end_by(self, seq: Sequence, error: Exception) -> None:
        self.finish(seq, "error", f"{type(error).__name__}: {error}")

    def finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, stop: str | None = None
    ) -> None:
        if seq.ended is not None:
            return
        seq.ended = reason
        mass = None if seq.grammar is None else seq.grammar.log_mass
        self._deliver(seq, Finished(seq.index, reason, error, stop, mass))

    def _deliver(self, seq: Sequence, event: Event) -> None:
        try:
            seq.request.on_event(event)
        except Exception:  # one caller's failure must not fail the others' sequences
            log.exception("a request's callback failed")
            seq.cancelled = True
