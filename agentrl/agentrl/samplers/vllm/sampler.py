"""A vLLM server as the gateway's ``Sampler``: tokens in, tokens out.

What makes the tokens trainable is checked against the server:

- Raw log-probs. vLLM's ``logprobs_mode`` must be ``raw_logprobs`` (its default): of the
  temperature-1 policy, before bias, top-k and top-p. ``start`` probes the server for it.
- No stale adapter: see ``adapters``. A restarted server gets its adapters again: see ``recovery``.
- The prompt. vLLM returns the ids that it consumed; they must be the ids sent.

Under a grammar vLLM masks the logits first, so its raw log-probs are the policy's renormalized over
what the mask left. The policy's own then come from a second request that scores the finished
answer, and the difference is the mask's mass. So a constrained answer arrives as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import httpx

from agentrl.samplers.vllm import api
from agentrl.samplers.vllm.adapters import FILES_S, VllmAdapters
from agentrl.samplers.vllm.api import VllmClient, VllmError
from agentrl.samplers.vllm.recovery import REQUEST_S, VllmWatch
from agentrl.timing import Waiting
from agentrl_proxy.sampler import (
    ContextLengthError,
    DecodingParams,
    GrammarError,
    RefusedError,
    SampleEvent,
    TokenEvent,
)
from agentrl_proxy.server.event_data import event_data

log = logging.getLogger("agentrl")

_POLL_S = 0.25
_TOKENS_PER_CHUNK = 8
"""A chunk costs both sides about as much as sampling a token on a GPU. The first and last arrive at
once; of a canceled answer up to one chunk's tokens are not recorded."""


