"""The sampler: one thread that batches the requests there are, step by step.

Knows threads and the scheduler, not HTTP, training or text (but for stop strings).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from agentrl_trainer.inference.adapter_swap import (
    MERGE_BELOW,
    MergedWeights,
    PeftWeights,
    RoundedWeights,
    why_not_merged,
)
from agentrl_trainer.inference.forward import Scorer, choose_forward, vocabulary
from agentrl_trainer.inference.grammar import Grammars
from agentrl_trainer.inference.kv_cache import default_budget
from agentrl_trainer.inference.llama_cpu import LlamaCpuForward
from agentrl_trainer.inference.prefix_cache import KVPool
from agentrl_trainer.inference.requests import (
    RequestError,
    SampleRequest,
    SamplerStats,
    Scored,
    check_params,
)
from agentrl_trainer.inference.sampling import uniforms
from agentrl_trainer.inference.scheduler import Scheduler
from agentrl_trainer.inference.sequences import Sequence, StopStrings
from agentrl_trainer.models.devices import (
    keep_freed_tensors,
    on_own_thread,
    return_freed_memory,
)
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.sources import ModelError
from agentrl_trainer.names import SamplerWeights

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0
T = TypeVar("T")


class SamplerEngine:
    """Continuous batching over one model, on a thread of its own.

    Log-probabilities are of the raw logits at temperature 1 in float32, before logit bias, grammar,
    top-k and top-p.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        max_batch: int = 64,
        kv_tokens: int | None = None,
        prefill_chunk: int | None = None,
        merge_below: int = MERGE_BELOW,
        weights: SamplerWeights = "model",
        after_round: Callable[[], object] = lambda: None,
    ) -> None:
        """The engine owns ``base.model`` from here on: no other code may run or change it.

        ``weights``: the model's own, or rounded ones, on a CPU; see ``cpu.linear_products``.

        ``kv_tokens``: budget of key/value storage in tokens; default a share of free memory.
        ``prefill_chunk``: most prompt tokens, and padding, between two decode steps.
        ``after_round`` is called on the engine's thread when the events of a round are delivered,
        so that a bridge to another loop can hand them over once a round.

        Raises:
            ModelError: no strategy samples from this model exactly, or none with rounded weights.
        """
        self.base = base
        keep_freed_tensors(base.device)
        unmerged = why_not_merged(base, merge_below if weights == "model" else math.inf)
        chosen = on_own_thread(choose_forward, base, llama_cpu=unmerged is None)
        self.strategy, forward, refused = chosen
        """Name of the forward strategy: see docs/models.md."""
        self.why_not_lean = unmerged or refused
        """Why the model's own modules decode instead of ``LlamaCpuForward``; None: it does."""
        lean = forward if isinstance(forward, LlamaCpuForward) else None
        self._rounded = weights != "model"
        if weights != "model":
            if lean is None:
                why = f"{base.name!r} cannot have {weights} weights: {self.why_not_lean}"
                raise ModelError(f"sampler.weights: {why}")
            on_own_thread(lean.round_weights, weights)
            self._weights = RoundedWeights(base, lean)
        else:
            if lean is not None:
                lean.free_base()  # the trial's; most runs sample from adapters alone
                return_freed_memory()
            self._weights = PeftWeights(base) if unmerged else MergedWeights(base, lean)
        self._pool = KVPool(kv_tokens or default_budget(base, forward.bytes_per_token))
        self._vocab = vocabulary(base)
        self.grammars = Grammars(base.tokenizer, self._vocab, base.eos_ids)
        """Compile a slow one with ``start`` before ``submit``, on another thread."""
        self._scheduler = Scheduler(
            forward=forward,
            weights=self._weights,
            pool=self._pool,
            grammars=self.grammars,
            scorer=Scorer(base),
            max_batch=max_batch,
            prefill_chunk=prefill_chunk or (4096 if base.device.type == "cuda" else 512),
        )
        self._seed = secrets.randbits(64)
        """Of requests without one: engines draw different numbers for them."""
        self._unseeded = itertools.count()
        self._after_round = after_round
        self._thread = threading.Thread(target=self._run, name="agentrl-sampler", daemon=True)

        self._changed = threading.Condition()
        # Guarded by _changed; everything else belongs to the engine's thread.
        self._inbox: list[Sequence] = []
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._stopping = False

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start sampling.

        Raises:
            RuntimeError: it has been started already.
        """
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is running and end the thread. Safe to call twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_TIMEOUT_S)

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def adapters(self) -> dict[str, int]:
        """Loaded adapters and their current versions."""
        current = self._scheduler.current.copy()  # in one step, while the engine's thread goes on
        return {name: x.version for name, x in current.items() if name and x.version is not None}

    def submit(self, request: SampleRequest) -> Callable[[], None]:
        """Queue a request.

        Returns a function that ends it before the next step, from any thread: unfinished sequences
        get ``Finished("cancelled")``.

        Raises:
            RequestError: it can never be served, or the engine has stopped.
        """
        params, prompt = request.params, request.prompt_ids
        check_params(params)
        self._check_row("the prompt", prompt, answer=True)
        self._check_ids("logit_bias", [i for i, _ in params.logit_bias])
        limit = min(len(prompt) + params.max_tokens, self.base.context_length)
        if limit > self._pool.limit:
            raise RequestError(
                "kv_budget_exceeded",
                f"prompt and answer may take {limit} tokens of key/value storage, more than the "
                f"sampler's budget of {self._pool.limit}: lower max_tokens, or raise kv_tokens",
            )
        bias = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            numbers = torch.tensor(values, dtype=torch.float32, device=self.base.device)
            bias = (torch.tensor(ids, device=self.base.device), numbers)
        key = (1, self._seed, next(self._unseeded)) if params.seed is None else (0, params.seed)
        sequences = [
            Sequence(
                request=request,
                index=index,
                tokens=list(prompt),
                limit=limit,
                uniforms=uniforms(*key, index),
                stops=StopStrings(self.base.tokenizer, params.stop) if params.stop else None,
                grammar=self.grammars.start(params.grammar) if params.grammar is not None else None,
                bias=bias,
            )
            for index in range(params.n)
        ]
        with self._changed:
            self._require_running()
            if request.adapter not in self._scheduler.current:
                known = ", ".join(sorted(self.adapters)) or "none"
                raise RequestError(
                    "unknown_adapter", f"no adapter {request.adapter!r} is loaded (loaded: {known})"
                )
            self._inbox += sequences
            self._changed.notify()

        def cancel() -> None:
            for seq in sequences:
                seq.cancelled = True

        return cancel

    def load_adapter(self, name: str, version: int, folder: str | Path) -> Future[None]:
        """Make ``version`` the one that new requests for ``name`` get, once the future is done.

        Sequences already admitted finish on the version they started with, beside the new one;
        queued ones get the new one. The old version's prefix cache is dropped at once.

        Raises:
            ModelError: the folder does not fit this model.
        """
        prepared = on_own_thread(self._weights.prepare, Path(folder))
        return self._command(lambda: self._scheduler.swap(name, version, prepared))

    def unload_adapter(self, name: str) -> Future[None]:
        """Forget an adapter: running sequences finish, queued ones fail."""
        return self._command(lambda: self._scheduler.unload(name))

    def drop_prefixes(self) -> Future[None]:
        """Free what is kept of finished sequences, which later prompts might have continued.

        If nothing is sampled, free merged weights too, which the next request makes again. Memory
        goes back to the system where the C library can do that (glibc).
        """
        return self._command(self._drop_prefixes)

    def score(
        self, rows: Sequences[list[int]], adapter: str | None, top: int = 0
    ) -> Future[list[Scored]]:
        """Return log-probs of given rows, with ``top`` alternatives to each of their tokens.

        Runs between two steps of sampling; prefixes that the rows share are computed once.

        Raises:
            RequestError: (here or in the future) the adapter is not loaded, or a row is empty or
                longer than the context.
        """
        if self._rounded:
            message = "a sampler with rounded weights (sampler.weights) scores no given tokens"
            raise RequestError("invalid_parameter", message)
        for row in rows:
            self._check_row("a row to score", row)
        return self._command(lambda: self._scheduler.score(rows, adapter, top))

    def stats(self) -> SamplerStats:
        return replace(
            self._scheduler.count,
            running=self._scheduler.running,
            waiting=len(self._inbox) + len(self._scheduler.waiting),
            kv_tokens=self._pool.used,
            kv_budget=self._pool.limit,
        )

    def _command(self, run: Callable[[], T]) -> Future[T]:
        """Have the engine's thread call ``run`` between two steps."""
        done: Future[T] = Future()
        with self._changed:
            self._require_running()
            self._commands.append((run, done))
            self._changed.notify()
        return done

    def _require_running(self) -> None:
        if self._stopping:
            raise RequestError("engine_stopped", "the sampler is not running")

    def _check_row(self, what: str, row: list[int], *, answer: bool = False) -> None:
        if not row:
            raise RequestError("invalid_parameter", f"{what} has no tokens")
        self._check_ids(what, row)
        if len(row) + answer > (context := self.base.context_length):
            raise RequestError(
                "context_length_exceeded",
                f"{what} has {len(row)} tokens and the model's context is {context}"
                + (", answer included" if answer else ""),
            )

    def _check_ids(self, what: str, ids: list[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._vocab):
            message = f"{what}: token ids must be in 0..{self._vocab - 1}"
            raise RequestError("invalid_parameter", message)

    # -- the engine's thread --------------------------------------------------------------------

    def _drop_prefixes(self) -> None:
        self._scheduler.rest()
        return_freed_memory()

    def _run(self) -> None:
        why = None
        try:
            with torch.inference_mode():
                while self._collect():
                    self._scheduler.round()
                    self._after_round()
        except BaseException as error:
            log.exception("the sampler's thread died")
            why = f"the sampler died: {error!r}"
        self._close(why)

    def _collect(self) -> bool:
        """Take what arrived, sleeping while there is nothing to do; False to end."""
        with self._changed:
            while not (self._stopping or self._inbox or self._commands or self._scheduler.busy):
                self._changed.wait()
            if self._stopping:
                return False
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            # A finalizer on this very thread may append: to the old list or the new one.
            commands, self._commands = self._commands, []
        for run, done in commands:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(run())
                except Exception as error:
                    done.set_exception(error)
        return True

    def _close(self, why: str | None) -> None:
        """End what is left, because the thread died (``why``) or was stopped."""
        with self._changed:
            self._stopping = True
            running = (s for lane in self._scheduler.lanes for s in lane.sequences)
            left = [*running, *self._scheduler.waiting, *self._inbox]
            self._inbox.clear()
            commands, self._commands = self._commands, []
        for seq in left:
            self._scheduler.finish(seq, "error" if why else "cancelled", why)
        for _, done in commands:
            if done.set_running_or_notify_cancel():  # else its caller has canceled it
                done.set_exception(RequestError("engine_stopped", why or "the sampler stopped"))
        with contextlib.suppress(Exception):  # it may be what ended the thread
            self._after_round()
