"""Forward and backward of a GRPO step: agentrl beside TRL + peft, on the same rows and weights.

    python benchmarks/trainer/run.py --trl-python /tmp/trlvenv/bin/python [--case NAME ...]

Every measurement is a process of its own, one after the other; TRL runs with each of ``--rows`` as
its micro-batch size and its best counts. Writes ``results/trainer.md`` and ``.json`` after each
case, so that one that fails or is interrupted costs only itself. The whole step, with rollouts, is
measured by ``benchmarks/end_to_end``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.trainer.cases import CASES, MODEL, Row, vocabulary  # noqa: E402

TARGETS = {"4x8, 64+64": 1.3, "8x8, 512+32": 4.0, "agent, a row per call": 8.0}
"""TRL's tokens/s, times this. An agent's calls are rows unless something merges them."""

SAME = 1e-4
"""Largest difference of the mean log-probs that passes for the same model on the same tokens."""


def save_model(case: str, folder: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary(case), **MODEL)).save_pretrained(folder)


def measured(python: str, arguments: list[str], threads: int) -> dict[str, Any]:
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [python, *arguments, "--threads", str(threads)],
        env={**os.environ, **pinned, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, Path(folder))
        shared = ["--case", case, "--model", folder, "--repeats", str(options.repeats)]
        ours = measured(sys.executable, [str(HERE / "agentrl_side.py"), *shared], options.threads)
        theirs = [
            measured(
                options.trl_python,
                [str(HERE / "trl_side.py"), *shared, "--rows", str(rows)],
                options.threads,
            )
            | {"rows": rows}
            for rows in options.rows
        ]
    for one in theirs:
        difference = abs(one["mean_logprob"] - ours["mean_logprob"])
        assert difference < SAME, f"{case}: log-probs differ by {difference}: not the same work"
        assert one["trained_tokens"] == ours["trained_tokens"], case
    return {"agentrl": ours, "trl": theirs}


def unique_and_total(rows: list[Row]) -> tuple[int, int]:
    """Tokens of one trie of the rows, and of the rows: the bound of what sharing can gain."""
    total = unique = 0
    before: list[int] = []
    for row in sorted([*row.prompt, *row.completion] for row in rows):
        shared = next((i for i, (a, b) in enumerate(zip(before, row)) if a != b), len(before))  # noqa: B905
        total, unique, before = total + len(row), unique + len(row) - shared, row
    return unique, total


HEADS = [
    "case", "tokens, unique / all", "agentrl CPU s", "TRL CPU s (its micro-batch)", "CPU ratio",
    "trained tokens/s, agentrl / TRL", "ratio", "peak MB over the loaded model, agentrl / TRL",
]  # fmt: skip


def line(case: str, result: dict[str, Any]) -> list[str]:
    unique, total = unique_and_total(CASES[case]())
    if "failed" in result:
        return [case, f"{unique:,} / {total:,}", result["failed"], *[""] * (len(HEADS) - 3)]
    ours = result["agentrl"]
    best = min(result["trl"], key=lambda one: one["cpu_seconds"])
    quickest = min(result["trl"], key=lambda one: one["seconds"])
    rate, their_rate = (one["trained_tokens"] / one["seconds"] for one in (ours, quickest))
    leanest = min(one["megabytes_on_top_of_the_model"] for one in result["trl"])
    return [
        case,
        f"{unique:,} / {total:,}",
        f"{ours['cpu_seconds']:.2f}",
        f"{best['cpu_seconds']:.2f} ({best['rows']} rows)",
        f"{best['cpu_seconds'] / ours['cpu_seconds']:.1f}",
        f"{rate:.0f} / {their_rate:.0f}",
        f"**{rate / their_rate:.1f}**",
        f"{ours['megabytes_on_top_of_the_model']:.0f} / {leanest:.0f}",
    ]


def goals(results: dict[str, Any]) -> list[list[str]]:
    lines: list[list[str]] = []
    for case, factor in TARGETS.items():
        goal = f"{case}: times TRL's tokens/s"
        if case not in results:
            lines.append([goal, f"≥ {factor}", "not run", ""])
            continue
        result = results[case]
        if "failed" in result:
            lines.append([goal, f"≥ {factor}", result["failed"], "**no**"])
            continue
        ratio = min(one["seconds"] for one in result["trl"]) / result["agentrl"]["seconds"]
        met = "yes" if ratio >= factor else "**no**"
        lines.append([goal, f"≥ {factor}", f"{ratio:.1f}", met])
    return lines


def markdown(results: dict[str, Any], about: dict[str, Any]) -> str:
    def written(heads: list[str], lines: list[list[str]]) -> list[str]:
        ruler = "|".join("---" if i == 0 else "--:" for i in range(len(heads)))
        return [f"| {' | '.join(heads)} |", f"|{ruler}|", *(f"| {' | '.join(x)} |" for x in lines)]

    return "\n".join(
        [
            f"{about['date']}, {about['machine']}, {about['threads']} thread(s), best of "
            f"{about['repeats']}, load average before the run {about['load']}.",
            "",
            *written(HEADS, [line(case, result) for case, result in results.items()]),
            "",
            *written(["goal", "target", "measured", "met"], goals(results)),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", nargs="*", type=int, default=[8], help="TRL's micro-batches")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    about = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "load": f"{os.getloadavg()[0]:.1f}",
        "threads": options.threads,
        "repeats": options.repeats,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for case in options.case:
        try:
            results[case] = compare(case, options)
        except (subprocess.CalledProcessError, AssertionError) as error:
            results[case] = {"failed": f"failed: {error}"}
        print(" | ".join(line(case, results[case])), flush=True)
        record = {"about": about, "cases": results}
        (options.results / "trainer.json").write_text(json.dumps(record, indent=2) + "\n")
        (options.results / "trainer.md").write_text(markdown(results, about))
    print(markdown(results, about))
    if any("failed" in result for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
