"""Run the benchmarks of two checkouts in alternation and print the ratio of their figures.

    python scripts/compare_heads.py ../old . --pairs 5
    python scripts/compare_heads.py ../old . --only sampler trainer

Each checkout needs its own ``.venv`` (``make .venv/.dev``). A ratio is new / old of one pair; the
median counts, and the lowest and highest show the spread. Lower is better everywhere. ``peak PSS``
is the largest proportional memory of the benchmark's whole process tree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.process_memory import TreeMemory

from agentrl_trainer.models.sources import resolve_model

Figures = dict[str, float]
CASES = ("8x8, 64+64", "8x8, 512+128", "agent")


def gateway(checkout: Path, results: Path) -> Figures:
    run(checkout, "gateway/run.py", "--connections", "1", "32", "--seconds", "1.5",
        "--results", results)  # fmt: skip
    servers = json.loads((results / "gateway.json").read_text())["servers"]
    ours = next(server for server in servers if server["name"] == "agentrl")
    cells = {f"CPU-ms, {name}": cell["cpu_ms"] for name, cell in ours["cells"].items()}
    return cells | {"RSS at the end": ours["start"]["rss_end_mb"]}


def trainer(checkout: Path, results: Path) -> Figures:
    found: Figures = {}
    for case in CASES:
        model = resolve_model("smollm2-135m")
        printed = run(checkout, "trainer/agentrl_side.py", "--case", case, "--model", model)
        line = json.loads(printed.splitlines()[-1])
        found[f"CPU s, {case}"] = line["cpu_seconds"]
        found[f"peak MB, {case}"] = line["megabytes_on_top_of_the_model"]
    return found


def sampler(checkout: Path, results: Path) -> Figures:
    run(checkout, "sampler/run.py", "--only", "agentrl", "steps", "--results", results,
        "--folder", results / "models")  # fmt: skip
    record = json.loads((results / "sampler.json").read_text())
    seconds = min(one["seconds"] for one in record["sides"]["agentrl"]["passes"])
    steps = record["steps"]["steps"].items()
    return {"s, 64 requests": seconds} | {f"ms, step of {n} rows": x["ms"] for n, x in steps}


def end_to_end(checkout: Path, results: Path) -> Figures:
    found: Figures = {}
    for name, options in (("with agent", []), ("without agent", ["--without-agent"])):
        run(checkout, "end_to_end/run.py", "--only", "agentrl", "--seeds", "0", "--steps", "8",
            "--stop-at", "2", *options, "--results", results)  # fmt: skip
        (row,) = json.loads((results / "fixed_8_steps.json").read_text())["runs"]
        found |= {f"wall s, {name}": row["wall"], f"CPU s, {name}": row["cpu"]}
    return found


def runners(checkout: Path, results: Path) -> Figures:
    run(checkout, "runners/run.py", "--runners", "8", "32", "--no-crewai", "--out", results)
    rows = json.loads((results / "runners.json").read_text())["rows"]
    names = {"cpu_ms_per_rollout": "CPU-ms a rollout", "ready_s": "s until ready"}
    return {
        f"{title}, {row['what']}, {row['runners']}": row[key]
        for row in rows
        for key, title in names.items()
    }


BENCHMARKS: dict[str, Callable[[Path, Path], Figures]] = {
    one.__name__: one for one in (gateway, trainer, sampler, end_to_end, runners)
}


def run(checkout: Path, *command: Any) -> str:
    """Run a benchmark's script in a checkout on its own interpreter; return what it printed."""
    done = subprocess.run(
        [checkout / ".venv/bin/python", *map(str, command)],
        cwd=checkout / "benchmarks",
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{checkout}: {command[0]} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def measure(name: str, checkout: Path) -> Figures:
    with tempfile.TemporaryDirectory() as results, TreeMemory(os.getpid()) as memory:
        found = BENCHMARKS[name](checkout, Path(results))
    return found | {"peak PSS": memory.peak(besides={os.getpid()})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="checkout with a .venv")
    parser.add_argument("new", type=Path, help="checkout with a .venv")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--out", type=Path, help="write the table here")
    options = parser.parse_args()
    heads = [options.old.resolve(), options.new.resolve()]
    now = time.strftime("%Y-%m-%d %H:%M")
    lines = [
        f"{now}, {options.pairs} pairs, load average before {os.getloadavg()[0]:.1f}. "
        "New / old: median (lowest to highest).",
        "",
        "| benchmark | figure | old | new | ratio |",
        "|---|---|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.only:
        pairs: list[list[Figures]] = []
        for turn in range(options.pairs):
            order = heads if turn % 2 == 0 else heads[::-1]
            found = {head: measure(name, head) for head in order}
            pairs.append([found[head] for head in heads])
        for figure in pairs[0][0]:
            old, new = ([pair[side][figure] for pair in pairs] for side in (0, 1))
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            line = (
                f"| {name} | {figure} | {statistics.median(old):.3g} | "
                f"{statistics.median(new):.3g} | {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f}) |"
            )
            print(line, flush=True)
            lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
