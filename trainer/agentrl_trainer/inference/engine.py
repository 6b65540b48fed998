"""The sampler: one thread that batches whatever requests are there, step by step.

Knows: threads, the scheduler. Does not know: HTTP, training, text (but for stop strings).

Log-probabilities are of the raw logits at temperature 1 in float32, before logit bias, grammar,
top-k and top-p.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from agentrl_trainer.inference.adapters import (
    MERGE_BELOW,
    AdapterWeights,
    MergedWeights,
    PeftWeights,
    why_not_merged,
)
from agentrl_trainer.inference.forward import Forward
from agentrl_trainer.inference.grammar import Grammars
from agentrl_trainer.inference.kv_budget import default_budget
from agentrl_trainer.inference.kv_cache import Budget, PrefixStore
from agentrl_trainer.inference.requests import (
    RequestError,
    SampleParams,
    SampleRequest,
    SamplerStats,
    Scored,
)
from agentrl_trainer.inference.sampling import Uniforms
from agentrl_trainer.inference.scheduler import Scheduler
from agentrl_trainer.inference.scorer import Scorer
from agentrl_trainer.inference.sequences import Sequence
from agentrl_trainer.inference.stops import StopWatch
from agentrl_trainer.models.loading import BaseModel

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0
T = TypeVar("T")


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
class _Command:
    """Something for the engine's thread to do between two steps."""

    run: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


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
        beside = why_not_merged(base, merge_below)
        merge = beside is None
        self._forward = Forward(base, lean=merge)
        self.why_not_lean = beside or self._forward.why_not_lean
        """Why the model's own modules decode, and not the few operations that know its family."""
        self._weights: AdapterWeights = (
            MergedWeights(base, self._forward.lean) if merge else PeftWeights(base)
        )
        self._budget = Budget(kv_tokens or default_budget(self._forward.shape, base.context_length))
        self._scheduler = Scheduler(
            forward=self._forward,
            weights=self._weights,
            budget=self._budget,
            prefixes=PrefixStore(self._budget, max_prefixes),
            max_batch=max_batch,
            prefill_chunk=prefill_chunk or (512 if base.device.type == "cpu" else 4096),
            scorer=Scorer(base),
        )
        self._grammars = Grammars(base.tokenizer, self._forward.vocab, base.eos_ids)
        self._seed = seed
        self._unseeded = 0
        self._after_round = after_round

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
    def how(self) -> str:
        """Which way of computing rows the model allows: see docs/models.md."""
        return self._forward.how

    @property
    def adapters(self) -> dict[str, int]:
        """Loaded adapters and their current versions."""
        with self._changed:
            return dict(self._known)

    def knows_grammar(self, grammar: str) -> bool:
        """Whether a request with it can be submitted without compiling anything."""
        return self._grammars.knows(grammar)

    def compile_grammar(self, grammar: str) -> None:
        """Make ``submit`` quick: it compiles what is not compiled yet. May take a second."""
        self._grammars.start(grammar)

    def submit(self, request: SampleRequest) -> Handle:
        """Queue a request; raises RequestError if it can never be served."""
        self._check(request)
        if request.params.grammar is not None:  # outside the lock, which stops the engine
            self.compile_grammar(request.params.grammar)
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
        prepared = self._weights.prepare(folder)

        def swap() -> None:
            self._scheduler.swap(name, version, prepared)
            with self._changed:
                self._known[name] = version

        return self._command(swap)

    def unload_adapter(self, name: str) -> Future[None]:
        """Forget an adapter: running sequences finish, queued ones fail."""

        def unload() -> None:
            with self._changed:
                self._known.pop(name, None)
            self._scheduler.unload(name)

        return self._command(unload)

    def logprobs(
        self, rows: Sequences[list[int]], adapter: str | None
    ) -> Future[list[list[float]]]:
        """The log-prob of each token of each row but its first, which is 0, given those before it.

        Between two steps of sampling; prefixes that the rows share are computed once. Raises
        RequestError, or the future does, for an adapter that is not loaded and for rows that are
        empty or longer than the context.
        """
        self._check_rows(rows)
        return self._command(lambda: self._scheduler.logprobs(rows, adapter))

    def score(self, row: list[int], adapter: str | None, top: int = 0) -> Future[Scored]:
        """``logprobs`` of one row, with ``top`` alternatives to each of its tokens."""
        self._check_rows([row])
        return self._command(lambda: self._scheduler.score(row, adapter, top))

    def _check_rows(self, rows: Sequences[list[int]]) -> None:
        for row in rows:
            if not row or min(row) < 0 or max(row) >= self._forward.vocab:
                raise RequestError(
                    "invalid_parameter",
                    f"a row needs tokens, with ids in 0..{self._forward.vocab - 1}",
                )
            if len(row) > self.base.context_length:
                raise RequestError(
                    "context_length_exceeded",
                    f"a row has {len(row)} tokens and the model's context is "
                    f"{self.base.context_length}",
                )

    def stats(self) -> SamplerStats:
        with self._changed:
            queued = len(self._inbox)
        c = self._scheduler.count
        return SamplerStats(
            running=self._scheduler.running,
            waiting=queued + len(self._scheduler.waiting),
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

    def _command(self, run: Callable[[], T]) -> Future[T]:
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
        if min(prompt) < 0 or max(prompt) >= self._forward.vocab:
            raise RequestError(
                "invalid_parameter", f"prompt token ids must be in 0..{self._forward.vocab - 1}"
            )
        biased = [i for i, _ in request.params.logit_bias]
        if biased and (min(biased) < 0 or max(biased) >= self._forward.vocab):
            raise RequestError(
                "invalid_parameter", f"logit_bias token ids must be in 0..{self._forward.vocab - 1}"
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
        params = request.params
        stop = params.stop
        bias = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = (
                torch.tensor(ids, device=self.base.device),
                torch.tensor(values, dtype=torch.float32, device=self.base.device),
            )
        return Sequence(
            request=request,
            index=index,
            tokens=list(request.prompt_ids),
            limit=self._limit(request),
            uniforms=Uniforms(*key, index),
            stops=StopWatch(self.base.tokenizer, stop) if stop else None,
            grammar=self._grammars.start(params.grammar) if params.grammar is not None else None,
            bias=bias,
        )

    # -- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._collect():
                    self._scheduler.round()
                    if self._after_round is not None:
                        self._after_round()
        except BaseException as error:
            log.exception("the sampler's thread died")
            self._died = error
        finally:
            self._close()

    def _collect(self) -> bool:
        """Take what arrived, sleeping while there is nothing to do; False to end."""
        with self._changed:
            while not (self._stopping or self._inbox or self._commands or self._woken):
                if self._scheduler.busy:
                    break
                self._changed.wait()
            if self._stopping:
                return False
            self._woken = False
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            commands = self._taken()
        for command in commands:
            if not command.done.set_running_or_notify_cancel():
                continue
            try:
                result = command.run()
            except Exception as error:
                command.done.set_exception(error)
            else:
                command.done.set_result(result)
        return True

    def _taken(self) -> list[_Command]:
        """The commands so far. One by one: a finalizer on this very thread may add to them."""
        taken: list[_Command] = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    def _close(self) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._scheduler.unfinished(), *self._inbox]
            self._inbox.clear()
            commands = self._taken()
        why = None if self._died is None else f"the sampler died: {self._died!r}"
        for seq in left:
            self._scheduler.finish(seq, "error" if why else "cancelled", why)
        for command in commands:
            command.done.set_exception(RequestError("engine_stopped", why or "the sampler stopped"))
        if self._after_round is not None:
            with contextlib.suppress(Exception):  # it may be what killed the thread
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
