"""Peak memory of one whole step: ``agentrl train`` beside TRL's GRPOTrainer, on the real model.

    python benchmarks/trainer/memory.py --only agentrl
    python benchmarks/trainer/memory.py --only agentrl --settings sampler.kv_tokens=3000
    python benchmarks/trainer/memory.py --only trl --trl-python PYTHON --rows 1 --generate 8

8 prompts of 512 tokens with 8 answers of 128 each; an answer's end of text is forbidden on both
sides. Proportional memory (PSS) of every process below the command is sampled twice a second. Each
call adds its rows to ``results/memory.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.process_memory import TreeMemory  # noqa: E402
from benchmarks.reporting import machine, read_json, table, write_json  # noqa: E402
from benchmarks.trainer.cases import RANK  # noqa: E402

from agentrl_tracer.store import Store  # noqa: E402
from agentrl_trainer.models.sources import resolve_model  # noqa: E402

GOAL = 0.7
OURS = "agentrl, trainer and gateway"
TRL_DEFAULT = "TRL, 1 rows a micro-batch, 64 rows generated at once"
"""Generation as it is by default, and the smallest micro-batch."""


def write_tasks(path: Path, options: argparse.Namespace) -> None:
    """Write prompts that are exactly ``--prompt`` tokens under the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(options.model))
    ends = tokenizer.all_special_ids

    def tokens(text: str) -> int:
        turn = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"])

    lines: list[str] = []
    for number in range(options.tasks):
        text = f"Story {number}:"
        text += " river" * (options.prompt - tokens(text))
        assert tokens(text) == options.prompt, tokens(text)
        lines.append(json.dumps({"prompt": text, "answer": options.answer, "ends": ends}))
    path.write_text("\n".join(lines) + "\n")


def watched(command: list[str], threads: int) -> tuple[TreeMemory, str, int, float]:
    """Run a command; return its memory, output, process id and seconds."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, TreeMemory(os.getpid()) as memory:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, text=True)
        code = child.wait()
        out.seek(0)
        said = out.read()
    if code:
        sys.exit(f"{command[:4]} ended with {code}:\n{said[-3000:]}")
    return memory, said, child.pid, time.perf_counter() - started


def agentrl(tasks: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "agentrl", "train", f"{HERE / 'memory_agent.py'}:agent",
        "--tasks", str(tasks), "--model", options.model, "--steps", "1",
        "--batch-size", str(options.tasks), "--group-size", str(options.group),
        "--rank", str(RANK), "--max-tokens", str(options.answer),
        "--runs", str(folder), "--name", "run",
    ]  # fmt: skip
    for setting in options.settings:
        name, _, value = setting.replace("_", "-").partition("=")
        command += [f"--{name}", value]
    memory, _, trainer, seconds = watched(command, options.threads)
    run = folder / "run"
    with sqlite3.connect(run / "store.db") as store:
        (gateway,) = (pid for (pid,) in store.execute("select pid from gateways"))
    store = Store(str(run / "store.db"))
    lengths = {call.tokens for call in store.calls(bodies=False)}
    store.close()
    assert lengths == {(options.prompt, options.answer)}, lengths
    both = {trainer, gateway}
    if options.settings:
        name = f"{OURS}, {', '.join(options.settings)}"
        return {name: memory.peak(both), "seconds": seconds}
    return {
        OURS: memory.peak(both),
        "the trainer alone": memory.peak({trainer}),
        "the gateway alone": memory.peak({gateway}),
        "its runners, agents and the store's process": memory.peak(besides=both | {os.getpid()}),
        "all of agentrl's processes": memory.peak(besides={os.getpid()}),
    } | {"seconds": seconds}


def trl(tasks: Path, options: argparse.Namespace) -> dict[str, Any]:
    name = f"TRL, {options.rows} rows a micro-batch, {options.generate} rows generated at once"
    command = [
        options.trl_python, str(HERE / "trl_step.py"), "--model", resolve_model(options.model),
        "--tasks", str(tasks), "--group", str(options.group), "--rows", str(options.rows),
        "--generate", str(options.generate), "--threads", str(options.threads),
    ]  # fmt: skip
    memory, said, _, seconds = watched(command, options.threads)
    seen = json.loads(said.splitlines()[-1])
    rows = options.tasks * options.group
    expected = {"rows": rows, "lengths": [[options.prompt, options.answer]]}
    assert seen == expected, seen
    return {name: memory.peak(besides={os.getpid()}), "seconds": seconds}


def markdown(record: dict[str, Any]) -> str:
    peaks = record["peaks"]
    lines = [[name, f"{mb:,.0f}", record["measured"][name]] for name, mb in peaks.items()]
    heads = ["processes", "peak PSS, MB", "measured"]
    found = [record["about"], "", *table(heads, lines), ""]
    ours, theirs = ([mb for x, mb in peaks.items() if x.startswith(y)] for y in (OURS, "TRL"))
    by_default = peaks.get(OURS), peaks.get(TRL_DEFAULT)
    for what, own, trl in (
        ("least", min(ours, default=0), min(theirs, default=0)), ("by default", *by_default),
    ):  # fmt: skip
        if own and trl:
            met = "met" if own / trl <= GOAL else "**not met**"
            found += [f"{OURS}, of TRL's, {what}: **{own / trl:.2f}**; goal ≤ {GOAL}: {met}", ""]
    return "\n".join(found)


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--only", choices=["agentrl", "trl"])
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="of TRL's micro-batch")
    parser.add_argument("--generate", type=int, default=64, help="rows that TRL generates at once")
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE", help="agentrl's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    step = f"{options.tasks}x{options.group}, {options.prompt}+{options.answer}"
    record = read_json(options.results / "memory.json")
    if record.get("step") != step:
        record = {"step": step, "peaks": {}, "seconds": {}, "measured": {}}
    record["about"] = f"{options.model}, {step}"
    measured = machine(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tasks = folder / "tasks.jsonl"
        write_tasks(tasks, options)
        sides = [options.only] if options.only else ["agentrl", "trl"]
        for side in sides:
            found = agentrl(tasks, folder, options) if side == "agentrl" else trl(tasks, options)
            seconds = found.pop("seconds")
            record["seconds"][next(iter(found))] = seconds
            record["peaks"] |= found
            record["measured"] |= dict.fromkeys(found, measured)
            write_json(options.results / "memory.json", record)
            (options.results / "memory.md").write_text(markdown(record))
    print(markdown(record))


if __name__ == "__main__":
    main()
