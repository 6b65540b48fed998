"""Sampling with one set of weights: requests to the embedded engine, its events gathered into
responses. The weights are unloaded when their last client is dropped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from agentrl_trainer.client.futures import chain, gather, map_future
from agentrl_trainer.client.local.base import LocalBase
from agentrl_trainer.client.types import Options, SampledSequence, SampleOptions, SampleResponse
from agentrl_trainer.inference import (
    Event,
    Finished,
    SampleParams,
    SampleRequest,
    Token,
    check_params,
)
from agentrl_trainer.models.loading import BaseModel


class LocalSampling:
    """``name`` is the future name of the weights in the sampler, done when they are loaded; None
    is the base model."""

    is_local = True

    def __init__(self, base: LocalBase, name: Future[Any]) -> None:
        self.base = base
        self.base_model = base.name
        self._name: Future[str | None] = name
        weakref.finalize(self, _unload, base, name)

    @property
    def ready(self) -> Future[None]:
        return map_future(self._name, lambda _: None)

    def sample(self, prompt: list[int], options: SampleOptions) -> Future[SampleResponse]:
        sampler = self.base.sampler
        params = _sample_params(sampler.base, options, len(prompt))
        check_params(params)

        def submit(name: str | None) -> Future[list[SampledSequence]]:
            gathering = _Gathering(params)
            sampler.submit(SampleRequest(prompt, params, name, gathering.on_event))
            return gathering.future

        sampled = chain(self._name, submit)
        if not options.include_prompt_logprobs:
            return map_future(sampled, self._keep(SampleResponse))
        scored = self.logprobs([prompt], {})
        both: Future[list[Any]] = gather([sampled, scored])
        return map_future(both, self._keep(lambda done: SampleResponse(done[0], done[1][0])))

    def logprobs(
        self, prompts: Sequence[list[int]], tinker: Options
    ) -> Future[list[list[float | None]]]:
        sampler = self.base.sampler
        scored = chain(self._name, lambda name: sampler.score(prompts, name))
        return map_future(
            scored, self._keep(lambda rows: [[None, *row.logprobs[1:]] for row in rows])
        )

    def _keep(self, convert: Any) -> Any:
        """Return ``convert``, which keeps this client, and so its weights, until it is called."""
        held = [self]

        def converted(result: Any) -> Any:
            held.clear()
            return convert(result)

        return converted

    def tokenizer(self) -> Any:
        return self.base.sampler.base.tokenizer


class _Gathering:
    """The events of one request, until all its sequences have ended."""

    def __init__(self, params: SampleParams) -> None:
        self.future: Future[list[SampledSequence]] = Future()
        self._tokens: list[list[Token]] = [[] for _ in range(params.n)]
        self._ends: dict[int, Finished] = {}
        self._topk = params.top_logprobs

    def on_event(self, event: Event) -> None:
        """Take an event; runs on the engine's thread."""
        if isinstance(event, Token):
            self._tokens[event.index].append(event)
            return
        self._ends[event.index] = event
        if len(self._ends) < len(self._tokens):
            return
        for end in self._ends.values():
            if end.reason not in ("stop", "length"):
                error = RuntimeError(f"sampling ended early: {end.error or end.reason}")
                self.future.set_exception(error)
                return
        self.future.set_result([self._sequence(index) for index in range(len(self._tokens))])

    def _sequence(self, index: int) -> SampledSequence:
        tokens = self._tokens[index]
        return SampledSequence(
            tokens=[token.token_id for token in tokens],
            logprobs=[token.logprob for token in tokens],
            stop_reason="stop" if self._ends[index].reason == "stop" else "length",
            topk_logprobs=[token.top for token in tokens] if self._topk else None,
        )


def _sample_params(base: BaseModel, options: SampleOptions, prompt: int) -> SampleParams:
    params = options.params
    stop = params.stop
    words = [stop] if isinstance(stop, str) else list(stop or [])
    strings = tuple(word for word in words if isinstance(word, str))
    ids = frozenset(int(word) for word in words if not isinstance(word, str))
    if strings and ids:
        raise ValueError("stop: give strings or token ids, not both")
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
        stop_ids=base.eos_ids if stop is None or strings else ids,
        stop=strings,
        seed=params.seed,
        n=options.num_samples,
        top_logprobs=options.topk_sample_logprobs,
    )


def _unload(base: LocalBase, name: Future[str | None]) -> None:
    """Unload the weights, once they are loaded if the client was dropped before."""

    def unload(done: Future[str | None]) -> None:
        if done.exception() is None and (loaded := done.result()) is not None:
            base.unload(loaded)

    name.add_done_callback(unload)
