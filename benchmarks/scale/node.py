"""A node of the simulation: runners that do what agentrl's do, with agents that do not think.

    python benchmarks/scale/node.py '{"store": ..., "run_id": ..., "gateways": [...], ...}'

Prints what the runners saw: counts, seconds, and the calls answered to attempts that did not
succeed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from agentrl_tracer.schemas import AttemptState, Claim, Purpose
from agentrl_tracer.store import Store

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.queries import CountingCursor, count_queries

CALLS = 4
"""Of each rollout."""
LEASE_S = 30.0
DIES = 0.01
"""The share of attempts whose runner is lost in the middle."""
SLOW_S = 600
T = TypeVar("T")


class GatewayFailed(Exception):
    """A gateway did not answer, or answered with an error of its own."""


@dataclass(frozen=True)
class Node:
    """A machine with runners: one process, one connection to the store."""

    store: str
    run_id: str
    gateways: list[str]
    runners: int
    number: int
    text: str
    """What each message ends with."""


class SimulatedNode:
    """Runners as tasks of one event loop. All of them wait for the store and the gateways."""

    def __init__(self, plan: Node) -> None:
        self.plan, self.store = plan, Store(plan.store)
        count_queries(self.store)
        self.thread = ThreadPoolExecutor(1)
        self.took: dict[str, list[float]] = {"claim": [], "heartbeat": [], "end": [], "call": []}
        self.counts = Counter[str]()
        self.answered_at: list[float] = []
        self.unsuccessful: dict[str, int] = {}
        self.leased: set[str] = set()
        self.draw = random.Random(plan.number)
        self.looking: dict[str, asyncio.Task[None]] = {}

    async def stored(self, what: str, work: Callable[..., T], *args: Any) -> T:
        """Have the store do something; its own time counts, not the wait for other runners."""

        def timed() -> T:
            began = time.perf_counter()
            found = work(*args)
            self.took[what].append(time.perf_counter() - began)
            return found

        return await asyncio.get_running_loop().run_in_executor(self.thread, timed)

    async def run(self) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=SLOW_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as self.session:
            beats = asyncio.create_task(self.beat())
            await asyncio.gather(*(self.runner(i) for i in range(self.plan.runners)))
            beats.cancel()
        return {
            "took": self.took, "counts": self.counts, "answered_at": self.answered_at,
            "unsuccessful": self.unsuccessful, "queries": CountingCursor.sent,
        }  # fmt: skip

    async def runner(self, number: int) -> None:
        name = f"node{self.plan.number}-{number}"
        gateway = self.plan.gateways[number % len(self.plan.gateways)]
        while True:
            claim = await self.stored("claim", self.store.claim, name, LEASE_S, self.plan.run_id)
            if claim is not None:
                await self.attempt(claim, gateway)
            elif await self.stored("claim", self.all_ended):
                return
            else:
                await asyncio.sleep(2)

    def all_ended(self) -> bool:
        return not self.store.unfinished_ids(self.plan.run_id, Purpose.TRAIN)

    async def attempt(self, claim: Claim, gateway: str) -> None:
        self.leased.add(claim.attempt_id)
        dies_at = self.draw.randrange(CALLS) if self.draw.random() < DIES else None
        answered = 0
        try:
            for answered in range(CALLS):
                if answered == dies_at:
                    self.counts["died"] += 1
                    self.unsuccessful[claim.attempt_id] = answered
                    return  # its lease will end
                await self.call(claim, gateway, answered)
            answered = CALLS
            await self.post(claim, gateway, "rewards", {"value": 1.0})
        except GatewayFailed:
            self.counts["interrupted"] += 1
            self.unsuccessful[claim.attempt_id] = answered
            infrastructure = AttemptState.INFRASTRUCTURE
            await self.stored("end", self.store.end_attempt, claim.attempt_id, infrastructure)
            await self.well(gateway)
        else:
            succeeded = AttemptState.SUCCEEDED
            await self.stored("end", self.store.end_attempt, claim.attempt_id, succeeded)
        finally:
            self.leased.discard(claim.attempt_id)

    async def call(self, claim: Claim, gateway: str, turn: int) -> None:
        content = f"Turn {turn} of {claim.rollout_id}.{self.plan.text}"
        said = [{"role": "user", "content": content}]
        body = {"model": "policy", "max_tokens": 64, "messages": said}
        began = time.perf_counter()
        await self.post(claim, gateway, "chat/completions", body)
        self.took["call"].append(time.perf_counter() - began)
        self.answered_at.append(time.monotonic())

    async def post(self, claim: Claim, gateway: str, path: str, body: dict[str, Any]) -> None:
        url = f"{gateway}/rollouts/{claim.rollout_id}/v1/{path}"
        headers = {"authorization": f"Bearer {claim.key}"}
        try:
            async with self.session.post(url, json=body, headers=headers) as got:
                await got.read()
        except aiohttp.ClientConnectionError as failure:
            raise GatewayFailed from failure
        self.counts[f"{path} answered {got.status}"] += 1
        if got.status >= 500:
            raise GatewayFailed

    async def well(self, gateway: str) -> None:
        """Wait until a gateway answers again; one task asks for all runners of the gateway."""
        task = self.looking.get(gateway)
        if task is None or task.done():
            task = self.looking[gateway] = asyncio.create_task(self.look(gateway))
        await task

    async def look(self, gateway: str) -> None:
        while True:
            try:
                async with self.session.get(f"{gateway}/healthz") as got:
                    if got.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.5)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for attempt_id in list(self.leased):
                await self.stored("heartbeat", self.store.heartbeat, attempt_id, LEASE_S)
            await self.stored("heartbeat", self.store.expire_leases)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(SimulatedNode(Node(**json.loads(sys.argv[1]))).run())))
