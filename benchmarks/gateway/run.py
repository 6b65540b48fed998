"""agentrl's gateway beside its peers, all over the same instant mock sampler.

    python benchmarks/gateway/run.py [--litellm-python PYTHON] [--agl-python PYTHON] [--quick]

Starts each contestant as a server of its own on a free loopback port, then goes through the cells
(JSON or streamed, so many connections), every contestant in turn in each cell, and writes what it
found to ``results/``. See README.md for what is equal and what is not.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import answer
import processes
from rich.console import Console
from rich.table import Table

from agentrl_tracer.schemas import AttemptState, Call, CallState, NewRollout, Purpose
from agentrl_tracer.store import Store

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SERVERS = HERE / "servers"
PER_ROLLOUT = 16  # requests to a rollout before a connection takes the next one
SHARED = [("/v1/chat/completions", "sk-benchmark")]
TOKENS = 64
START_S = 180.0
CONNECTIONS = (1, 32, 256)

console = Console(width=140)


@dataclass(frozen=True)
class Shape:
    """What is asked in one cell."""

    stream: bool
    connections: int
    logprobs: bool

    def __str__(self) -> str:
        kind = "stream" if self.stream else "JSON"
        return f"{kind}, {self.connections}" + (", log-probs" if self.logprobs else "")


class Contestant:
    """One server: how to start it and whom to ask for there."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name = name
        self.python = python
        self.folder = folder
        self.port = _free_port()
        self.answered = 0  # requests, the first one and the warm-ups' too

    def command(self) -> list[str]:
        return [self.python, str(SERVERS / "direct.py"), str(self.port)]

    @contextlib.contextmanager
    def targets(self, requests: int) -> Iterator[list[tuple[str, str]]]:
        """(path, key)s for about that many requests."""
        yield SHARED

    def environment(self) -> dict[str, str]:
        # No price lists from the network; peers' environments must not see our packages.
        settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return kept | settings

    def check(self) -> dict[str, Any]:
        """What must hold when all is over, and what was found."""
        return {}

    # --- the process

    @contextlib.contextmanager
    def running(self, log: Path) -> Iterator[None]:
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command(), stdout=out, stderr=out, env=self.environment(), cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()

    def first_answer(self, log: Path) -> dict[str, float]:
        """Waits for it: seconds by the clock and of CPU, and the memory then."""
        started = time.perf_counter()
        while not self._try():
            if self._process.poll() is not None or time.perf_counter() - started > START_S:
                raise SystemExit(f"{self.name} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        took = time.perf_counter() - started
        pids = processes.tree(self.pid)
        cpu = processes.when_quiet(pids, 5.0)
        return {"start_s": took, "start_cpu_s": cpu, "rss_start_mb": processes.rss_mb(pids)}

    def _try(self) -> bool:
        body = {
            "model": answer.MODEL,
            "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": "Hello."}],
        }
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)):
                return False
        with self.targets(1) as targets:
            path, key = targets[0]
            client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            with (
                contextlib.closing(client),
                contextlib.suppress(OSError, http.client.HTTPException),
            ):
                client.request("POST", path, json.dumps(body), headers)
                reply = client.getresponse()
                self.answered += reply.read() != b"" and reply.status == 200
        return bool(self.answered)