class VllmSampler:
    """Samples through a server that is up, or comes up.

    Args:
        url: of the server, without ``/v1``; ``unix:/path`` for a socket.
        api_key: what the server was started with, if it wants one.
        eos_ids: tokens that end an answer.
        context_length: of the base model; the server may have been started with less.
        wait_s: how long ``start`` waits for a server that does not answer yet; None: without limit,
            where the server is supervised.
        joins_late: whether a server that did not come up in time is taken when it does.
        engines: data-parallel engines of the server; a rollout's requests go to one of them.
        sleeps: whether ``drop_prefixes`` lets the server sleep until the next request.
    """

    def __init__(
        self, url: str, *, eos_ids: frozenset[int], context_length: int,
        api_key: str | None = None, wait_s: float | None = None, engines: int = 1,
        sleeps: bool = False, joins_late: bool = False,
    ) -> None:  # fmt: skip
        self.context_length = context_length
        self._wait_s, self._joins_late = wait_s, joins_late
        self._eos_ids = sorted(eos_ids)
        self._found = api.Fitness()
        self._in_flight, self._engines, self._sleeps = 0, engines, sleeps
        self._turn = threading.Lock()
        self._asleep = False
        self._client = VllmClient(url, api_key)
        self._adapters = VllmAdapters(self._client)
        self._watch = VllmWatch(self._client, self._adapters, self._learn)

    def start(self) -> None:
        """Wait for the server, check that it is fit, and begin to watch it.

        From then on the server may die and come back, or come up late; ``healthy`` is true whenever
        it answers and has every adapter that was loaded.

        Raises:
            VllmError: it does not come up in time, or is not fit.
        """
        waiting = Waiting(log.warning, first_s=1.0)
        limit = "" if self._wait_s is None else f" up to {self._wait_s:g} s (sampler.vllm.wait)"
        while why := api.why_not_up(self._client.blocking, REQUEST_S):
            said = f"no vLLM server is ready at {self._client.url}: {why}"
            if self._wait_s is not None and waiting.seconds >= self._wait_s:
                if self._joins_late:
                    log.warning("%s; it is taken when it comes up", said)
                    self._client.mark_lost(why)
                    self._watch.start()
                    return
                raise VllmError(
                    f"sampler.vllm.url: {said}; sampler.vllm.wait is {self._wait_s:g} s"
                )
            waiting.still(lambda said=said: f"{said}; waiting for it{limit}")
            if self._watch.stopping.wait(_POLL_S):
                return
        self._learn()
        self._client.mark_healthy()
        self._watch.start()

    def _learn(self) -> None:
        if self._sleeps:  # as a gateway before this one left it
            self._client.blocking.post("/wake_up").raise_for_status()
            self._asleep = False
        found = self._found = api.check(self._client.blocking, self._eos_ids[0])
        self.context_length = min(self.context_length, found.context_length or self.context_length)
        if not found.enforces_grammars:
            log.warning("vLLM: %s", api.NO_GRAMMARS)

    def stop(self) -> None:
        """Stop watching and unload the adapters; the server goes on."""
        self._watch.stop()
        self._client.mark_lost("the gateway stops")
        self._adapters.unload_all()
        self._client.blocking.close()

    @property
    def healthy(self) -> bool:
        return self._client.healthy

    def stats(self) -> dict[str, Any]:
        """Return the server's own counters, at most a second old, and ours."""
        return {
            **self._watch.metrics,
            "sampler": "vllm",
            "in_flight": self._in_flight,
            "swaps": self._adapters.swaps,
            "recoveries": self._watch.recoveries,
        }

    @property
    def adapters(self) -> Mapping[str, int]:
        return {name: load.version for name, load in self._adapters.current.items()}

    def load_now(self, name: str, version: int, path: str) -> None:
        """Load a version in this thread; wait while the server does not see its files yet.

        A server that is lost loads it when it is back.

        Raises:
            RefusedError: the server refuses it, does not answer, or has not seen its files in time.
        """
        if not self.healthy:
            self._adapters.expect(name, version, path)
            return
        waiting = Waiting(log.warning)
        while True:
            try:
                self._load(name, version, path)
                return
            except RefusedError as error:
                if error.code != "files_not_found" or waiting.seconds >= FILES_S:
                    raise
                waiting.still(lambda said=str(error): f"{said}; waiting up to {FILES_S:g} s")
                if self._watch.stopping.wait(_POLL_S):
                    raise

    def _load(self, name: str, version: int, path: str) -> None:
        self._set_asleep(False)
        self._adapters.load(name, version, path)

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        if not self.healthy:
            self._adapters.expect(name, version, path)
            raise RefusedError("deferred", str(self._client.unavailable()))
        await asyncio.to_thread(self._load, name, version, path)

    async def drop_prefixes(self) -> None:
        if self._sleeps and self.healthy:
            await asyncio.to_thread(self._set_asleep, True)

    def _set_asleep(self, asleep: bool) -> None:
        """Send the server to sleep, or wake it. Asleep, its weights are in the CPU's memory.

        Raises:
            RefusedError: it does not answer.
        """
        with self._turn:
            if self._asleep == asleep:
                return
            path = "/sleep?level=1" if asleep else "/wake_up"
            try:
                self._client.blocking.post(path).raise_for_status()
            except httpx.HTTPError as error:
                raise self._client.unavailable(error) from error
            self._asleep = asleep

    async def _awake(self) -> None:
        if self._asleep:
            await asyncio.to_thread(self._set_asleep, False)

    @contextmanager
    def _request(self, adapter: str | None) -> Iterator[tuple[str, int | None]]:
        """Yield the server's name of an adapter and its version; translate its failures."""
        load = self._adapters.current.get(adapter) if adapter else None
        if load is None and adapter is not None:
            raise RefusedError("unknown_adapter", f"no adapter {adapter!r} is loaded")
        self._in_flight += 1
        try:
            yield (load.lora, load.version) if load else (self._found.base, None)
        except (httpx.TransportError, RuntimeError) as error:
            if isinstance(error, httpx.TransportError) or not self.healthy:
                raise self._client.unavailable(error) from error
            raise
        finally:
            self._in_flight -= 1

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncGenerator[SampleEvent]:
        room = self.context_length - len(prompt_ids)
        if params.grammar is not None:
            if not self._found.enforces_grammars:
                raise GrammarError(api.NO_GRAMMARS)
            room -= 1  # scoring an answer samples one more token
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context is "
                f"{self.context_length}, answer included"
            )
        max_tokens = min(params.max_tokens, room)
        await self._awake()
        with self._request(adapter) as (model, version):
            body = api.completion(model, prompt_ids, params, max_tokens, self._eos_ids)
            run = self._streamed if params.grammar is None else self._constrained
            async with contextlib.aclosing(run(body, params, version)) as events:
                async for event in events:
                    yield event

    def _headers(self, params: DecodingParams) -> dict[str, str]:
        """Name the engine of a rollout, as vLLM's front end reads it."""
        if self._engines == 1 or params.rollout is None:
            return {}
        return {"x-data-parallel-rank": str(crc32(params.rollout.encode()) % self._engines)}

    async def _streamed(
        self, body: dict[str, Any], params: DecodingParams, version: int | None
    ) -> AsyncGenerator[SampleEvent]:
        body |= {"stream": True, "stream_interval": _TOKENS_PER_CHUNK}
        client = await self._client.connection()
        headers = self._headers(params)
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise api.refusal(answer)
            async for data in event_data(answer):
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise RefusedError("stopped", f"vLLM: {chunk['error'].get('message')}")
                for choice in chunk["choices"]:
                    for event in api.tokens(choice, body["prompt"], params, version):
                        yield event
                    if choice["finish_reason"] is not None:
                        yield api.finish(choice)

    async def _constrained(
        self, body: dict[str, Any], params: DecodingParams, version: int | None
    ) -> AsyncGenerator[SampleEvent]:
        body["structured_outputs"] = api.structured(params.grammar or "")
        prompt = body["prompt"]
        headers = self._headers(params)
        for choice in await self._complete(body, headers, constrained=True):
            masked = api.tokens(choice, prompt, params, version)
            ids = [*prompt, *(event.token_id for event in masked)]
            top = params.top_logprobs
            raw = await self._scores(body["model"], ids, top, headers) if masked else []
            raw = raw[-len(masked) :]
            for event, (logprob, top) in zip(masked, raw, strict=True):
                yield TokenEvent(event.choice, event.token_id, logprob, top, version)
            mass = sum(logprob for logprob, _ in raw) - sum(event.logprob for event in masked)
            yield api.finish(choice, log_mass=mass)

    async def score(
        self, prompt_ids: Sequence[int], adapter: str | None, top: int
    ) -> list[TokenEvent]:
        if len(prompt_ids) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens, and vLLM scores fewer than "
                f"{self.context_length}"
            )
        ids = list(prompt_ids)
        await self._awake()
        with self._request(adapter) as (model, version):
            scores = await self._scores(model, ids, top) if len(ids) > 1 else []
        return [
            TokenEvent(0, token_id, logprob, likeliest, version)
            for token_id, (logprob, likeliest) in zip(ids[1:], scores, strict=True)
        ]

    async def _scores(
        self, model: str, ids: list[int], top: int, headers: dict[str, str] | None = None
    ) -> list[api.Score]:
        """Return (log-prob, ``top`` alternatives) of each of these tokens but the first."""
        [scored] = await self._complete(api.scoring(model, ids, top), headers)
        return api.scores(scored, ids, top)

    async def _complete(
        self, body: dict[str, Any], headers: dict[str, str] | None = None, *,
        constrained: bool = False,
    ) -> list[dict[str, Any]]:  # fmt: skip
        client = await self._client.connection()
        answer = await client.post("/v1/completions", json=body, headers=headers)
        if answer.status_code != 200:
            raise api.refusal(answer, constrained=constrained)
        return answer.json()["choices"]
