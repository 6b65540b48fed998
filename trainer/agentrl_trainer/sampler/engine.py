"""The sampler: one thread that batches whatever requests are there, step by step.

Knows: queues, lanes, callbacks, threads. Does not know: HTTP, text (but for stop strings), training.

Every round of the thread: take what arrived, admit what fits, one chunk of prefill and one decode
step per lane (one lane per adapter version). Sequences join and leave between steps.

Log-probabilities are of the raw logits at temperature 1 in float32, before top-k and top-p.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch

from agentrl_trainer.model import BaseModel
from agentrl_trainer.sampler.adapters import MERGE_BELOW, Prepared, adapter_weights
from agentrl_trainer.sampler.cache import Budget, PrefixStore
from agentrl_trainer.sampler.forward import Forward
from agentrl_trainer.sampler.lane import Lane, Sequence
from agentrl_trainer.sampler.memory import default_budget
from agentrl_trainer.sampler.pick import Uniforms, pick
from agentrl_trainer.sampler.stops import StopWatch
from agentrl_trainer.sampler.types import (
    Event,
    Finished,
    FinishReason,
    RequestError,
    SampleParams,
    SampleRequest,
    SamplerStats,
    Token,
)

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0


class Handle:
    """A submitted request."""

    def __init__(self, engine: SamplerEngine, sequences: list[Sequence]) -> None:
        self._engine = engine
        self._sequences = sequences

    def cancel(self) -> None:
        """End it before the next step; unfinished sequences get ``Finished("cancelled")``."""
        for seq in self._sequences:
            seq.cancelled = True
        self._engine._wake()


@dataclass(slots=True)
class _Counters:
    prefill_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    swaps: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Command:
    """Something for the engine's thread to do between two steps."""

    run: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


