"""Sampling with one set of weights on Tinker."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from agentrl_trainer.client.futures import finished, gather, map_future
from agentrl_trainer.client.types import Options, SampledSequence, SampleOptions, SampleResponse


class TinkerSampling:
    """``made`` is a sampling client of the SDK, or the SDK's future of one."""

    is_local = False

    def __init__(self, sdk: Any, made: Any) -> None:
        self._sdk = sdk
        self._client = made.result() if hasattr(made, "result") else made
        self.base_model = str(self._client.get_base_model())

    @property
    def ready(self) -> Future[None]:
        return finished(None)

    def sample(self, prompt: list[int], options: SampleOptions) -> Future[SampleResponse]:
        done = self._client.sample(
            prompt=self._sdk.ModelInput.from_ints(prompt),
            num_samples=options.num_samples,
            sampling_params=self._sdk.SamplingParams(**asdict(options.params)),
            include_prompt_logprobs=options.include_prompt_logprobs,
            topk_sample_logprobs=options.topk_sample_logprobs,
            **options.tinker,
        )
        return map_future(_concurrent(done), _response)

    def logprobs(
        self, prompts: Sequence[list[int]], tinker: Options
    ) -> Future[list[list[float | None]]]:
        inputs = [self._sdk.ModelInput.from_ints(prompt) for prompt in prompts]
        requests = [self._client.compute_logprobs(one, **tinker) for one in inputs]
        return gather([_concurrent(request) for request in requests])

    def tokenizer(self) -> Any:
        return self._client.get_tokenizer()


def _response(done: Any) -> SampleResponse:
    return SampleResponse(
        [
            SampledSequence(
                list(one.tokens), list(one.logprobs or []), one.stop_reason, one.topk_logprobs
            )
            for one in done.sequences
        ],
        done.prompt_logprobs,
        done.topk_prompt_logprobs,
        done.target_prompt_logprobs,
        done.prompt_alt_tokens,
    )


def _concurrent(made: Any) -> Future[Any]:
    # The SDK's future is a concurrent Future too for now, which warns when used as one.
    return made.future() if hasattr(made, "future") else made
