"""agentrl's gateway as ``agentrl.gateway.process`` wires it, over the instant mock sampler.

    BENCHMARK_ANSWER=answer.json python agentrl_gateway.py <port> <store> <run id> [--forget]
        [provider's URL]

Everything else is real: the tiny model's renderer, the SQLite store, the writer, credentials of
attempts. ``--forget`` puts a sink that keeps nothing in the writer's place: the price of recording.
With a provider's URL the gateway has a model ``judge`` of that provider. ``BENCHMARK_NUMBER=1/2``
makes it the second of two gateways. At its end it writes the seconds of each commit, and how many
queries it sent to PostgreSQL, to the file ``BENCHMARK_COMMITS``.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[3]))
import answer
from benchmarks.queries import CountingCursor, count_queries

from agentrl.timing import heavy_imports
from agentrl_proxy.sampler import DecodingParams, FinishEvent, SampleEvent, TokenEvent
from agentrl_tracer.schemas import AttemptState, Call, Reward, Span
from agentrl_tracer.store import Store
from agentrl_tracer.store.runs import new_boot_id
from agentrl_tracer.store.writer import TraceWriter

WEIGHTS = Path(__file__).parents[3] / "trainer" / "agentrl_trainer" / "tiny" / "weights"


class InstantSampler:
    """Says the answer at once. Its events are made beforehand: it costs one ``yield`` a token."""

    healthy = True

    def __init__(self) -> None:
        said = answer.load()
        self.adapters = {answer.MODEL: 1}
        self._said = [*zip(said.ids, said.logprobs, strict=True)]
        self._events = cache(self._of)

    def _of(self, choices: int) -> list[SampleEvent]:
        each = range(choices)
        tokens = [TokenEvent(choice, *one, None, 1) for one in self._said for choice in each]
        return [*tokens, *(FinishEvent(choice, "length") for choice in each)]

    async def sample(
        self, prompt_ids: Sequence[int], params: DecodingParams, adapter: str | None
    ) -> AsyncIterator[SampleEvent]:
        for event in self._events(params.n):
            yield event

    async def load_adapter(self, name: str, version: int, path: str) -> None:
        raise NotImplementedError("the mock has one adapter")

    def stats(self) -> dict[str, Any]:
        return {}


class Forgetting:
    """A TraceSink that keeps nothing."""

    def open(self, call: Call) -> None: ...

    async def finish(self, call: Call) -> AttemptState | None:
        return AttemptState.RUNNING

    async def deliver(
        self, attempt_id: str | None, spans: Sequence[Span], rewards: Sequence[Reward]
    ) -> AttemptState | None:
        return AttemptState.RUNNING


class TimedWriter(TraceWriter):
    """Notes how long each finished call waited for its commit."""

    def __init__(self, store: Store, boot_id: str) -> None:
        super().__init__(store, boot_id)
        self.seconds: list[float] = []

    async def finish(self, call: Call) -> AttemptState | None:
        began = time.perf_counter()
        state = await super().finish(call)
        self.seconds.append(time.perf_counter() - began)
        return state


def main(port: int, store_url: str, run_id: str, *options: str) -> None:
    with heavy_imports():
        from transformers import AutoTokenizer

        from agentrl_proxy.app import create_app
        from agentrl_proxy.dependencies import (
            ConnectionLimits,
            GatewayDependencies,
            ProviderModel,
        )
        from agentrl_proxy.rendering.renderer import Renderer
        from agentrl_proxy.server.listening import bind
        from agentrl_proxy.server.uvicorn import serve_on

    sys.setswitchinterval(1e-4)  # as agentrl.gateway.process does
    store = Store(store_url)
    if commits := os.environ.get("BENCHMARK_COMMITS"):
        count_queries(store)
    number, _, gateways = os.environ.get("BENCHMARK_NUMBER", "0/1").partition("/")
    boot_id = new_boot_id(int(number))
    store.register_gateway(boot_id, run_id, os.getpid(), gateways=int(gateways))
    writer = TimedWriter(store, boot_id)
    operator_key = secrets.token_hex(16)
    judges: dict[str, ProviderModel] = {}
    if (url := options[-1:]) and url != ("--forget",):
        judges["judge"] = ProviderModel("openai/x", *url, api_key="none")
    deps = GatewayDependencies(
        sampler=InstantSampler(),
        renderer=Renderer(AutoTokenizer.from_pretrained(WEIGHTS)),
        store=store,
        writer=Forgetting() if "--forget" in options else writer,
        boot_id=boot_id,
        models={answer.MODEL: answer.MODEL},
        default_adapter=answer.MODEL,
        provider_models=judges,
        operator_key=operator_key,
        run_id=run_id,
        context_length=int(os.environ.get("BENCHMARK_CONTEXT", "2048")),
        defaults={"max_tokens": 256},
        accept_any_model=True,
        max_concurrent=1024,
        max_queued=1024,
        limits=ConnectionLimits(receive_s=60, receive_bytes=2**27, stall_s=60, grace_s=5),
    )
    try:
        serve_on(create_app(deps), bind("127.0.0.1", port, operator_key=operator_key))
    finally:
        writer.close()
        store.close()
        if commits:
            seen = {"seconds": writer.seconds, "queries": CountingCursor.sent}
            Path(commits).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
