"""Tinker as the gateway's ``Sampler``: tokens in, tokens out, through the client API.

- A response arrives whole: there is no stream, and a canceled request is sampled to its end.
- A sampling client keeps its weights: a request keeps the client that it started with, so its
  tokens are of one version. A new version is a new client, made from a ``tinker://`` path.
- Tinker has no grammars and no biases: requests with one are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    RefusalCode,
    RefusedError,
    SampleEvent,
    TokenEvent,
)
from agentrl_trainer.client import SampledSequence, SamplingClient, SamplingParams, ServiceClient


@dataclass(slots=True)
class _Adapter:
    version: int | None = None  # None: the base model
    path: str | None = None
    client: SamplingClient | None = None  # None: not loaded yet


@dataclass
class TinkerSampler:
    """Samples through a service that speaks Tinker's protocol."""

    model: str
    """The base model, by the service's name."""
    base_url: str | None
    """None: ``TINKER_BASE_URL``, else Tinker itself."""
    tokenizer: Any
    """The model's Hugging Face tokenizer, to tell which stop string ended a response."""
    eos_ids: frozenset[int]
    """Tokens that end an answer."""
    context_length: int
    _service: ServiceClient | None = None
    _adapters: dict[str | None, _Adapter] = field(default_factory=lambda: {None: _Adapter()})
    _in_flight: int = 0
    _swaps: int = 0

    healthy = True  # a service that does not answer fails single requests, not this process

    def start(self) -> None:
        """Open a session; the context becomes the service's if that is shorter.

        Raises:
            ConnectionError: there is no key, or the service does not answer.
        """
        import tinker

        try:
            self._service = ServiceClient(backend="tinker", base_url=self.base_url)
            models = self._service.get_server_capabilities().supported_models
        except tinker.TinkerError as error:
            raise ConnectionError(f"backend: Tinker cannot be reached: {error}") from error
        for served in models:
            if served.model_name == self.model and served.max_context_length:
                self.context_length = min(self.context_length, served.max_context_length)

    def stop(self) -> None:
        if self._service is not None:
            self._service.close()

    @property
    def adapters(self) -> Mapping[str, int]:
        known = self._adapters.items()
        return {name: one.version for name, one in known if name and one.version is not None}

    def stats(self) -> dict[str, Any]:
        return {"sampler": "tinker", "in_flight": self._in_flight, "swaps": self._swaps}

    def load_now(self, name: str, version: int, path: str) -> None:
        """Answer with saved weights, which the first request loads: they may have expired.

        A request whose weights cannot be loaded is refused; the next one tries again.
        """
        self._adapters[name] = _Adapter(version, path)

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        """``path`` is the ``tinker://...`` that ``save_weights_for_sampler`` returned."""
        adapter = _Adapter(version, path)
        try:
            await self._client(adapter)
        except Exception as error:
            raise _refusal(error) from error
        self._adapters[name] = adapter
        self._swaps += 1

    async def _client(self, adapter: _Adapter) -> SamplingClient:
        """Return the client of an adapter's weights, which loads them the first time."""
        assert self._service is not None, "sampling comes after start"
        if adapter.client is None:
            base = self.model if adapter.path is None else None
            create = self._service.create_sampling_client
            adapter.client = await asyncio.to_thread(create, adapter.path, base)
        return adapter.client

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        if params.grammar is not None:
            raise GrammarError(
                "Tinker has no grammars: leave out response_format, tool_choice 'required' and "
                'strict tools, or train with backend = "local"'
            )
        if params.logit_bias:
            raise RefusedError("invalid_parameter", "logit_bias: Tinker has none; leave it out")
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context is "
                f"{self.context_length}, answer included"
            )
        sampling = SamplingParams(
            max_tokens=min(params.max_tokens, room),
            seed=params.seed,
            # Token ids replace the model's end tokens, strings are added to them.
            stop=list(params.stop) or sorted(self.eos_ids),
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        if adapter not in self._adapters:
            raise RefusedError("unknown_adapter", f"no adapter {adapter!r} is loaded")
        loaded = self._adapters[adapter]
        self._in_flight += 1
        try:
            client = await self._client(loaded)
            done = await client.sample(
                list(prompt_ids), params.n, sampling, topk_sample_logprobs=params.top_logprobs
            )
        except Exception as error:
            raise _refusal(error) from error
        finally:
            self._in_flight -= 1
        for choice, sequence in enumerate(done.sequences):
            for event in self._events(choice, sequence, params, loaded.version):
                yield event

    def _events(
        self, choice: int, sequence: SampledSequence, params: DecodingParams, version: int | None
    ) -> Iterator[SampleEvent]:
        tokens, logprobs = sequence.tokens, sequence.logprobs
        if len(logprobs) != len(tokens):
            yield FinishEvent(choice, "error", "Tinker returned tokens without log-probs")
            return
        top = sequence.topk_logprobs or [None] * len(tokens)
        for one in zip(tokens, logprobs, top, strict=True):
            yield TokenEvent(choice, *one, version)
        # The service ends a response with the token that completes a stop string.
        text = self.tokenizer.decode(sequence.tokens) if params.stop else ""
        found = [stop for stop in params.stop if stop in text]
        ended_by = min(found, key=lambda stop: text.index(stop) + len(stop), default=None)
        yield FinishEvent(choice, sequence.stop_reason, stop_string=ended_by)


def _refusal(error: Exception) -> Exception:
    """Return the gateway's error: invalid requests apart from failures that may pass."""
    import tinker

    if isinstance(error, ValueError):  # from the client, before it sent the request
        return RefusedError("invalid_parameter", str(error))
    if isinstance(error, tinker.RequestFailedError):
        of_user = error.category == tinker.types.RequestErrorCategory.User
        code: RefusalCode = "invalid_parameter" if of_user else "stopped"
        return RefusedError(code, f"Tinker: {error.message}")
    if isinstance(error, tinker.BadRequestError | tinker.UnprocessableEntityError):
        return RefusedError("invalid_parameter", f"Tinker: {error.message}")
    if isinstance(error, tinker.TinkerError | OSError):
        said = f"Tinker does not answer: {type(error).__name__}: {error}"
        return RefusedError("stopped", said)
    return error
