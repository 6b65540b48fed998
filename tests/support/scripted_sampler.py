"""A small deterministic sampler and a running gateway, for the proxy's tests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from store_records import enqueue

from agentrl_proxy.dependencies import GatewayDependencies
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.sampler import DecodingParams, FinishEvent, SampleEvent, TokenEvent
from agentrl_tracer.schemas import AttemptRef, AttemptState, Call, Claim
from agentrl_tracer.store import Store

OPERATOR_KEY = "sk-operator-secret"
WORDS = ["Hi", " there", ",", " I", "'m", " Qwen", " 4", "2", " grüße", " 日本語", " 👍", ".", "\n"]

Script = Callable[[Sequence[int], DecodingParams, int], str | list[int]]


@dataclass
class Seen:
    """One request that reached the sampler, and what it answered."""

    prompt_ids: list[int]
    params: DecodingParams
    adapter: str | None
    sampled: dict[int, list[int]] = field(default_factory=dict)
    cancelled: bool = False


class ScriptedSampler:
    """Says what ``script`` says; by default words drawn from (prompt, seed, choice)."""

    def __init__(self, renderer: Renderer, script: Script | None = None) -> None:
        self.renderer = renderer
        self.script: Script = script or self._words
        self.adapters: dict[str, int] = {"policy": 3}
        self.healthy = True
        self.delay = 0.0
        self.fail_after: int | None = None
        self.requests: list[Seen] = []
        self.loaded: list[tuple[str, int, str]] = []

    def _words(self, prompt_ids: Sequence[int], params: DecodingParams, choice: int) -> str:
        data = repr((list(prompt_ids), params.seed, choice)).encode()
        digest = hashlib.sha256(data).digest()
        return "".join(WORDS[byte % len(WORDS)] for byte in digest[:20])

    def _plan(self, seen: Seen, choice: int) -> tuple[list[int], FinishEvent]:
        said = self.script(seen.prompt_ids, seen.params, choice)
        eos = self.renderer.tokenizer.eos_token_id
        ids = [*self.renderer.encode(said), eos] if isinstance(said, str) else said
        for count in range(1, len(ids) + 1):
            text = self.renderer.decode(ids[:count])
            for stop in seen.params.stop:
                if stop in text:
                    return ids[:count], FinishEvent(choice, "stop", stop_string=stop)
            if count == seen.params.max_tokens and count < len(ids):
                return ids[:count], FinishEvent(choice, "length")
        return ids, FinishEvent(choice, "stop")

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        seen = Seen(list(prompt_ids), params, adapter)
        self.requests.append(seen)
        plans = [self._plan(seen, i) for i in range(params.n)]
        version = None if adapter is None else self.adapters[adapter]
        try:
            for step in range(max(len(ids) for ids, _ in plans)):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if step == self.fail_after:
                    raise RuntimeError("the engine fell over")
                for choice, (ids, finish) in enumerate(plans):
                    if step < len(ids):
                        seen.sampled.setdefault(choice, []).append(ids[step])
                        logprob = -0.25 - step / 64
                        top = [(ids[step], logprob), (0, -9.0)][: params.top_logprobs]
                        yield TokenEvent(choice, ids[step], logprob, top, version)
                    if step == len(ids) - 1:
                        yield finish
        except (asyncio.CancelledError, GeneratorExit):
            seen.cancelled = True
            raise

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        if "missing" in path:
            raise FileNotFoundError(path)
        self.loaded.append((name, version, path))
        self.adapters = {**self.adapters, name: version}

    def stats(self) -> dict[str, Any]:
        return {"requests": len(self.requests)}


@dataclass
class Running:
    """A gateway that serves, and its parts."""

    url: str
    store: Store
    sampler: ScriptedSampler
    renderer: Renderer
    deps: GatewayDependencies
    app: Any
    run_id: str
    claims: list[Claim]

    @property
    def stats(self) -> dict[str, Any]:
        return asdict(self.app.state.gateway.stats)

    def base_url(self, claim: Claim | None = None) -> str:
        return f"{self.url}/v1" if claim is None else f"{self.url}/rollouts/{claim.rollout_id}/v1"

    def calls(self, claim: Claim) -> list[Call]:
        return self.store.calls(attempt_ids=[claim.attempt_id])

    def new_claims(self, count: int = 1) -> list[Claim]:
        """Rollouts besides the three that every gateway starts with."""
        enqueue(self.store, self.run_id, {"more": True}, count)
        claims = [self.store.claim("runner", 600.0, self.run_id) for _ in range(count)]
        return [claim for claim in claims if claim is not None]

    def seal(self, claim: Claim) -> None:
        self.store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)

    def ref(self, claim: Claim) -> AttemptRef:
        found = self.store.authenticate(claim.key)
        assert found is not None
        return found
