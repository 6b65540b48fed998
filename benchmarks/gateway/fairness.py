"""What requests that are made to be slow cost the others, over the instant mock sampler.

    python benchmarks/gateway/fairness.py [--requests 200] [--seconds 5] [--kinds KIND ...]

1. By kind: one such request after another is under way, while another rollout sends 200 requests
   over one connection. Goal: their p99 is at most 100 ms above the idle gateway's.
2. The cell "1 % hostile": 32 connections, and one such request to 99 others, all kinds in turn
   but those to a provider's model.
   Goal: the p99 of the others is at most twice that without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hostile
from run import Agentrl, Contestant, Shape, measure, write_answer

HERE = Path(__file__).parent
ALONE, MANY = Shape(False, 1, False), Shape(False, 32, False)


@contextlib.contextmanager
def hostile_rollout(who: Agentrl, kinds: Sequence[str], pause: float) -> Iterator[dict[str, Any]]:
    """Send such requests all the while. Yields a dictionary that has the counts afterwards."""
    with who.targets(1) as [(path, key)]:
        cell = {"port": who.port, "key": key, "pause": pause}
        cell["path"] = path.removesuffix("/chat/completions")
        with subprocess.Popen(
            [sys.executable, str(HERE / "hostile.py"), *kinds],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as sender:  # fmt: skip
            assert sender.stdin is not None
            assert sender.stdout is not None
            sender.stdin.write(json.dumps(cell) + "\n")
            sender.stdin.flush()
            assert sender.stdout.readline() == "ready\n"
            found: dict[str, Any] = {}
            yield found
            sender.stdin.close()
            found |= json.loads(sender.stdout.readline())


def by_kind(who: Agentrl, kinds: Sequence[str], requests: int) -> list[str]:
    lines = ["| one after another | p50 ms | p99 ms | above idle | met | answers | slowest s |"]
    lines += ["|---|--:|--:|--:|---|---|--:|"]
    idle = measure(who, ALONE, seconds=600, at_most=requests)
    lines.append(f"| none (idle) | {idle['p50_ms']:.1f} | {idle['p99_ms']:.1f} | | | | |")
    for kind in kinds:
        with hostile_rollout(who, [kind], pause=0.0) as sent:
            cell = measure(who, ALONE, seconds=600, at_most=requests)
        above = cell["p99_ms"] - idle["p99_ms"]
        answers = ", ".join(
            f"{n} × {name.rpartition(' ')[2]}" for name, n in sent["statuses"].items()
        )
        lines.append(
            f"| {kind} | {cell['p50_ms']:.1f} | {cell['p99_ms']:.1f} | {above:+.0f} | "
            f"{'yes' if above <= 100 else 'NO'} | {answers} | {sent['slowest_s'][kind]:.2f} |"
        )
        print(lines[-1], flush=True)
    return lines


def one_percent(who: Agentrl, kinds: Sequence[str], seconds: float) -> list[str]:
    lines = ["| cell | req/s | p50 ms | p99 ms | hostile |", "|---|--:|--:|--:|--:|"]
    without = measure(who, MANY, seconds=seconds, at_most=0)
    with hostile_rollout(who, kinds, pause=99 / without["per_second"]) as sent:
        cell = measure(who, MANY, seconds=seconds, at_most=0)
    for name, one, count in (
        ("JSON, 32", without, 0),
        ("JSON, 32, 1 % hostile", cell, sent["sent"]),
    ):
        lines.append(
            f"| {name} | {one['per_second']:,.0f} | {one['p50_ms']:.1f} | {one['p99_ms']:.1f} | "
            f"{count} of {count + one['answered']} |"
        )
    ratio = cell["p99_ms"] / without["p99_ms"]
    met = "met" if ratio <= 2 else "NOT met"
    return [*lines, "", f"p99 with / without: {ratio:.2f} (goal: at most 2; {met})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="0: not by kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the second cell; 0: not it")
    parser.add_argument("--kinds", nargs="*", default=[*hostile.KINDS])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    head = f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, load average before the run"
    lines = [f"{head} {os.getloadavg()[0]:.1f}.", ""]
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder = Path(name)
        os.environ["BENCHMARK_ANSWER"] = str(write_answer(folder))
        provider, log = Contestant("direct", sys.executable, folder), folder / "log"
        url = f"http://127.0.0.1:{provider.port}/v1"
        who = Agentrl("agentrl", folder, forget=False, provider=url)
        with provider.running(folder / "provider-log"), who.running(log):
            who.first_answer(log)
            measure(who, ALONE, seconds=600, at_most=200)  # warm
            if options.requests:
                lines += by_kind(who, options.kinds, options.requests)
            if options.seconds:
                own = [kind for kind in options.kinds if kind not in hostile.JUDGE]
                lines += ["", *one_percent(who, own, options.seconds)]
    print("\n".join(lines))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "fairness.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
