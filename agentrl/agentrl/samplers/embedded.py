"""The embedded torch engine as the gateway's ``Sampler``: bridges its thread and the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    FinishEvent,
    GrammarError,
    RefusedError,
    SampleEvent,
    TokenEvent,
)
from agentrl_trainer.inference import (
    Event,
    Finished,
    RequestError,
    SampleParams,
    SamplerEngine,
    SampleRequest,
)
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.sources import ModelError
from agentrl_trainer.names import SamplerWeights

log = logging.getLogger("agentrl")


class EmbeddedSampler:
    """Samples in this process. Every ``sample`` must come from the same event loop."""

    def __init__(
        self, base: BaseModel, weights: SamplerWeights = "model", kv_tokens: int | None = None
    ) -> None:
        self.context_length = base.context_length
        self._eos_ids = base.eos_ids
        # Events of one engine round go to the event loop together: one wake-up, not one a token.
        self._round: list[tuple[asyncio.Queue[Event], Event]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = SamplerEngine(
            base, weights=weights, kv_tokens=kv_tokens, after_round=self._hand_over
        )
        self.stop = self.engine.stop

    def start(self) -> None:
        if why := self.engine.why_not_lean:
            log.warning("sampled by the model's own modules, not by the lean decoder: %s", why)
        self.engine.start()

    @property
    def adapters(self) -> Mapping[str, int]:
        return self.engine.adapters

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    def stats(self) -> dict[str, Any]:
        return {**asdict(self.engine.stats()), "why_not_lean": self.engine.why_not_lean}

    def load_now(self, name: str, version: int, path: str) -> None:
        """Run ``load_adapter`` in this thread."""
        self.engine.load_adapter(name, version, path).result()

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        try:
            await asyncio.to_thread(self.load_now, name, version, path)
        except ModelError as error:
            raise RefusedError("invalid_parameter", str(error)) from error

    async def drop_prefixes(self) -> None:
        await asyncio.wrap_future(self.engine.drop_prefixes())

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        self._loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        request = SampleRequest(
            prompt_ids=list(prompt_ids),
            params=SampleParams(
                max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p,
                top_k=params.top_k, stop_ids=self._eos_ids, stop=params.stop, seed=params.seed,
                n=params.n, top_logprobs=params.top_logprobs, grammar=params.grammar,
                logit_bias=params.logit_bias,
            ),
            adapter=adapter,
            on_event=lambda event: self._round.append((events, event)),
        )  # fmt: skip
        try:
            if params.grammar is not None and not self.engine.grammars.knows(params.grammar):
                await asyncio.to_thread(self.engine.grammars.start, params.grammar)
            cancel = self.engine.submit(request)
        except RequestError as error:
            raise _refusal(error) from error
        running = params.n
        try:
            while running:
                e = await events.get()
                if isinstance(e, Finished):
                    running -= 1
                    yield FinishEvent(e.index, e.reason, e.error, e.stop, e.log_mass)
                else:
                    yield TokenEvent(e.index, e.token_id, e.logprob, e.top, e.adapter_version)
        finally:
            if running:
                cancel()

    async def score(
        self, prompt_ids: Sequence[int], adapter: str | None, top: int
    ) -> list[TokenEvent]:
        ids = list(prompt_ids)
        try:
            # Shielded: the engine's thread must not set the result of a canceled future.
            scoring = self.engine.score([ids], adapter, top)
            [scored] = await asyncio.shield(asyncio.wrap_future(scoring))
        except RequestError as error:
            raise _refusal(error) from error
        events: list[TokenEvent] = []
        for token_id, logprob, likeliest in zip(
            ids[1:], scored.logprobs[1:], scored.top[1:], strict=True
        ):
            # One number a token: clients compare them to see whether it is the likeliest.
            named = [(i, logprob if i == token_id else value) for i, value in likeliest]
            events.append(TokenEvent(0, token_id, logprob, named, scored.adapter_version))
        return events

    def _hand_over(self) -> None:
        """Pass a complete round's events to the event loop, from the engine's thread."""
        if not self._round:
            return
        ready, self._round = self._round, []

        def deliver() -> None:
            for queue, event in ready:
                queue.put_nowait(event)

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended; the engine goes on
                self._loop.call_soon_threadsafe(deliver)


def _refusal(error: RequestError) -> Exception:
    if error.code == "invalid_grammar":
        return GrammarError(str(error))
    if error.code in ("context_length_exceeded", "kv_budget_exceeded"):
        return ContextLengthError(str(error))
    if error.code in ("invalid_parameter", "unknown_adapter"):
        return RefusedError(error.code, str(error))
    return RefusedError("stopped", str(error))
