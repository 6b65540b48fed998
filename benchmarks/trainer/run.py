"""Forward and backward of a GRPO step: agentrl beside TRL + peft, on the same rows and weights.

    python benchmarks/trainer/run.py --trl-python /tmp/trlvenv/bin/python --case "8x8, 64+64"

TRL's micro-batch is the quickest of ``--rows`` on a part of the case. Then both sides take turns;
every pass is a process of its own, which warms up on a part of the work, and the quickest counts.
Cases are merged into ``results/trainer.json`` and ``.md`` as soon as a pass has ended, so a long
measurement may be made in stretches: ``--passes 0`` (only the micro-batch), then ``--add`` for each
further pass. Memory of a whole step is measured by ``memory.py``, the whole run by
``benchmarks/end_to_end``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reporting import machine, read_json, table, write_json  # noqa: E402
from benchmarks.trainer.cases import CASES, VOCABULARY, Case  # noqa: E402

SAME = 1e-4
"""Largest difference of a log-prob that passes for the same model on the same tokens."""
HEADS = [
    "case", "tokens computed, TRL / agentrl / unique", "limit by sharing",
    "trained tokens/s, agentrl / TRL (its rows)", "ratio", "goal", "CPU s, agentrl / TRL",
    "GFLOP/s, agentrl / a product", "peak MB over the model, agentrl / TRL", "log-probs differ by",
]  # fmt: skip


def model_folder(name: str, case: Case, scratch: Path) -> str:
    """Return the folder of the model; with a larger vocabulary than its own, one in ``scratch``."""
    from agentrl_trainer.models.sources import resolve_model

    source = resolve_model(name)
    if case.vocabulary == VOCABULARY:
        return source
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.resize_token_embeddings(case.vocabulary, mean_resizing=False)
    model.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(source).save_pretrained(scratch)
    return str(scratch)


def one_pass(python: str, script: str, arguments: list[str], threads: int) -> dict[str, Any]:
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        subprocess.run(
            [python, str(HERE / script), *arguments, "--threads", str(threads), "--out", str(out)],
            env={**os.environ, **pinned, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(out.read_text())


def measure(name: str, record: dict[str, Any], options: argparse.Namespace) -> None:
    """Add to the record of a case what is missing: TRL's micro-batch, and passes of both sides."""
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(options.model, CASES[name], Path(scratch))
        shared = ["--case", name, "--model", model]

        def trl(*more: Any) -> dict[str, Any]:
            arguments = [*shared, *map(str, more)]
            return one_pass(options.trl_python, "trl_side.py", arguments, options.threads)

        if not record["trl_seconds_by_rows"]:
            for rows in options.rows:
                try:
                    part = trl("--rows", rows, "--part", max(options.rows))
                except subprocess.CalledProcessError as error:
                    if error.returncode != -signal.SIGKILL:
                        raise
                    print(f"{name}: TRL by {rows} rows was killed: too little memory", flush=True)
                    break
                record["trl_seconds_by_rows"][rows] = part["seconds"]
                print(f"{name}: TRL by {rows} rows, {part['seconds']:.1f} s a part", flush=True)
        best = min(record["trl_seconds_by_rows"], key=record["trl_seconds_by_rows"].__getitem__)
        for _ in range(options.passes):
            ours = one_pass(sys.executable, "agentrl_side.py", shared, options.threads)
            theirs = trl("--rows", best)
            pairs = zip(ours.pop("logprobs"), theirs.pop("logprobs"), strict=True)
            record["difference"] = max(record["difference"], *(abs(a - b) for a, b in pairs))
            record["agentrl"].append(ours)
            record["trl"].append(theirs)
            print(f"{name}: agentrl {ours['seconds']:.1f} s, TRL {theirs['seconds']:.1f} s")


def line(name: str, record: dict[str, Any]) -> list[str]:
    if not record["trl"]:
        return [name, "not run", *[""] * (len(HEADS) - 2)]
    ours, theirs = (
        min(record[side], key=lambda one: one["seconds"]) for side in ("agentrl", "trl")
    )
    rate, their_rate = (one["trained_tokens"] / one["seconds"] for one in (ours, theirs))
    goal = CASES[name].goal
    met = (
        "" if goal is None else f"≥ {goal}, {'met' if rate / their_rate >= goal else '**not met**'}"
    )
    most, unique = theirs["computed_tokens"], ours["unique_tokens"]
    differ = f"{record['difference']:.1e}"
    return [
        name,
        f"{most:,} / {ours['computed_tokens']:,} / {unique:,}",
        f"{most / unique:.1f}",
        f"{rate:,.0f} / {their_rate:,.0f} ({theirs['rows']})",
        f"**{rate / their_rate:.2f}**",
        "" if goal is None else f"≥ {goal}, {met}",
        f"{ours['cpu_seconds']:.1f} / {theirs['cpu_seconds']:.1f}",
        f"{ours['gflops']:.0f} / {ours['product_gflops']:.0f}",
        " / ".join(f"{x['megabytes_on_top_of_the_model']:,.0f}" for x in (ours, theirs)),
        differ if record["difference"] <= SAME else f"**{differ}**",
    ]


def markdown(cases: dict[str, Any]) -> str:
    about = [
        f"- {name}: {record['about']}; {len(record['trl'])} pass(es) of each side. TRL's seconds "
        "for a part, by rows of a micro-batch: "
        + ", ".join(f"{rows}: {s:.1f}" for rows, s in record["trl_seconds_by_rows"].items())
        for name, record in cases.items()
    ]
    shown = [line(name, record) for name, record in cases.items()]
    return "\n".join([*table(HEADS, shown), "", *about, ""])


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES][:-1])
    parser.add_argument("--model", default="smollm2-135m", help="or a folder with its vocabulary")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="to the passes that are recorded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    cases = read_json(options.results / "trainer.json")
    failed = False
    for name in options.case:
        if not options.add or name not in cases:
            empty = {"trl_seconds_by_rows": {}, "agentrl": [], "trl": [], "difference": 0.0}
            cases[name] = {"about": f"{options.model}, {machine(options.threads)}", **empty}
        try:
            measure(name, cases[name], options)
        except subprocess.CalledProcessError as error:
            failed = True
            print(f"{name}: failed: {error}", file=sys.stderr)
        write_json(options.results / "trainer.json", cases)
        (options.results / "trainer.md").write_text(markdown(cases))
    print(markdown(cases))
    sys.exit(failed)


if __name__ == "__main__":
    main()
