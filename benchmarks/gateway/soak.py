"""256 rollouts stream at once through a gateway, and everything is counted afterwards.

    python benchmarks/gateway/soak.py --seconds 60

The gateway runs in a process of its own (real app, real store, an instant sampler that says 64
tokens), the clients here: each is one rollout that streams turn after turn of one conversation,
then begins another one. At the end every answered request must be a completed row whose tokens are
what the client was told, with no row more, and the gateway's memory must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parents[2] / "trainer/agentrl_trainer/tiny/weights"
OPERATOR_KEY = "sk-soak"
TOKENS = 64
TURNS = 4  # of one conversation, then a new one begins
WARM_UP = 0.34  # of the time, before memory is looked at first


@dataclass
class Outcome:
    """What a soak found."""

    rollouts: int
    seconds: float
    answered: int
    recorded: int
    tokens_told: int
    tokens_recorded: int
    continued: int
    branched: dict[str, int]
    gateway_mb: list[float]  # sampled over time, the first after warming up
    requests_per_s: float

    @property
    def grown_mb(self) -> float:
        return self.gateway_mb[-1] - self.gateway_mb[0]

    def problems(self, *, may_grow_mb: float) -> list[str]:
        found = list[str]()
        if self.answered != self.recorded:
            found.append(f"{self.answered} answered, {self.recorded} recorded")
        if self.tokens_told != self.tokens_recorded:
            found.append(f"{self.tokens_told} tokens told, {self.tokens_recorded} recorded")
        if self.continued + sum(self.branched.values()) != self.answered:
            found.append("continued and branched do not add up to the requests")
        if self.grown_mb > may_grow_mb:
            found.append(f"the gateway grew by {self.grown_mb:.1f} MB")
        return found


class InstantSampler:
    """Says 64 tokens at once, drawn from the prompt's length and the seed."""

    def __init__(self, vocabulary: Sequence[int], eos: int) -> None:
        self.adapters = {"policy": 1}
        self.healthy = True
        self._words = list(vocabulary)
        self._eos = eos

    async def sample(
        self, prompt_ids: Sequence[int], params: Any, adapter: str | None
    ) -> AsyncIterator[Any]:
        from agentrl_proxy.sampler import FinishEvent, TokenEvent

        at = len(prompt_ids) * 31 + (params.seed or 0)
        for i in range(TOKENS - 1):
            token = self._words[(at + i * 7) % len(self._words)]
            yield TokenEvent(0, token, -1.0, adapter_version=1)
            if i % 8 == 7:
                await asyncio.sleep(0)
        yield TokenEvent(0, self._eos, -0.5, adapter_version=1)
        yield FinishEvent(0, "stop")

    async def load_adapter(self, name: str, version: int, path: str) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


def serve(store_path: str, run_id: str, ready: Any) -> None:
    """The gateway's process."""
    from agentrl.gateway.process import import_gateway

    import_gateway()
    from transformers import AutoTokenizer

    from agentrl_proxy.app import create_app
    from agentrl_proxy.dependencies import ConnectionLimits, GatewayDependencies
    from agentrl_proxy.rendering.renderer import Renderer
    from agentrl_proxy.server.listening import bind, url_of
    from agentrl_proxy.server.uvicorn import serve_on
    from agentrl_tracer.store import Store
    from agentrl_tracer.store.writer import TraceWriter

    store = Store(store_path)
    store.register_gateway("soak", run_id, 1)
    writer = TraceWriter(store, "soak")
    renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
    words = [i for w in ("Hi", " there", ",", " I", "'m", " Qwen", " 42", ".") for i in
             renderer.encode(w)]  # fmt: skip
    sampler = InstantSampler(words, renderer.tokenizer.eos_token_id)
    deps = GatewayDependencies(
        sampler, renderer, store, writer, "soak", models={"policy": "policy"},
        operator_key=OPERATOR_KEY, run_id=run_id, context_length=4096, accept_any_model=True,
        max_concurrent=1024, max_queued=1024,
        limits=ConnectionLimits(receive_s=60, receive_bytes=2**27, stall_s=60, grace_s=5),
    )  # fmt: skip
    try:
        with bind("127.0.0.1", 0, operator_key=OPERATOR_KEY) as bound:
            ready.put(url_of(bound))
            serve_on(create_app(deps), bound)
    finally:
        writer.close()
        store.close()


