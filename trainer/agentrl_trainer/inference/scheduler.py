"""What to compute next: admission, prefill, decode, preemption, adapter versions.

Knows: lanes and sequences. Does not know: threads, HTTP. Everything here runs on one thread.

Every round: admit what fits, then one chunk of prefill and one decode step per lane (one lane per
adapter version). Sequences join and leave between steps.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import torch

from agentrl_trainer.inference.adapters import AdapterWeights, Prepared
from agentrl_trainer.inference.forward import Forward
from agentrl_trainer.inference.grammar import Masks
from agentrl_trainer.inference.kv_cache import Budget, PrefixStore
from agentrl_trainer.inference.requests import (
    Event,
    Finished,
    FinishReason,
    RequestError,
    Scored,
    Token,
)
from agentrl_trainer.inference.sampling import Steering, pick
from agentrl_trainer.inference.scorer import Scorer
from agentrl_trainer.inference.sequences import Lane, Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    prefill_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    swaps: int = 0
    preemptions: int = 0


@dataclass(eq=False)
class Scheduler:
    forward: Forward
    weights: AdapterWeights
    budget: Budget
    prefixes: PrefixStore
    max_batch: int
    prefill_chunk: int
    scorer: Scorer
    """Log-probs of rows under the weights that are active."""
    waiting: deque[Sequence] = field(default_factory=deque)
    count: Counters = field(default_factory=Counters)
    current: dict[str | None, Lane] = field(init=False)
    """Adapter name to the lane new sequences join; None is the base model."""
    lanes: list[Lane] = field(init=False)
    """Those, and superseded versions which still have sequences."""
    masks: Masks = field(init=False)
    _admissions: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self.masks = Masks(self.forward.vocab)
        self.current = {None: self._lane(None, None, None)}
        self.lanes = [self.current[None]]

    @property
    def running(self) -> int:
        return sum(lane.resident for lane in self.lanes)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.running > 0

    def unfinished(self) -> list[Sequence]:
        computing = [
            s
            for lane in self.lanes
            for s in (*lane.decoding, *(s for j in lane.jobs for s in j.sequences))
        ]
        return [s for s in (*self.waiting, *computing) if not s.done]

    def round(self) -> None:
        self._drop_cancelled()
        self._admit()
        for lane in self.lanes:
            if lane.jobs:
                self._guard(lane, self._prefill)
            if lane.decoding:
                self._guard(lane, self._decode)
        self._retire()

    def _guard(self, lane: Lane, step: Callable[[Lane], None]) -> None:
        try:
            step(lane)
        except Exception as error:
            self._fail(lane, error)

    def _fail(self, lane: Lane, error: Exception) -> None:
        """A failed forward fails the sequences of its lane, not the engine."""
        log.error(
            "adapter %s version %s: a forward failed", lane.adapter, lane.version, exc_info=error
        )
        hit = [*lane.decoding, *(s for j in lane.jobs for s in j.sequences)]
        lane.clear()
        for seq in hit:
            self.finish(seq, "error", f"{type(error).__name__}: {error}")

    def _drop_cancelled(self) -> None:
        if any(s.cancelled for s in self.waiting):
            for seq in [s for s in self.waiting if s.cancelled]:
                self.waiting.remove(seq)
                self.finish(seq, "cancelled")
        for lane in self.lanes:
            for seq in [s for s in lane.decoding if s.cancelled]:
                lane.leave(seq)
                self.finish(seq, "cancelled")
            for job in list(lane.jobs):
                for seq in [s for s in job.sequences if s.cancelled]:
                    job.sequences.remove(seq)
                    self.finish(seq, "cancelled")
                if not job.sequences:
                    lane.drop_job(job)

    def _admit(self) -> None:
        """First come, first served; one that waits for a sibling's prefill lets others pass."""
        running = self.running
        passed: list[Sequence] = []
        while self.waiting and running < self.max_batch:
            seq = self.waiting.popleft()
            lane = seq.lane or self.current.get(seq.request.adapter)
            if lane is None:
                self.finish(seq, "error", f"adapter {seq.request.adapter!r} was unloaded")
                continue
            sibling = lane.same_prompt(seq.tokens)
            if running and not lane.room_for(seq.tokens, joins=sibling is not None):
                self.waiting.appendleft(seq)
                break
            if sibling is not None:
                sibling.sequences.append(seq)
                reused = len(seq.tokens)
            else:
                source = lane.find_source(seq.tokens)
                if lane.worth_waiting(seq.tokens, source.length):
                    passed.append(seq)
                    continue
                try:
                    started = lane.start_prefill(seq, source, force=not running)
                except Exception as error:  # out of memory, most likely
                    self._fail(lane, error)
                    self.finish(seq, "error", f"{type(error).__name__}: {error}")
                    break
                if not started:
                    self.waiting.appendleft(seq)
                    break
                reused = source.length
            self.count.reused_tokens += reused
            seq.reused = seq.reused or reused
            if seq.lane is None:
                seq.lane = lane
                seq.admitted = next(self._admissions)
                lane.users += 1
            running += 1
        self.waiting.extendleft(reversed(passed))

    def _prefill(self, lane: Lane) -> None:
        self.weights.activate(lane.weights)
        computed, complete = lane.prefill(self.prefill_chunk)
        self.count.prefill_steps += 1
        self.count.prefill_tokens += computed
        if not complete:
            return
        sequences = [s for job, _ in complete for s in job.sequences]
        logits = torch.stack([row for job, row in complete for _ in job.sequences])
        self._sample(sequences, logits)
        for job, _ in complete:
            refused = lane.finish_prefill(job, force=not self._others(job.sequences))
            self._requeue(refused)

    def _decode(self, lane: Lane) -> None:
        while lane.decoding and not lane.make_room(force=not self._others(lane.decoding[:1])):
            # The youngest goes back to the queue; its tokens stay, its keys are computed again.
            seq = max(lane.decoding, key=lambda s: s.admitted)
            lane.leave(seq, keep=False)
            self._requeue([seq])
        if not lane.decoding:
            return
        self.weights.activate(lane.weights)
        logits = lane.decode()
        self.count.decode_steps += 1
        sequences = list(lane.decoding)
        self._sample(sequences, logits)
        for seq in sequences:
            if seq.done:
                lane.leave(seq)

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Give each sequence its next token; those it ends are ``done`` afterwards."""
        params = [s.request.params for s in sequences]
        steering, stuck = self._steering(sequences, logits.device)
        picked = pick(logits, params, [s.uniforms for s in sequences], steering)
        self.count.generated_tokens += len(sequences)
        for row, (seq, token, logprob, top) in enumerate(
            zip(sequences, picked.ids, picked.logprobs, picked.tops, strict=True)
        ):
            lane = seq.lane
            assert lane is not None
            if not math.isfinite(logprob):
                lane.scrub(seq)
                why = f"the model gave token {token} log-probability {logprob}"
                self.finish(seq, "error", why)
                continue
            if seq.grammar is not None:
                if row in stuck or not seq.grammar.push(token):
                    self.finish(seq, "error", f"the grammar failed: {seq.grammar.error}")
                    continue
                seq.grammar.log_mass += picked.log_masses[row]
            seq.tokens.append(token)
            self._deliver(seq, Token(seq.index, token, logprob, top, lane.version))
            hit = seq.stops.push(token) if seq.stops is not None else None
            complete = seq.grammar is not None and seq.grammar.complete
            if token in seq.request.params.stop_ids or hit is not None or complete:
                self.finish(seq, "stop", stop=hit)
            elif len(seq.tokens) >= seq.limit:
                self.finish(seq, "length")

    def _steering(
        self, sequences: list[Sequence], device: torch.device
    ) -> tuple[Steering | None, set[int]]:
        """Biases and masks, None if there are none; and rows whose grammar allows no token."""
        biases = {i: s.bias for i, s in enumerate(sequences) if s.bias is not None}
        walked = [(i, s.grammar) for i, s in enumerate(sequences) if s.grammar is not None]
        if not walked:
            return (Steering(biases, [], None) if biases else None), set()
        allowed = self.masks.allowed([state for _, state in walked])
        rows = [i for i, _ in walked]
        stuck = {rows[i] for i in (~allowed.any(dim=1)).nonzero()[:, 0].tolist()}
        for row in stuck:  # it fails below; until then its row must be one that can be sampled
            allowed[rows.index(row)] = True
        return Steering(biases, rows, allowed.to(device)), stuck

    def _others(self, besides: Iterable[Sequence]) -> bool:
        """Whether any other sequence holds keys and values that could be given up."""
        mine = len(list(besides))
        return self.running > mine

    def _requeue(self, sequences: list[Sequence]) -> None:
        self.count.preemptions += len(sequences)
        self.waiting.extendleft(reversed(sequences))

    def finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, stop: str | None = None
    ) -> None:
        if seq.done:
            return
        seq.done = True
        seq.failed = reason == "error"
        if seq.lane is not None:
            seq.lane.users -= 1
        mass = None if seq.grammar is None else seq.grammar.log_mass
        self._deliver(seq, Finished(seq.index, reason, error, stop, seq.reused, mass))

    def _deliver(self, seq: Sequence, event: Event) -> None:
        try:
            seq.request.on_event(event)
        except Exception:
            # Whoever asked is gone: their failure must not hurt their neighbours.
            log.exception("the callback of request %s failed", seq.request.request_id)
            seq.cancelled = True

    def logprobs(self, rows: Sequences[list[int]], adapter: str | None) -> list[list[float]]:
        """Each token's log-prob given those before it; 0 for the first of a row."""
        lane = self.current.get(adapter)
        if lane is None:
            raise RequestError("unknown_adapter", f"no adapter {adapter!r} is loaded")
        self.weights.activate(lane.weights)
        return self.scorer(rows)

    def score(self, row: list[int], adapter: str | None, top: int) -> Scored:
        """One row's log-probs, and ``top`` alternatives to each token, by one adapter version."""
        [logprobs] = self.logprobs([row], adapter)
        likeliest = self.scorer.likeliest(row, top) if top else [[] for _ in row]
        return Scored(logprobs, likeliest, self.current[adapter].version)

    def swap(self, name: str, version: int, prepared: Prepared) -> None:
        self.weights.install(prepared)
        self._supersede(name)
        self.current[name] = self._lane(name, version, prepared)
        self.lanes.append(self.current[name])
        self.count.swaps += 1
        self._retire()

    def unload(self, name: str) -> None:
        self._supersede(name)
        self._retire()

    def _supersede(self, name: str) -> None:
        old = self.current.pop(name, None)
        if old is not None:
            old.current = False
            self.prefixes.drop_owner(old)

    def _retire(self) -> None:
        """Forget superseded versions nobody uses any more."""
        for lane in [x for x in self.lanes if not x.current and not x.users]:
            lane.clear()
            self.lanes.remove(lane)
            if lane.weights is not None:
                self.weights.drop(lane.weights)

    def _lane(self, name: str | None, version: int | None, weights: Prepared | None) -> Lane:
        return Lane(name, version, weights, self.forward, self.budget, self.prefixes)
