"""One set of weights to sample with: requests to the engine, and its events gathered to answers.

Knows when the weights are there and that they are unloaded when nobody needs them any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from agentrl_trainer.client.futures import follows, map_future
from agentrl_trainer.client.local.base import LocalBase
from agentrl_trainer.client.types import SampledSequence, SampleOptions, SampleResponse
from agentrl_trainer.inference import (
    Event,
    Finished,
    SampleParams,
    SamplerEngine,
    SampleRequest,
    Token,
    check_params,
)
from agentrl_trainer.models.loading import BaseModel


class LocalSampling:
    """``name``: what the sampler knows the weights by, once they are loaded; None is the base."""

    def __init__(self, base: LocalBase, name: Future[Any]) -> None:
        self.base = base
        self.base_model = base.name
        self._name: Future[str | None] = name
        weakref.finalize(self, _unload, base, name)

    @property
    def ready(self) -> Future[None]:
        return map_future(self._name, lambda _: None)

    def sample(self, prompt: list[int], options: SampleOptions) -> Future[SampleResponse]:
        for name in ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(options, name):
                raise ValueError(f"{name} is not known to the local backend: leave it out")
        sampler = self.base.sampler
        ours = _sample_params(sampler.base, options, len(prompt))
        check_params(ours)
        if not options.include_prompt_logprobs:
            return self._submitted(sampler, prompt, ours)
        whole: Future[SampleResponse] = self._future()
        scored = self.logprobs([prompt], options.prompt_logprobs_last_n)

        def with_scores(done: Future[SampleResponse]) -> None:
            try:
                whole.set_result(SampleResponse(done.result().sequences, scored.result()[0]))
            except BaseException as error:
                whole.set_exception(error)

        # First in is first done: the scores are there when the samples are.
        scored.add_done_callback(
            lambda _: self._submitted(sampler, prompt, ours).add_done_callback(with_scores)
        )
        return whole

    def _submitted(
        self, sampler: SamplerEngine, prompt: list[int], params: SampleParams
    ) -> Future[SampleResponse]:
        gathering = _Gathering(params, self, self._future())

        def submit(name: Future[str | None]) -> None:
            try:
                sampler.submit(SampleRequest(prompt, params, name.result(), gathering.on_event))
            except BaseException as error:
                gathering.future.set_exception(error)

        self._name.add_done_callback(submit)
        return gathering.future

    def logprobs(
        self, rows: Sequence[list[int]], last_n: int | None = None
    ) -> Future[list[list[float | None]]]:
        sampler = self.base.sampler
        whole: Future[list[list[float | None]]] = self._future()

        def score(name: Future[str | None]) -> None:
            try:
                found = sampler.logprobs(rows, name.result())
            except BaseException as error:
                whole.set_exception(error)
            else:
                found.add_done_callback(hand_over)

        def hand_over(found: Future[list[list[float]]], keep: LocalSampling = self) -> None:
            try:
                whole.set_result([_last([None, *row[1:]], last_n) for row in found.result()])
            except BaseException as error:
                whole.set_exception(error)

        self._name.add_done_callback(score)
        return whole

    def _future(self) -> Future[Any]:
        """Of something that needs the weights; it cannot be cancelled."""
        future = follows(Future[Any](), self._name)
        future.set_running_or_notify_cancel()
        return future

    def tokenizer(self) -> Any:
        return self.base.sampler.base.tokenizer


class _Gathering:
    """One request's events, until all its sequences have ended."""

    def __init__(
        self, params: SampleParams, client: LocalSampling, future: Future[SampleResponse]
    ) -> None:
        self.future = future
        # Kept until the samples are there: when it goes its weights are unloaded.
        self._client: LocalSampling | None = client
        self._tokens: list[list[Token]] = [[] for _ in range(params.n)]
        self._ends: dict[int, Finished] = {}
        self._topk = params.top_logprobs

    def on_event(self, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, Token):
            self._tokens[event.index].append(event)
            return
        self._ends[event.index] = event
        if len(self._ends) < len(self._tokens):
            return
        self._client = None
        bad = [end for end in self._ends.values() if end.reason not in ("stop", "length")]
        if bad:
            why = bad[0].error or bad[0].reason
            self.future.set_exception(RuntimeError(f"sampling ended early: {why}"))
            return
        self.future.set_result(
            SampleResponse([self._sequence(index) for index in range(len(self._tokens))])
        )

    def _sequence(self, index: int) -> SampledSequence:
        tokens = self._tokens[index]
        reason = self._ends[index].reason
        return SampledSequence(
            tokens=[token.token_id for token in tokens],
            logprobs=[token.logprob for token in tokens],
            stop_reason="stop" if reason == "stop" else "length",
            topk_logprobs=[token.top for token in tokens] if self._topk else None,
        )


def _last(scores: list[float | None], count: int | None) -> list[float | None]:
    """Only the last ``count``, None for those before; None keeps all."""
    start = 0 if count is None else max(len(scores) - count, 0)
    return [None] * start + scores[start:]


def _sample_params(base: BaseModel, options: SampleOptions, prompt: int) -> SampleParams:
    params = options.params
    stop = params.stop
    words = [stop] if isinstance(stop, str) else list(stop or [])
    strings = tuple(word for word in words if isinstance(word, str))
    ids = frozenset(int(word) for word in words if not isinstance(word, str))
    if strings and ids:
        raise ValueError("stop: give strings or token ids, not both")
    own_ends = stop is None or bool(strings)
    room = base.context_length - prompt
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt} tokens and the model's context is {base.context_length}, "
            "answer included: cut it"
        )
    return SampleParams(
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop_ids=base.eos_ids if own_ends else ids,
        stop=strings,
        seed=params.seed,
        n=options.num_samples,
        top_logprobs=options.topk_sample_logprobs,
    )


def _unload(base: LocalBase, name: Future[str | None]) -> None:
    """Also of a client that is gone before its weights were loaded."""

    def unload(done: Future[str | None]) -> None:
        loaded = None if done.exception() is not None else done.result()
        if loaded is not None:
            base.unload(loaded)

    name.add_done_callback(unload)
