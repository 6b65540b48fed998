"""Sampling with one set of weights on Tinker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from agentrl_trainer.client.futures import APIFuture, gather, map_future
from agentrl_trainer.client.sampling import Prompt, SamplingClient, tokens_of
from agentrl_trainer.client.types import SampleResponse, SamplingParams


class TinkerSamplingClient(SamplingClient):
    """``made`` is a sampling client of the SDK, or the SDK's future of one."""

    def __init__(self, sdk: Any, made: Any) -> None:
        self._sdk = sdk
        self._client = made.result() if hasattr(made, "result") else made

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
        """Return the SDK's response, which has the fields of ours and more."""
        done = self._client.sample(
            prompt=self._sdk.ModelInput.from_ints(tokens_of(prompt)),
            num_samples=num_samples,
            sampling_params=self._sdk.SamplingParams(**asdict(sampling_params or SamplingParams())),
            include_prompt_logprobs=include_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            **tinker,
        )
        return map_future(_concurrent(done), lambda response: response)

    def compute_logprobs(self, prompt: Prompt, **tinker: Any) -> APIFuture[list[float | None]]:
        tokens = self._sdk.ModelInput.from_ints(tokens_of(prompt))
        done = self._client.compute_logprobs(tokens, **tinker)
        return map_future(_concurrent(done), lambda logprobs: logprobs)

    def compute_logprobs_batch(
        self, prompts: Sequence[Prompt]
    ) -> APIFuture[list[list[float | None]]]:
        return gather([self.compute_logprobs(prompt) for prompt in prompts])

    def get_tokenizer(self) -> Any:
        return self._client.get_tokenizer()

    def get_base_model(self) -> str:
        return str(self._client.get_base_model())


def _concurrent(made: Any) -> Future[Any]:
    # The SDK's future is a concurrent Future too for now, which warns when used as one.
    return made.future() if hasattr(made, "future") else made
