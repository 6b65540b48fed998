"""SamplingClient: Tinker's client for sampling and log-probs, here by the embedded engine.

``**tinker`` takes Tinker-only parameters: see ``parameters.TINKER_ONLY``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar

from agentrl_trainer.client.futures import (
    APIFuture,
    awaited,
    chain,
    finished,
    gather,
    map_future,
    submitted,
)
from agentrl_trainer.client.local_base import LocalBase
from agentrl_trainer.client.parameters import check_tinker_only
from agentrl_trainer.client.types import (
    Array,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)
from agentrl_trainer.inference import (
    Event,
    Finished,
    SampleParams,
    SampleRequest,
    Token,
    check_params,
)
from agentrl_trainer.models.loading import BaseModel

Prompt = ModelInput | Array
"""Tokens: a ModelInput or plain ids."""

S = TypeVar("S")
T = TypeVar("T")


class Client:
    """Base of the clients that a service makes. Each is its own future, as in Tinker's SDK."""

    ready: APIFuture[None] = finished(None)
    """Done once the weights are loaded."""

    def result(self, timeout: float | None = None) -> Self:
        """Wait until the weights are loaded. Operations may be called before."""
        self.ready.result(timeout)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self.ready.__await__()
        return self


class SamplingClient(Client):
    """Samples with the weights that it was made for, whatever is trained meanwhile.

    The weights are unloaded when their last client is dropped. A service makes the clients;
    ``name`` is the future name of the weights in the engine, of None for the base model.
    """

    def __init__(self, base: LocalBase, name: Future[Any]) -> None:
        self._base = base
        self._name: Future[str | None] = name
        self.ready = map_future(name, lambda _: None)
        weakref.finalize(self, name.add_done_callback, base.unload)

    def sample(
        self,
        prompt: Prompt,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        *,
        topk_sample_logprobs: int = 0,
        **tinker: Any,
    ) -> APIFuture[SampleResponse]:
        """Sample ``num_samples`` continuations of a prompt, with their log-probs at temperature 1.

        Raises:
            ValueError: the prompt has no tokens, or a parameter is out of range.
        """
        check_tinker_only("sample", tinker)
        tokens, engine = tokens_of(prompt), self._base.sampler
        params = _sample_params(engine.base, sampling_params or SamplingParams(), len(tokens))
        params = replace(params, n=num_samples, top_logprobs=topk_sample_logprobs)
        check_params(params)

        def submit(name: str | None) -> Future[list[SampledSequence]]:
            done, on_event = _gathering(params)
            engine.submit(SampleRequest(tokens, params, name, on_event))
            return done

        sampled = chain(self._name, submit)
        if not include_prompt_logprobs:
            return self._convert(sampled, SampleResponse)
        both: APIFuture[list[Any]] = gather([sampled, self.compute_logprobs(tokens)])
        return self._convert(both, lambda done: SampleResponse(*done))

    sample_async = awaited(sample)

    def sample_batch(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        include_prompt_logprobs: bool = False,
        topk_sample_logprobs: int = 0,
    ) -> APIFuture[list[SampleResponse]]:
        """Sample continuations of many prompts in one batch; responses are in their order.

        ``sampling_params`` holds for all prompts, or has one entry for each.
        """
        shared = sampling_params or SamplingParams()
        each = [shared] * len(prompts) if isinstance(shared, SamplingParams) else list(shared)
        if len(each) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(each)} for {len(prompts)} prompts; give one for each, or "
                "one for all"
            )
        more = {"topk_sample_logprobs": topk_sample_logprobs}
        pairs = zip(prompts, each, strict=True)
        return gather(
            [self.sample(p, num_samples, how, include_prompt_logprobs, **more) for p, how in pairs]
        )

    sample_batch_async = awaited(sample_batch)

    def compute_logprobs(self, prompt: Prompt, **tinker: Any) -> APIFuture[list[float | None]]:
        """Compute the log-prob of each token given those before it; None for the first."""
        check_tinker_only("compute_logprobs", tinker)
        return map_future(self.compute_logprobs_batch([prompt]), lambda rows: rows[0])

    compute_logprobs_async = awaited(compute_logprobs)

    def compute_logprobs_batch(
        self, prompts: Sequence[Prompt]
    ) -> APIFuture[list[list[float | None]]]:
        """Run ``compute_logprobs`` for many prompts; shared prefixes are computed once."""
        tokens, engine = [tokens_of(prompt) for prompt in prompts], self._base.sampler
        scored = chain(self._name, lambda name: engine.score(tokens, name))
        return self._convert(scored, lambda rows: [[None, *row.logprobs[1:]] for row in rows])

    def _convert(self, future: Future[S], convert: Callable[[S], T]) -> APIFuture[T]:
        """Convert a result; until it is there this client is kept, and so its weights."""
        held = [self]

        def converted(result: S) -> T:
            held.clear()
            return convert(result)

        return map_future(future, converted)

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer of the model."""
        return self._base.sampler.base.tokenizer

    def get_base_model(self) -> str:
        return self._base.name

    get_base_model_async = submitted(get_base_model)


def tokens_of(prompt: Prompt) -> list[int]:
    made = prompt if hasattr(prompt, "to_ints") else ModelInput.from_ints(prompt)
    if not (tokens := made.to_ints()):
        raise ValueError("the prompt has no tokens")
    return tokens


def _gathering(
    params: SampleParams,
) -> tuple[Future[list[SampledSequence]], Callable[[Event], None]]:
    """Return the future of a request's sequences, and what takes its events on the engine's
    thread."""
    done: Future[list[SampledSequence]] = Future()
    tokens: list[list[Token]] = [[] for _ in range(params.n)]
    ends: dict[int, Finished] = {}

    def sequence(index: int) -> SampledSequence:
        own, end = tokens[index], ends[index]
        if end.reason not in ("stop", "length"):
            raise RuntimeError(f"sampling ended early: {end.error or end.reason}")
        top = [token.top for token in own] if params.top_logprobs else None
        ids, logprobs = [token.token_id for token in own], [token.logprob for token in own]
        return SampledSequence(ids, logprobs, end.reason, top)

    def on_event(event: Event) -> None:
        if isinstance(event, Token):
            tokens[event.index].append(event)
            return
        ends[event.index] = event
        if len(ends) == params.n:
            try:
                done.set_result([sequence(index) for index in range(params.n)])
            except RuntimeError as error:
                done.set_exception(error)

    return done, on_event


def _sample_params(base: BaseModel, params: SamplingParams, prompt: int) -> SampleParams:
    """Return the engine's parameters for a prompt of so many tokens."""
    stop = params.stop
    words = [stop] if isinstance(stop, str) else list(stop or [])
    strings = tuple(word for word in words if isinstance(word, str))
    ids = frozenset(int(word) for word in words if not isinstance(word, str))
    if strings and ids:
        raise ValueError("stop: give strings or token ids, not both")
    room = max(base.context_length - prompt, 1)  # the engine refuses a prompt that is too long
    return SampleParams(
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop_ids=base.eos_ids if stop is None or strings else ids,
        stop=strings,
        seed=params.seed,
    )
