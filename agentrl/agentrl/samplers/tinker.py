"""Tinker, as the gateway's ``Sampler``: tokens in, tokens out.

Knows the client API's sampling clients, one for each adapter's newest version. Does not know who
trains, nor that behind the URL may be a server of ours.

Three properties of the service shape it:

- *An answer comes as a whole.* There is no stream, so all tokens of a request arrive together, and
  one that nobody waits for any more is sampled to its end; nothing of it is recorded.
- *A sampling client keeps its weights.* A request holds the client that it began with, so its
  tokens are of one version, and the next version is a client of its own (``tinker://`` path).
- *Only tokens and lengths are governed.* No grammar, no bias: what asks for one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_proxy.rendering.detokenizer import Detokenizer
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    RefusedError,
    SampleEvent,
    TokenEvent,
)
from agentrl_trainer import client as tinker_api
from agentrl_trainer.client import SampledSequence, SamplingClient, ServiceClient

_NO_GRAMMARS = (
    "Tinker cannot hold an answer to a grammar: leave out response_format, tool_choice 'required' "
    'and strict tools, or train with backend = "local"'
)


@dataclass(frozen=True, slots=True)
class _Load:
    """What answers for an adapter."""

    client: SamplingClient
    version: int | None  # None: the base model


class TinkerSampler:
    """Samples through the service at ``base_url``; None: ``TINKER_BASE_URL``, else Tinker itself.

    Args:
        model: the base model, by the service's name.
        tokenizer: its Hugging Face tokenizer, to find stop strings.
        eos_ids: tokens that end an answer.
        context_length: of the base model.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        tokenizer: Any,
        eos_ids: frozenset[int],
        context_length: int,
    ) -> None:
        self.context_length = context_length
        self._model = model
        self._base_url = base_url
        self._tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._service: ServiceClient | None = None
        self._loads: dict[str, _Load] = {}
        self._missing: dict[str, tuple[int, str]] = {}  # (version, path) of what failed to load
        self._base: _Load | None = None
        self._in_flight = 0
        self._swaps = 0

    # ---- life

    def start(self) -> None:
        """Opens a session.

        Raises:
            ConnectionError: there is no key, or nobody answers.
        """
        import tinker

        try:
            self._service = ServiceClient(backend="tinker", base_url=self._base_url)
            models = self._service.get_server_capabilities().supported_models
        except tinker.TinkerError as error:
            raise ConnectionError(f"backend: Tinker cannot be reached: {error}") from error
        for served in models:
            if served.model_name == self._model and served.max_context_length:
                self.context_length = min(self.context_length, served.max_context_length)

    def stop(self) -> None:
        if self._service is not None:
            self._service.close()

    def _client(self, path: str | None) -> SamplingClient:
        """Of saved weights; None: of the base model."""
        if self._service is None:
            raise RefusedError("stopped", "there is no session with Tinker yet")
        base = self._model if path is None else None
        return self._service.create_sampling_client(path, base).result()

    @property
    def healthy(self) -> bool:
        """Whether this process can go on; of a service that is away each request says so."""
        return True

    @property
    def adapters(self) -> Mapping[str, int]:
        missing = {name: version for name, (version, _) in self._missing.items()}
        loads = self._loads.items()
        return missing | {n: load.version for n, load in loads if load.version is not None}

    def stats(self) -> dict[str, Any]:
        return {"sampler": "tinker", "in_flight": self._in_flight, "swaps": self._swaps}

    # ---- adapters

    def load_now(self, name: str, version: int, path: str) -> None:
        """``load_adapter`` for where no event loop runs yet."""
        self._loads[name] = _Load(self._client(path), version)
        self._missing.pop(name, None)
        self._swaps += 1

    def load_or_try_later(self, name: str, version: int, path: str) -> str | None:
        """As ``load_now``; returns why it failed. Then requests for it try again, and say so, until
        another version is loaded: weights expire, and a service may be away."""
        try:
            self.load_now(name, version, path)
        except Exception as error:
            refusal = _refusal(error)
            if not isinstance(refusal, RefusedError):
                raise
            self._missing[name] = version, path
            return str(refusal)
        return None

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        """``path``: what ``save_weights_for_sampler`` gave, ``tinker://...``."""
        try:
            await asyncio.to_thread(self.load_now, name, version, path)
        except Exception as error:
            raise _refusal(error) from error

    async def _load(self, adapter: str | None) -> _Load:
        if adapter is not None:
            if missing := self._missing.get(adapter):
                version, path = missing
                load = _Load(await asyncio.to_thread(self._client, path), version)
                if self._missing.pop(adapter, None):  # else it was loaded meanwhile
                    self._loads[adapter] = load
            if adapter not in self._loads:
                raise RefusedError("unknown_adapter", f"no adapter {adapter!r} is loaded")
            return self._loads[adapter]
        if self._base is None:
            self._base = _Load(await asyncio.to_thread(self._client, None), None)
        return self._base

    # ---- sampling

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        _require_possible(params)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context is "
                f"{self.context_length}, answer included"
            )
        asked = tinker_api.SamplingParams(
            max_tokens=min(params.max_tokens, room),
            seed=params.seed,
            # Token ids stand in the place of the model's own ends, strings beside them.
            stop=list(params.stop) or self._eos_ids,
            temperature=params.temperature,
            top_k=params.top_k or -1,
            top_p=params.top_p,
        )
        self._in_flight += 1
        try:
            load = await self._load(adapter)
            done = await load.client.sample(
                list(prompt_ids),
                params.n,
                asked,
                topk_sample_logprobs=params.top_logprobs,
            )
        except Exception as error:
            raise _refusal(error) from error
        finally:
            self._in_flight -= 1
        for choice, sequence in enumerate(done.sequences):
            for event in self._events(choice, sequence, params, load.version):
                yield event

    def _events(
        self,
        choice: int,
        sequence: SampledSequence,
        params: DecodingParams,
        version: int | None,
    ) -> list[SampleEvent]:
        """A finished answer, up to the token that completed a stop string."""
        if len(sequence.logprobs) != len(sequence.tokens):
            error = "Tinker gave tokens without their log-probs"
            return [FinishEvent(choice, "error", error)]
        text = Detokenizer(lambda ids: self._tokenizer.decode(list(ids)), params.stop)
        events: list[SampleEvent] = []
        for at, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs, strict=True)):
            top = sequence.topk_logprobs[at] if sequence.topk_logprobs else None
            events.append(TokenEvent(choice, token, logprob, top, version))
            if params.stop:
                text.push(token)
                if text.stopped_by is not None:
                    return [*events, FinishEvent(choice, "stop", stop_string=text.stopped_by)]
        if params.stop:
            text.finish()
        return [*events, FinishEvent(choice, sequence.stop_reason, stop_string=text.stopped_by)]


def _require_possible(params: DecodingParams) -> None:
    if params.grammar is not None:
        raise GrammarError(_NO_GRAMMARS)
    if params.logit_bias:
        raise RefusedError("invalid_parameter", "logit_bias: Tinker has none; leave it out")


def _refusal(error: Exception) -> Exception:
    """As the gateway has it: what the request is to blame for, and what may be over later."""
    import tinker

    if isinstance(error, RefusedError | ContextLengthError):
        return error
    if isinstance(error, ValueError):  # of the client, before anything was sent
        return RefusedError("invalid_parameter", str(error))
    if isinstance(error, tinker.RequestFailedError):
        of_user = error.category == tinker.types.RequestErrorCategory.User
        code = "invalid_parameter" if of_user else "stopped"
        return RefusedError(code, f"Tinker: {error.message}")
    if isinstance(error, tinker.BadRequestError | tinker.UnprocessableEntityError):
        return RefusedError("invalid_parameter", f"Tinker: {error.message}")
    if isinstance(error, tinker.TinkerError | OSError | TimeoutError):
        return RefusedError("stopped", f"Tinker does not answer: {type(error).__name__}: {error}")
    return error
