"""SamplingClient: Tinker's client for sampling and log-probs, over a backend."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from agentrl_trainer.client.async_api import awaited, submitted
from agentrl_trainer.client.futures import APIFuture, finished, gather, map_future, wait
from agentrl_trainer.client.parameters import tinker_options
from agentrl_trainer.client.types import (
    Array,
    ModelInput,
    SampleOptions,
    SampleResponse,
    SamplingParams,
)

if TYPE_CHECKING:
    from agentrl_trainer.client.local.sampling import LocalSampling
    from agentrl_trainer.client.tinker.sampling import TinkerSampling

Prompt = ModelInput | Array
"""Tokens: a ModelInput or plain ids."""


class Client:
    """Base of the clients that a service makes. Each is its own future, as in Tinker's SDK."""

    ready: Future[None] = finished(None)
    """Done once the weights are loaded."""

    def result(self, timeout: float | None = None) -> Self:
        """Wait until the weights are loaded. Operations may be called before."""
        wait(self.ready, timeout)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        yield from APIFuture(self.ready).__await__()
        return self


class SamplingClient(Client):
    """Samples with the weights that it was made for, whatever is trained meanwhile."""

    def __init__(self, backend: LocalSampling | TinkerSampling) -> None:
        self._backend = backend
        self.ready = backend.ready

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
        options = SampleOptions(
            num_samples,
            sampling_params or SamplingParams(),
            include_prompt_logprobs,
            topk_sample_logprobs,
            tinker_options("sample", tinker, self._backend),
        )
        return APIFuture(self._backend.sample(tokens_of(prompt), options))

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
        requests = [
            self.sample(
                prompt,
                num_samples,
                params,
                include_prompt_logprobs,
                topk_sample_logprobs=topk_sample_logprobs,
            )
            for prompt, params in zip(prompts, each, strict=True)
        ]
        return APIFuture(gather([request.future() for request in requests]))

    sample_batch_async = awaited(sample_batch)

    def compute_logprobs(self, prompt: Prompt, **tinker: Any) -> APIFuture[list[float | None]]:
        """Compute the log-prob of each token given those before it; None for the first."""
        options = tinker_options("compute_logprobs", tinker, self._backend)
        rows = self._backend.logprobs([tokens_of(prompt)], options)
        return APIFuture(map_future(rows, lambda found: found[0]))

    compute_logprobs_async = awaited(compute_logprobs)

    def compute_logprobs_batch(
        self, prompts: Sequence[Prompt]
    ) -> APIFuture[list[list[float | None]]]:
        """Run ``compute_logprobs`` for many prompts; shared prefixes are computed once."""
        return APIFuture(self._backend.logprobs([tokens_of(prompt) for prompt in prompts], {}))

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer of the model."""
        return self._backend.tokenizer()

    def get_base_model(self) -> str:
        return self._backend.base_model

    get_base_model_async = submitted(get_base_model)


def tokens_of(prompt: Prompt) -> list[int]:
    made = prompt if hasattr(prompt, "to_ints") else ModelInput.from_ints(prompt)
    tokens = made.to_ints()
    if not tokens:
        raise ValueError("the prompt has no tokens")
    return tokens