async def rollout(client: Any, url: str, claim: Any, until: float) -> tuple[int, int]:
    """Requests answered and tokens told, as the usage in the last chunk says."""
    answered = tokens = 0
    headers = {"authorization": f"Bearer {claim.key}"}
    talk: list[dict[str, Any]] = []
    while time.monotonic() < until:
        if len(talk) >= 2 * TURNS:
            talk = []
        talk.append({"role": "user", "content": f"Say you are {answered}."})
        body = {
            "model": "policy",
            "messages": talk,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        said, usage, done = "", None, False
        path = f"{url}/rollouts/{claim.rollout_id}/v1/chat/completions"
        async with client.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    chunk = json.loads(line.removeprefix("data: "))
                    for choice in chunk["choices"]:
                        said += choice["delta"].get("content") or ""
                    usage = chunk.get("usage") or usage
        if not done or usage is None:
            raise RuntimeError("a stream ended early")
        talk.append({"role": "assistant", "content": said})
        answered += 1
        tokens += usage["completion_tokens"]
    return answered, tokens


async def drive(url: str, claims: list[Any], seconds: float, pid: int) -> dict[str, Any]:
    import httpx

    begin = time.monotonic()
    memory = list[float]()

    async def watch() -> None:
        await asyncio.sleep(seconds * WARM_UP)
        while True:
            memory.append(resident_mb(pid))
            await asyncio.sleep(max(seconds / 20, 0.25))

    watching = asyncio.create_task(watch())
    limits = httpx.Limits(max_connections=len(claims), max_keepalive_connections=len(claims))
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        pairs = await asyncio.gather(
            *(rollout(client, url, claim, begin + seconds) for claim in claims)
        )
        took = time.monotonic() - begin
        watching.cancel()
        memory.append(resident_mb(pid))
        operator = {"authorization": f"Bearer {OPERATOR_KEY}"}
        health = (await client.get(f"{url}/healthz", headers=operator)).json()["gateway"]
    return {
        "answered": sum(answered for answered, _ in pairs),
        "tokens_told": sum(tokens for _, tokens in pairs),
        "seconds": took,
        "gateway_mb": memory,
        "continued": health["continued"],
        "branched": health["branched"],
    }


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)


def soak(folder: Path, *, rollouts: int, seconds: float) -> Outcome:
    from agentrl_tracer.schemas import CallState, NewRollout, Purpose
    from agentrl_tracer.store import Store

    path = str(folder / "trace.db")
    store = Store(path)
    run_id = store.create_run("soak", "train", {})
    [task] = store.add_tasks(run_id, "train", [{}])
    store.enqueue(
        run_id, [NewRollout(task, "g", Purpose.TRAIN, 0, i, seed=i) for i in range(rollouts)]
    )
    found = [store.claim("soak", 3600.0, run_id) for _ in range(rollouts)]
    claims = [claim for claim in found if claim is not None]
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=serve, args=(path, run_id, ready), daemon=True)
    process.start()
    try:
        url = ready.get(timeout=120)
        assert process.pid is not None
        seen = asyncio.run(drive(url, claims, seconds, process.pid))
    finally:
        process.terminate()
        process.join(60)
    recorded = tokens = 0
    for claim in claims:  # one attempt at a time: a minute's calls need not fit in memory
        calls = store.calls(attempt_ids=[claim.attempt_id])
        if any(call.state is not CallState.COMPLETED for call in calls):
            raise RuntimeError("a call was not completed")
        recorded += len(calls)
        tokens += sum(len(call.response_ids) for call in calls)
    if not store.accounting(run_id).adds_up:
        raise RuntimeError("the store's own sums are wrong")
    store.close()
    return Outcome(
        rollouts=len(claims), recorded=recorded, tokens_recorded=tokens,
        requests_per_s=round(seen["answered"] / seen["seconds"], 1), **seen,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--may-grow-mb", type=float, default=20.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(Path(folder), rollouts=asked.rollouts, seconds=asked.seconds)
    problems = outcome.problems(may_grow_mb=asked.may_grow_mb)
    sys.stdout.write(json.dumps({**asdict(outcome), "problems": problems}, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
