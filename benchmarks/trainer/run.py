"""Forward and backward of a GRPO step: agentrl beside TRL + peft, on the same rows and weights.

    python benchmarks/trainer/run.py --trl-python /tmp/trlvenv/bin/python [--case NAME ...]

Every measurement is a process of its own, one after the other; TRL runs with each of ``--rows`` as
its micro-batch size and its best counts. Writes ``results/latest.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.trainer.cases import CASES, MODEL, vocabulary  # noqa: E402

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


def table(results: dict[str, Any]) -> str:
    lines = [
        "| case | agentrl CPU s | TRL CPU s (rows) | CPU ratio | wall ratio | trained tokens/s, "
        "agentrl / TRL | peak MB over the model, agentrl / TRL |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case, result in results.items():
        ours = result["agentrl"]
        best = min(result["trl"], key=lambda one: one["cpu_seconds"])
        quickest = min(result["trl"], key=lambda one: one["seconds"])
        rate, their_rate = (one["trained_tokens"] / one["seconds"] for one in (ours, quickest))
        memory = [one["megabytes_on_top_of_the_model"] for one in (ours, best)]
        lines.append(
            f"| {case} | {ours['cpu_seconds']:.2f} | {best['cpu_seconds']:.2f} ({best['rows']}) "
            f"| **{best['cpu_seconds'] / ours['cpu_seconds']:.1f}** "
            f"| {quickest['seconds'] / ours['seconds']:.1f} | {rate:.0f} / {their_rate:.0f} "
            f"| {memory[0]:.0f} / {memory[1]:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rows", nargs="*", type=int, default=[8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for case in options.case:
        results[case] = compare(case, options)
        print(table({case: results[case]}).splitlines()[-1], flush=True)
    (HERE / "results" / "latest.json").write_text(json.dumps(results, indent=2))
    print(table(results))


if __name__ == "__main__":
    main()