class Agentrl(Contestant):
    """The gateway. Rollouts are claimed and ended here, as runners do, in its own store."""

    def __init__(self, name: str, folder: Path, *, forget: bool, provider: str = "") -> None:
        super().__init__(name, sys.executable, folder)
        self._provider = provider  # the URL of its model ``judge``
        self._forget = forget
        self._url = str(folder / f"{name.replace(' ', '-')}.db")
        self._store = Store(self._url)
        self._run = self._store.create_run("benchmark", "train", {})
        self._task = self._store.add_tasks(self._run, "train", [{"n": 1}])[0]
        self._rollouts = 0
        self._first_attempts: list[str] = []  # of every cell: surely used

    def environment(self) -> dict[str, str]:
        return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def command(self) -> list[str]:
        server = str(SERVERS / "agentrl_gateway.py")
        command = [self.python, server, str(self.port), self._url, self._run]
        return [*command, *["--forget"] * self._forget, *[self._provider] * bool(self._provider)]

    @contextlib.contextmanager
    def targets(self, requests: int) -> Iterator[list[tuple[str, str]]]:
        count = -(-requests // PER_ROLLOUT)
        new = [
            NewRollout(
                self._task, "group", Purpose.TRAIN, 0, self._rollouts + i, seed=i, sampling={}
            )
            for i in range(count)
        ]
        self._rollouts += count
        self._store.enqueue(self._run, new)
        claims = [self._store.claim("benchmark", 3600.0, self._run) for _ in new]
        attempts = [claim for claim in claims if claim is not None]
        yield [(f"/rollouts/{c.rollout_id}/v1/chat/completions", c.key) for c in attempts]
        for claim in attempts:
            self._store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
        self._first_attempts.append(attempts[0].attempt_id)

    def check(self) -> dict[str, Any]:
        sums = self._store.accounting(self._run)
        if self._forget:
            return {"recorded": sums.recorded}
        looked_at = self._store.calls(attempt_ids=self._first_attempts)
        said = answer.load()
        exact = all(_exact(call, said) for call in looked_at)
        found = {
            "answered": self.answered, "recorded": sums.recorded, "proxied": sums.proxied,
            "adds_up": sums.adds_up, "calls_looked_at": len(looked_at), "tokens_exact": exact,
        }  # fmt: skip
        if not (
            self.answered == sums.recorded == sums.proxied and sums.adds_up and looked_at and exact
        ):
            raise SystemExit(f"agentrl's store does not hold what was answered: {found}")
        return found


def _exact(call: Call, said: answer.Answer) -> bool:
    return (
        call.state is CallState.COMPLETED
        and list(call.response_ids) == said.ids
        and all(
            abs(a - b) < 1e-6 for a, b in zip(call.response_logprobs, said.logprobs, strict=True)
        )
    )


class LiteLLM(Contestant):
    """With a master key, without which it refuses to start; agentrl checks keys too."""

    _KEY = f"sk-{secrets.token_hex(32)}"

    @contextlib.contextmanager
    def targets(self, requests: int) -> Iterator[list[tuple[str, str]]]:
        yield [("/v1/chat/completions", self._KEY)]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"LITELLM_MASTER_KEY": self._KEY}

    def command(self) -> list[str]:
        return [
            str(Path(self.python).with_name("litellm")),
            "--config", str(SERVERS / "litellm.yaml"),
            "--host", "127.0.0.1", "--port", str(self.port), "--num_workers", "1",
        ]  # fmt: skip


class AgentLightning(Contestant):
    _ROLLOUTS = 1000

    def command(self) -> list[str]:
        server = str(SERVERS / "agentlightning_proxy.py")
        return [self.python, server, str(self.port), str(self._ROLLOUTS), str(self._file)]

    @property
    def _file(self) -> Path:
        return self.folder / "agentlightning-targets.json"

    @contextlib.contextmanager
    def targets(self, requests: int) -> Iterator[list[tuple[str, str]]]:
        yield json.loads(self._file.read_text())

    def check(self) -> dict[str, Any]:
        """How many calls its store has spans of. Reported, not required: it is not our promise."""
        counted = self._file.with_suffix(".counted")
        os.kill(self.pid, signal.SIGUSR1)
        for _ in range(300):
            if counted.exists():
                return {"answered": self.answered, **json.loads(counted.read_text())}
            time.sleep(0.1)
        return {"answered": self.answered, "spans": "its store did not say within 30 s"}

    def _try(self) -> bool:
        return self._file.exists() and super()._try()  # written when the proxy has started


@dataclass
class Found:
    """What was measured of one contestant."""

    name: str
    start: dict[str, float]
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: list[tuple[int, float]] = field(default_factory=list)  # (requests answered, MB)
    check: dict[str, Any] = field(default_factory=dict)


