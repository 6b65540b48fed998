"""What a long conversation costs the gateway: a part of ``run.py``, over the instant mock sampler.

Prints one line of JSON. The server is that of benchmarks/gateway: everything but the sampler is
real, so its CPU is what comes beside sampling.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "gateway"))

import answer  # noqa: E402
import processes  # noqa: E402
from run import Agentrl, write_answer  # noqa: E402

CONTEXT = 65_536
TOOLS = 20


class Client:
    """One connection to a rollout of its own."""

    def __init__(self, port: int, target: tuple[str, str]) -> None:
        self._path, key = target
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> dict[str, Any]:
        body = {"model": answer.MODEL, "max_tokens": 64, "messages": messages}
        self._connection.request(
            "POST",
            self._path,
            json.dumps(body | ({"tools": tools} if tools else {})),
            self._headers,
        )
        response = self._connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise SystemExit(f"the gateway answered {response.status}: {data[:300]!r}")
        return json.loads(data)


def opening(tokens: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A system prompt of prose, and tools: about so many tokens of agentrl-tiny in all."""
    from transformers import AutoTokenizer

    weights = ROOT / "trainer/agentrl_trainer/tiny/weights"
    encode = AutoTokenizer.from_pretrained(weights).backend_tokenizer.encode
    prose = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    offsets = encode(prose, add_special_tokens=False).offsets
    part = offsets[tokens // 60][1]
    tools = [
        {"type": "function", "function": {
            "name": f"tool_{i}", "description": prose[i * part : (i + 1) * part],
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        }}
        for i in range(TOOLS)
    ]  # fmt: skip
    system = prose[TOOLS * part : offsets[int(tokens * 0.95)][1]]
    user = {"role": "user", "content": "Fix the failing test."}
    return [{"role": "system", "content": system}, user], tools


class Others(threading.Thread):
    """Sends short requests of another rollout, one every ``pause`` seconds, and times them."""

    def __init__(self, client: Client, pause: float = 0.01) -> None:
        super().__init__()
        self.client, self.pause = client, pause
        self.milliseconds: list[float] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not (self.milliseconds and self.ended.wait(self.pause)):
            started = time.perf_counter()
            self.client.ask([{"role": "user", "content": f"Say {len(self.milliseconds)}."}])
            self.milliseconds.append(1e3 * (time.perf_counter() - started))


def delays(client: Client, work: Any) -> tuple[float, float, int]:
    """p50 and p99 of the others' requests while ``work`` runs, and their number."""
    others = Others(client)
    others.start()
    work()
    others.ended.set()
    others.join()
    found = sorted(others.milliseconds)
    return found[len(found) // 2], found[int(0.99 * (len(found) - 1))], len(found)


def measure(who: Agentrl, tokens: int, calls: int) -> dict[str, Any]:
    messages, tools = opening(tokens)
    sizes: list[int] = []
    with who.targets(256) as targets:
        long, other = Client(who.port, targets[0]), Client(who.port, targets[1])

        def converse(count: int) -> None:
            for _ in range(count):
                said = long.ask(messages, tools)
                sizes.append(said["usage"]["prompt_tokens"])
                messages.append(said["choices"][0]["message"])
                messages.append({"role": "user", "content": f"Output {len(sizes)}: ok. " * 20})

        pids = processes.tree(who.pid)
        converse(3)
        before, asked = processes.when_quiet(pids, 5.0), len(sizes)
        converse(calls)
        cpu = processes.when_quiet(pids, 5.0) - before
        idle = delays(other, lambda: time.sleep(2.0))
        busy = delays(other, lambda: converse(calls))
    recorded = sorted(who._store.calls(attempt_ids=who._first_attempts[-1:]), key=lambda c: c.seq)
    exact = [
        b.prompt_ids[: len(a.prompt_ids) + len(a.response_ids)] == a.prompt_ids + a.response_ids
        for a, b in pairwise(recorded)
    ]
    return {
        "prompt_tokens": [sizes[asked], sizes[-1]],
        "cpu_ms": 1e3 * cpu / calls,
        "calls": len(recorded),
        "continued": sum(exact),
        "others_idle_ms": idle,
        "others_busy_ms": busy,
        "delay_p99_ms": busy[1] - idle[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=38_000, help="of the first prompt")
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder = Path(name)
        os.environ["BENCHMARK_ANSWER"] = str(write_answer(folder))
        os.environ["BENCHMARK_CONTEXT"] = str(CONTEXT)
        who, log = Agentrl("agentrl", folder, forget=False), folder / "log"
        with who.running(log):
            who.first_answer(log)
            print(json.dumps(measure(who, options.tokens, options.calls)))


if __name__ == "__main__":
    main()