class SamplerEngine:
    def __init__(
        self,
        base: BaseModel,
        *,
        max_batch: int = 64,
        kv_tokens: int | None = None,
        prefill_chunk: int | None = None,
        max_prefixes: int = 256,
        seed: int = 0,
        merge_below: int = MERGE_BELOW,
        after_round: Callable[[], None] | None = None,
    ) -> None:
        """The engine owns ``base.model`` from here on: nobody else may run or change it.

        ``kv_tokens``: budget of key/value storage in tokens; default a share of free memory.
        ``prefill_chunk``: most prompt tokens between two decode steps, padding included.
        ``after_round`` is called on the engine's thread when the events of a round are delivered:
        a bridge to another loop can buffer events and hand them over once a round.
        """
        self.base = base
        self._forward = Forward(base)
        self._weights = adapter_weights(base, merge_below)
        self._budget = Budget(kv_tokens or default_budget(self._forward.shape, base.context_length))
        self._prefixes = PrefixStore(self._budget, max_prefixes)
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk or (512 if base.device.type == "cpu" else 4096)
        self._vocab = int(base.model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr]
        self._seed = seed
        self._unseeded = 0
        self._after_round = after_round

        self._current: dict[str | None, Lane] = {None: self._lane(None, None, None)}
        self._lanes: list[Lane] = [self._current[None]]
        self._waiting: deque[Sequence] = deque()
        self._count = _Counters()

        self._changed = threading.Condition()
        # Guarded by _changed; everything else belongs to the engine's thread.
        self._inbox: list[Sequence] = []
        self._commands: deque[_Command] = deque()
        self._woken = False
        self._stopping = False
        self._known: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._died: BaseException | None = None

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the sampler has been started already")
        self._thread = threading.Thread(target=self._run, name="agentrl-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is running and end the thread. Safe to call twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_TIMEOUT_S)

    @property
    def healthy(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._died is None

    @property
    def adapters(self) -> dict[str, int]:
        """Loaded adapters and their current versions."""
        with self._changed:
            return dict(self._known)

    def submit(self, request: SampleRequest) -> Handle:
        """Queue a request; raises RequestError if it can never be served."""
        self._check(request)
        with self._changed:
            if self._stopping or self._died is not None:
                raise RequestError("engine_stopped", "the sampler is not running")
            if request.adapter is not None and request.adapter not in self._known:
                known = ", ".join(sorted(self._known)) or "none"
                raise RequestError(
                    "unknown_adapter", f"no adapter {request.adapter!r} is loaded (loaded: {known})"
                )
            if request.params.seed is None:
                self._unseeded += 1
                key = (1, self._seed, self._unseeded)
            else:
                key = (0, request.params.seed)
            sequences = [self._sequence(request, i, key) for i in range(request.params.n)]
            self._inbox += sequences
            self._changed.notify()
        return Handle(self, sequences)

    def load_adapter(self, name: str, version: int, folder: str | Path) -> Future[None]:
        """Make ``version`` the one new requests for ``name`` get; done when the future is.

        Sequences already admitted finish on the version they started with, beside the new one;
        those still queued get the new one. The old version's prefix cache is dropped at once.
        The folder is read here, on the caller's thread; a bad one raises here.
        """
        prepared = self._weights.prepare(f"{name}@{version}", folder)
        return self._command(lambda: self._swap(name, version, prepared))

    def unload_adapter(self, name: str) -> Future[None]:
        """Forget an adapter: running sequences finish, queued ones fail."""
        return self._command(lambda: self._unload(name))

    def stats(self) -> SamplerStats:
        with self._changed:
            queued = len(self._inbox)
        c = self._count
        return SamplerStats(
            running=sum(lane.resident for lane in list(self._lanes)),
            waiting=queued + len(self._waiting),
            prefill_tokens=c.prefill_tokens,
            reused_tokens=c.reused_tokens,
            generated_tokens=c.generated_tokens,
            decode_steps=c.decode_steps,
            prefill_steps=c.prefill_steps,
            swaps=c.swaps,
            preemptions=c.preemptions,
            kv_tokens=self._budget.used,
            kv_budget=self._budget.limit,
        )

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _command(self, run: Callable[[], None]) -> Future[None]:
        command = _Command(run)
        with self._changed:
            if self._stopping or self._died is not None:
                raise RequestError("engine_stopped", "the sampler is not running")
            self._commands.append(command)
            self._changed.notify()
        return command.done

    def _check(self, request: SampleRequest) -> None:
        check_params(request.params)
        prompt = request.prompt_ids
        if not prompt:
            raise RequestError("invalid_parameter", "the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self._vocab:
            raise RequestError(
                "invalid_parameter", f"prompt token ids must be in 0..{self._vocab - 1}"
            )
        if len(prompt) >= self.base.context_length:
            raise RequestError(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens and the model's context is "
                f"{self.base.context_length}, answer included",
            )
        if (need := self._limit(request)) > self._budget.limit:
            raise RequestError(
                "kv_budget_exceeded",
                f"prompt and answer may take {need} tokens of key/value storage, more than the "
                f"sampler's budget of {self._budget.limit}: lower max_tokens, or raise kv_tokens",
            )

    def _limit(self, request: SampleRequest) -> int:
        return min(len(request.prompt_ids) + request.params.max_tokens, self.base.context_length)

    def _sequence(self, request: SampleRequest, index: int, key: tuple[int, ...]) -> Sequence:
        stop = request.params.stop
        return Sequence(
            request=request,
            index=index,
            tokens=list(request.prompt_ids),
            limit=self._limit(request),
            uniforms=Uniforms(*key, index),
            stops=StopWatch(self.base.tokenizer, stop) if stop else None,
        )

    def _lane(self, name: str | None, version: int | None, weights: Prepared | None) -> Lane:
        return Lane(name, version, weights, self._forward, self._budget, self._prefixes)

    # -- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._collect():
                    self._round()
        except BaseException as error:
            log.exception("the sampler's thread died")
            self._died = error
        finally:
            self._close()

    def _collect(self) -> bool:
        """Take what arrived, sleeping while there is nothing to do; False to end."""
        with self._changed:
            while not (self._stopping or self._inbox or self._commands or self._woken):
                if self._waiting or any(lane.resident for lane in self._lanes):
                    break
                self._changed.wait()
            if self._stopping:
                return False
            self._woken = False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            try:
                command.run()
            except Exception as error:
                command.done.set_exception(error)
            else:
                command.done.set_result(None)
        return True

    def _round(self) -> None:
        self._drop_cancelled()
        self._admit()
        for lane in self._lanes:
            if lane.jobs:
                self._guard(lane, self._prefill)
            if lane.decoding:
                self._guard(lane, self._decode)
        self._retire()
        if self._after_round is not None:
            self._after_round()

    def _guard(self, lane: Lane, step: Callable[[Lane], None]) -> None:
        """A failed forward fails the sequences of its lane, not the engine."""
        try:
            step(lane)
        except Exception as error:
            log.exception("a forward of adapter %s version %s failed", lane.adapter, lane.version)
            hit = [*lane.decoding, *(s for j in lane.jobs for s in j.sequences)]
            lane.clear()
            for seq in hit:
                self._finish(seq, "error", f"{type(error).__name__}: {error}")

    def _drop_cancelled(self) -> None:
        if any(s.cancelled for s in self._waiting):
            for seq in [s for s in self._waiting if s.cancelled]:
                self._waiting.remove(seq)
                self._finish(seq, "cancelled")
        for lane in self._lanes:
            for seq in [s for s in lane.decoding if s.cancelled]:
                lane.leave(seq, keep=True)
                self._finish(seq, "cancelled")
            for job in list(lane.jobs):
                for seq in [s for s in job.sequences if s.cancelled]:
                    job.sequences.remove(seq)
                    self._finish(seq, "cancelled")
                if not job.sequences:
                    lane.drop_job(job)

    def _admit(self) -> None:
        """First come, first served; one that waits for a sibling's prefill lets others pass."""
        running = sum(lane.resident for lane in self._lanes)
        passed: list[Sequence] = []
        while self._waiting and running < self._max_batch:
            seq = self._waiting.popleft()
            lane = seq.lane or self._current.get(seq.request.adapter)
            if lane is None:
                self._finish(seq, "error", f"adapter {seq.request.adapter!r} was unloaded")
                continue
            sibling = lane.same_prompt(seq.tokens)
            if running and not lane.room_for(seq.tokens, joins=sibling is not None):
                self._waiting.appendleft(seq)
                break
            if sibling is not None:
                sibling.sequences.append(seq)
                reused = len(seq.tokens)
            else:
                source = lane.find_source(seq.tokens)
                if lane.worth_waiting(seq.tokens, source.length):
                    passed.append(seq)
                    continue
                if not lane.start_prefill(seq, source, force=not running):
                    self._waiting.appendleft(seq)
                    break
                reused = source.length
            self._count.reused_tokens += reused
            seq.reused = seq.reused or reused
            if seq.lane is None:
                seq.lane = lane
                lane.users += 1
            running += 1
        self._waiting.extendleft(reversed(passed))

    def _prefill(self, lane: Lane) -> None:
        self._weights.activate(lane.weights)
        computed, complete = lane.prefill(self._prefill_chunk)
        self._count.prefill_steps += 1
        self._count.prefill_tokens += computed
        if not complete:
            return
        sequences = [s for job, _ in complete for s in job.sequences]
        logits = torch.stack([row for job, row in complete for _ in job.sequences])
        self._sample(sequences, logits)
        for job, _ in complete:
            refused = lane.finish_prefill(job, force=not self._others(job.sequences))
            self._requeue(refused)

    def _decode(self, lane: Lane) -> None:
        while not lane.make_room(force=not self._others(lane.decoding[:1])):
            # The youngest goes back to the queue; its tokens stay, its keys are computed again.
            seq = lane.decoding[-1]
            lane.leave(seq, keep=False)
            self._requeue([seq])
        self._weights.activate(lane.weights)
        logits = lane.decode()
        self._count.decode_steps += 1
        sequences = list(lane.decoding)
        self._sample(sequences, logits)
        for seq in sequences:
            if seq.done:
                lane.leave(seq, keep=True)

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Give each sequence its next token; those it ends are ``done`` afterwards."""
        picked = pick(logits, [s.request.params for s in sequences], [s.uniforms for s in sequences])
        self._count.generated_tokens += len(sequences)
        for seq, token, logprob, top in zip(
            sequences, picked.ids, picked.logprobs, picked.tops, strict=True
        ):
            lane = seq.lane
            assert lane is not None
            if not math.isfinite(logprob):
                lane.scrub(seq)
                self._finish(seq, "error", f"the model gave token {token} log-probability {logprob}")
                continue
            seq.tokens.append(token)
            self._deliver(seq, Token(seq.index, token, logprob, top, lane.version))
            hit = seq.stops.push(token) if seq.stops is not None else None
            if token in seq.request.params.stop_ids or hit is not None:
                self._finish(seq, "stop", stop=hit)
            elif len(seq.tokens) >= seq.limit:
                self._finish(seq, "length")

    def _others(self, besides: Iterable[Sequence]) -> bool:
        """Whether any other sequence holds keys and values that could be given up."""
        mine = len(list(besides))
        return sum(lane.resident for lane in self._lanes) > mine

    def _requeue(self, sequences: list[Sequence]) -> None:
        self._count.preemptions += len(sequences)
        self._waiting.extendleft(reversed(sequences))

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None, stop: str | None = None
    ) -> None:
        seq.done = True
        if seq.lane is not None:
            seq.lane.users -= 1
        self._deliver(seq, Finished(seq.index, reason, error, stop, seq.reused))

    def _deliver(self, seq: Sequence, event: Event) -> None:
        try:
            seq.request.on_event(event)
        except Exception:
            # Whoever asked is gone: their failure must not hurt their neighbours.
            log.exception("the callback of request %s failed", seq.request.request_id)
            seq.cancelled = True

    def _swap(self, name: str, version: int, prepared: Prepared) -> None:
        self._weights.install(prepared)
        self._supersede(name)
        self._current[name] = self._lane(name, version, prepared)
        self._lanes.append(self._current[name])
        self._count.swaps += 1
        with self._changed:
            self._known[name] = version
        self._retire()

    def _unload(self, name: str) -> None:
        self._supersede(name)
        with self._changed:
            self._known.pop(name, None)
        self._retire()

    def _supersede(self, name: str) -> None:
        old = self._current.pop(name, None)
        if old is not None:
            old.current = False
            self._prefixes.drop_owner(old)

    def _retire(self) -> None:
        """Forget superseded versions nobody uses any more."""
        for lane in [x for x in self._lanes if not x.current and not x.users]:
            lane.clear()
            self._lanes.remove(lane)
            if lane.weights is not None:
                self._weights.drop(lane.weights)

    def _close(self) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._waiting, *self._inbox]
            self._waiting.clear()
            self._inbox.clear()
            commands = list(self._commands)
            self._commands.clear()
        for lane in self._lanes:
            left += [*lane.decoding, *(s for j in lane.jobs for s in j.sequences)]
        why = None if self._died is None else f"the sampler died: {self._died!r}"
        for seq in left:
            if not seq.done:
                self._finish(seq, "error" if why else "cancelled", why)
        for command in commands:
            command.done.set_exception(RequestError("engine_stopped", why or "the sampler stopped"))
        if self._after_round is not None:
            self._after_round()


def check_params(p: SampleParams) -> None:
    """Raise RequestError naming the parameter that is out of range."""
    for wrong, message in (
        (p.max_tokens < 1, f"max_tokens must be at least 1, not {p.max_tokens}"),
        (not 0 <= p.temperature <= 100, f"temperature must be in 0..100, not {p.temperature}"),
        (not 0 < p.top_p <= 1, f"top_p must be above 0 and at most 1, not {p.top_p}"),
        (p.top_k < 0, f"top_k must be at least 0, not {p.top_k}"),
        (p.n < 1, f"n must be at least 1, not {p.n}"),
        (p.top_logprobs < 0, f"top_logprobs must be at least 0, not {p.top_logprobs}"),
        ("" in p.stop, "stop strings must not be empty"),
    ):
        if wrong:
            raise RequestError("invalid_parameter", message)