def write_answer(folder: Path) -> Path:
    """64 tokens of the tiny model's vocabulary, and log-probabilities for them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "trainer/agentrl_trainer/tiny/weights")
    text = "I'm Qwen, a large language model. Let's play a game: you say a number. " * 6
    ids = tokenizer.encode(text, add_special_tokens=False)[:TOKENS]
    said = {
        "ids": ids,
        "tokens": [tokenizer.decode([i]) for i in ids],
        "logprobs": [-0.25 - i / TOKENS for i in range(TOKENS)],
        "prompt_tokens": 24,
    }
    path = folder / "answer.json"
    path.write_text(json.dumps(said))
    return path


def measure(who: Contestant, shape: Shape, *, seconds: float, at_most: int) -> dict[str, Any]:
    """One cell: a load generator of its own against one server."""
    # Enough rollouts for 4,000 requests a second; a faster server uses them again.
    expected = at_most or int(4000 * seconds)
    with who.targets(max(expected, shape.connections * PER_ROLLOUT)) as targets:
        cell = {
            "port": who.port, "pid": who.pid, "targets": targets, "per_target": PER_ROLLOUT,
            "connections": shape.connections, "stream": shape.stream, "logprobs": shape.logprobs,
            "seconds": seconds, "at_most": at_most, "warm_up": min(64, 2 * shape.connections),
            "text": answer.load().text, "model": answer.MODEL,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(HERE / "load.py")],
            input=json.dumps(cell), capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{who.name}, {shape}: {done.stderr[-3000:]}")
    found = json.loads(done.stdout)
    who.answered += found["total"]
    return found


def fill_memory(who: Contestant, requests: int) -> list[tuple[int, float]]:
    """Memory at the start and after every tenth of the requests; rollouts end, new ones begin."""
    shape = Shape(stream=False, connections=32, logprobs=False)
    points = [(0, processes.rss_mb(processes.tree(who.pid)))]
    for part in range(1, 11):
        cell = measure(who, shape, seconds=600.0, at_most=requests // 10)
        points.append((part * requests // 10, processes.rss_mb(processes.tree(who.pid))))
        console.print(
            f"{who.name}: {points[-1][1]:.0f} MB after {points[-1][0]:,} requests more, "
            f"{cell['per_second']:,.0f}/s, {cell['cpu_ms']:.2f} CPU-ms"
        )
    return points


# --- reporting


def rows(found: list[Found], shapes: list[Shape]) -> list[list[str]]:
    """A line for every cell and contestant; × says how many times better agentrl does."""
    lines: list[list[str]] = []
    by_name = {f.name: f for f in found}
    for shape in map(str, shapes):
        direct, ours = by_name["direct"].cells.get(shape), by_name["agentrl"].cells.get(shape)
        for one in found:
            cell = one.cells.get(shape)
            if cell is None:
                continue
            lines.append(
                [
                    shape, one.name, f"{cell['cpu_ms']:.2f}", f"{cell['per_second']:,.0f}",
                    f"{cell['p50_ms']:.2f}", f"{cell['p99_ms']:.2f}",
                    f"{cell['p50_ms'] - direct['p50_ms']:+.2f}" if direct else "",
                    f"{cell['p99_ms'] - direct['p99_ms']:+.2f}" if direct else "",
                    f"{ours['per_second'] / cell['per_second']:.2f}" if ours else "",
                    f"{cell['cpu_ms'] / ours['cpu_ms']:.2f}" if ours else "",
                    f"{cell['own_cpu_ms']:.2f}",
                ]
            )  # fmt: skip
    return lines


HEADS = [
    "cell", "server", "CPU ms", "req/s", "p50 ms", "p99 ms", "p50 added", "p99 added",
    "× req/s", "× CPU", "load's CPU ms",
]  # fmt: skip


def servers(found: list[Found]) -> list[list[str]]:
    lines = []
    for one in found:
        start = one.start
        memory = ", ".join(f"{n:,}: {mb:.0f}" for n, mb in one.memory) or "–"
        lines.append(
            [
                one.name, f"{start['start_s']:.1f}", f"{start['start_cpu_s']:.1f}",
                f"{start['rss_start_mb']:.0f}", f"{start['rss_end_mb']:.0f}",
                f"{start['answered']:,.0f}", memory,
                *_shown(one),
            ]
        )  # fmt: skip
    return lines


def _shown(one: Found) -> tuple[str, str]:
    """What a client sees of the 64 tokens: chunks in a stream, and log-probabilities if asked."""
    whole, stream = (one.cells[str(Shape(s, 32, True))] for s in (False, True))
    return str(stream["chunks_seen"]), f"{whole['logprobs_seen']}, {stream['logprobs_seen']}"


SERVER_HEADS = [
    "server", "start s", "start CPU s", "RSS MB at start", "after the cells", "answers by then",
    "after so many more requests", "chunks a stream", "log-probs JSON, stream",
]  # fmt: skip


def goals(found: list[Found]) -> list[list[str]]:
    """What the gateway is meant to reach, and whether it did. Rates are those at 32 connections,
    unless it says otherwise."""
    by_name = {f.name: f for f in found}
    one, many = str(Shape(False, 1, False)), str(Shape(False, 32, False))
    lines: list[list[str]] = []

    def goal(what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        met = value >= limit if at_least else value < limit
        sign = "≥" if at_least else "<"
        lines.append([what, f"{sign} {limit:g}", f"{value:.2f}", "yes" if met else "NO"])

    def cell(name: str, shape: str) -> dict[str, Any] | None:
        return by_name[name].cells.get(shape) if name in by_name else None

    ours, direct = cell("agentrl", one), cell("direct", one)
    if ours and direct:
        goal("added p50 of a JSON request, 1 connection, ms", ours["p50_ms"] - direct["p50_ms"], 1)
    ours = cell("agentrl", many)
    if ours:
        goal("CPU-ms of a JSON request", ours["cpu_ms"], 1)
        if free := cell("agentrl, unrecorded", many):
            goal("share of the CPU-ms that is recording", 1 - free["cpu_ms"] / ours["cpu_ms"], 0.3)
        for connections in CONNECTIONS:
            shape = str(Shape(False, connections, False))
            kept, free = cell("agentrl", shape), cell("agentrl, unrecorded", shape)
            if kept and free:
                share = 1 - kept["per_second"] / free["per_second"]
                what = f"share of the JSON requests/s that recording costs, {connections} conn."
                goal(what, share, 0.3)
        for name, factor in (("LiteLLM", 10), ("Agent-lightning 0.3", 4)):
            if other := cell(name, many):
                ratio = ours["per_second"] / other["per_second"]
                goal(f"times {name}'s JSON requests/s", ratio, factor, at_least=True)
    return lines


GOAL_HEADS = ["goal", "limit", "measured", "met"]


def table_of(title: str, heads: list[str], lines: list[list[str]]) -> Table:
    table = Table(title=title)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    for previous, line in zip([None, *lines], lines, strict=False):
        if previous is not None and previous[0] != line[0] and heads is HEADS:
            table.add_section()
        table.add_row(*line)
    return table


def markdown(found: list[Found], shapes: list[Shape], about: dict[str, Any]) -> str:
    def written(heads: list[str], lines: list[list[str]]) -> list[str]:
        ruler = "|".join("---" if i < 2 else "--:" for i in range(len(heads)))
        return [f"| {' | '.join(heads)} |", f"|{ruler}|", *(f"| {' | '.join(x)} |" for x in lines)]

    out = [
        f"{about['date']}, {about['machine']}, {about['seconds']} s a cell, load average before "
        f"the run {about['load']}. {about['skipped']}",
        "",
        *written(HEADS, rows(found, shapes)),
        "",
        *written(SERVER_HEADS, servers(found)),
        "",
        *written(GOAL_HEADS, goals(found)),
        "",
    ]
    out += [f"{one.name}: {json.dumps(one.check)}\n" for one in found if one.check]
    return "\n".join(out)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def contestants(options: argparse.Namespace, folder: Path) -> tuple[list[Contestant], list[str]]:
    servers_under_test: list[Contestant] = [
        Contestant("direct", sys.executable, folder),
        Agentrl("agentrl", folder, forget=False),
        Agentrl("agentrl, unrecorded", folder, forget=True),
    ]
    skipped = []
    for name, kind, python, flag in (
        ("LiteLLM", LiteLLM, options.litellm_python, "--litellm-python"),
        ("Agent-lightning 0.3", AgentLightning, options.agl_python, "--agl-python"),
    ):
        if python:
            servers_under_test.append(kind(name, python, folder))
        else:
            skipped.append(f"{name} was left out: no {flag}.")
    return servers_under_test, skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--litellm-python", help="python of the venv of requirements-litellm.txt")
    parser.add_argument(
        "--agl-python", help="python of the venv of requirements-agentlightning.txt"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.5, help="for which a cell sends requests"
    )
    parser.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS)
    parser.add_argument(
        "--memory-requests", type=int, default=0, help="50000 for the full check of memory"
    )
    parser.add_argument(
        "--memory-of", nargs="+", default=["agentrl"], help="contestants that it is done for"
    )
    parser.add_argument("--quick", action="store_true", help="0.6 s a cell, 1 and 32 connections")
    parser.add_argument("--keep", type=Path, help="keep logs and stores here")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would outlive us
    if options.quick:
        options.seconds, options.connections = 0.6, [1, 32]

    shapes = [Shape(s, c, False) for s in (False, True) for c in options.connections]
    shapes += [Shape(s, 32, True) for s in (False, True)]
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "seconds": options.seconds,
        "memory_requests": options.memory_requests,
    }
    with contextlib.ExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[answer.ENVIRONMENT] = str(write_answer(folder))
        servers_under_test, skipped = contestants(options, folder)
        about["skipped"] = " ".join(skipped)
        for line in skipped:
            console.print(line)

        found: list[Found] = []
        for who in servers_under_test:  # one after the other: a start is measured alone
            log = folder / f"{who.name.replace(' ', '-')}.log"
            stack.enter_context(who.running(log))
            found.append(Found(who.name, who.first_answer(log)))
            console.print(f"{who.name} answers after {found[-1].start['start_s']:.1f} s")
        for shape in shapes:
            for who, one in zip(servers_under_test, found, strict=True):
                cell = measure(who, shape, seconds=options.seconds, at_most=0)
                one.cells[str(shape)] = cell
                console.print(
                    f"{shape!s:24} {who.name:20} {cell['cpu_ms']:8.2f} CPU-ms "
                    f"{cell['per_second']:8,.0f}/s  p50 {cell['p50_ms']:8.2f} ms"
                )
        for who, one in zip(servers_under_test, found, strict=True):
            one.start["rss_end_mb"] = processes.rss_mb(processes.tree(who.pid))
            one.start["answered"] = who.answered
            if options.memory_requests and who.name in options.memory_of:
                one.memory = fill_memory(who, options.memory_requests)
            one.check = who.check()

    console.print(table_of("Cells", HEADS, rows(found, shapes)))
    console.print(table_of("Servers", SERVER_HEADS, servers(found)))
    console.print(table_of("Goals", GOAL_HEADS, goals(found)))
    options.results.mkdir(parents=True, exist_ok=True)
    stem = "quick" if options.quick else "gateway"
    record = {
        "about": about,
        "servers": [
            {"name": f.name, "start": f.start, "cells": f.cells, "memory": f.memory,
             "check": f.check}
            for f in found
        ],
    }  # fmt: skip
    (options.results / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")
    (options.results / f"{stem}.md").write_text(markdown(found, shapes, about))


if __name__ == "__main__":
    main()
