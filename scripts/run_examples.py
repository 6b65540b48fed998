"""Runs each example as its README says, one after another, and prints what it took and learned.

    python scripts/run_examples.py [NAME ...]     # or: make examples

Those that train a real model take an hour each; they run only when they are named.

Wall time, CPU time (of the command and all it started) and held-out success before and after, from
the run's own summary. Run folders stay in runs/examples/. Ends with 1 if an example failed. The
machine should do nothing else: times of a busy one mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "examples"
PYTHON = sys.executable


@dataclass(frozen=True)
class Example:
    """``config``: below examples/; ``before``: what the train command is given to.

    ``long``: takes an hour, so it runs only when it is named; ``warm_start``: a script below
    examples/, whose adapter is merged into the base first.
    """

    name: str
    config: str
    before: tuple[str, ...] = ()
    npm: bool = False
    long: bool = False
    warm_start: str = ""

    def command(self) -> list[str]:
        train = [PYTHON, "-m", "agentrl", "train", "--config", f"examples/{self.config}"]
        if self.warm_start:
            train += ["--model", str(self.base)]
        return [*self.before, *train, "--runs", str(RUNS), "--name", self.name]

    @property
    def base(self) -> Path:
        return RUNS / f"{self.name}-base"

    def prepare(self) -> bool:
        """Make the base of a warm start; returns whether that went well."""
        warm = RUNS / f"{self.name}-warm"
        for folder in (warm, self.base):
            shutil.rmtree(folder, ignore_errors=True)
        tune = [PYTHON, f"examples/{self.warm_start}", "--folder", str(warm)]
        merge = ["--merged", "--model", "smollm2-135m"]
        export = [PYTHON, "-m", "agentrl", "export", f"{warm}/adapter", str(self.base), *merge]
        return all(subprocess.run(one, cwd=ROOT).returncode == 0 for one in (tune, export))


ANSWERER = (PYTHON, "examples/twenty_questions/answerer.py", "--")
EXAMPLES = [
    Example("hello", "hello/train.toml"),
    Example("two_agents", "two_agents/train.toml"),
    Example("langgraph_tools", "langgraph_tools/train.toml"),
    Example("openai_agents", "openai_agents/train.toml"),
    Example("node_agent", "node_agent/train.toml", npm=True),
    Example("twenty_questions", "twenty_questions/simple.toml", before=ANSWERER),
    Example("extraction", "extraction/train.toml", long=True),
    Example("catalog", "catalog/train.toml", long=True),
    Example(
        "react_tools",
        "react_tools/train.toml",
        long=True,
        warm_start="react_tools/warm_start.py",
    ),
    Example(
        "twenty_questions_real",
        "twenty_questions/real_simple.toml",
        before=ANSWERER,
        long=True,
        warm_start="twenty_questions/warm_start.py",
    ),
]


def run(example: Example) -> dict[str, str]:
    """One row of the table."""
    shutil.rmtree(RUNS / example.name, ignore_errors=True)
    if example.npm:
        if not shutil.which("npm"):
            return {"example": example.name, "problem": "there is no npm here"}
        folder = ROOT / "examples" / "node_agent"
        if subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder).returncode:
            return {"example": example.name, "problem": "npm ci failed"}
    if example.warm_start and not example.prepare():
        return {"example": example.name, "problem": "the warm start failed"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    # No OMP_NUM_THREADS and the like: as a newcomer would run it.
    done = subprocess.run(example.command(), cwd=ROOT, check=False)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return {"example": example.name, "problem": f"ended with {done.returncode}"}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads((RUNS / example.name / "summary.json").read_text())
    held_out, sums = summary["held_out"], summary["calls"]
    row = {
        "example": example.name,
        "steps": str(summary["steps"]),
        "wall s": f"{wall:.0f}",
        "CPU s": f"{cpu:.0f}",
        "held-out before": f"{held_out[0][1]:.0%}" if held_out else "",
        "held-out after": f"{held_out[-1][1]:.0%}" if held_out else "",
        "calls": f"{sums['recorded']} = {sums['trained']} trained + "
        f"{sum(sums['skipped'].values())} skipped",
    }
    if not held_out:
        row["problem"] = "nothing held out was tried"
    if not sums["adds_up"]:
        row["problem"] = "calls do not add up"
    return row


def table(rows: list[dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(column, "") for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    names = parser.parse_args().names
    known = [example.name for example in EXAMPLES]
    if unknown := set(names) - set(known):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print(f"{os.cpu_count()} cores, load average before: {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[dict[str, str]] = []
    for example in EXAMPLES:
        if example.name in names or not (names or example.long):
            print(f"\n=== {example.name}: {' '.join(example.command())}", flush=True)
            rows.append(run(example))
    print(f"\n{table(rows)}")
    sys.exit(any("problem" in row for row in rows))


if __name__ == "__main__":
    main()
