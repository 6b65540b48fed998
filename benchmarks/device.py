"""Measure agentrl on this machine's device, and print a report in Markdown to paste into an issue.

    python benchmarks/device.py                              # smollm2-135m on what ``auto`` finds
    python benchmarks/device.py --model Qwen/Qwen3-0.6B --out report.md
    python benchmarks/device.py --model agentrl-tiny --quick # does everything run at all?

Each part is a process of its own, so one that fails or is killed is named in the report and costs
only itself. Progress goes to stderr. Where a device is new to agentrl, run this first.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.inference import Finished, SampleParams, SamplerEngine, SampleRequest, Token
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.devices import choose_device, free_memory
from agentrl_trainer.models.loading import BaseModel, load_base
from agentrl_trainer.models.lora import save_adapter
from agentrl_trainer.models.moe import expert_count
from agentrl_trainer.models.saved_lora import WEIGHTS_FILE

HELLO = Path(__file__).parents[1] / "examples" / "hello"
PACKAGES = ("agentrl-middleware", "torch", "transformers", "peft")
RANK = 32
PROMPT = 128
ADAPTER = "policy"
FAILED = "**failed**"


@dataclass(frozen=True)
class Figure:
    measured: str
    value: str
    detail: str = ""


Figures = Iterator[Figure]
Asked = list[tuple[list[int], list[Token]]]


# ---- the parts; each runs in a process of its own


def device(options: argparse.Namespace) -> Figures:
    """What it is, and its roof: the products and copies that everything else is made of."""
    found = choose_device(options.device)
    free = f"{free_memory(found) / 2**30:.1f} GiB free, {torch.get_num_threads()} threads"
    yield Figure("device", f"{found.type}: {device_name(found)}", free)
    size = 1024 if found.type == "cpu" else 4096
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size, device=found).to(dtype)
        seconds = quickest(lambda a=a: a @ a, found, times=5)
        rate = 2 * size**3 / seconds / 1e12
        yield Figure(f"product, {dtype}", f"{rate:.3g} TFLOP/s", f"{size} × {size}")
    large = torch.zeros(2**26 if found.type == "cpu" else 2**28, dtype=torch.uint8, device=found)
    seconds = quickest(large.clone, found, times=5)
    yield Figure("copy", f"{2 * large.nbytes / seconds / 1e9:.3g} GB/s", "bytes read and written")


def sampling(options: argparse.Namespace) -> Figures:
    """Tokens a second of the embedded sampler, with an adapter."""
    answer = 16 if options.quick else 128
    with tempfile.TemporaryDirectory() as folder, sampler(options, Path(folder)) as engine:
        how = f"{engine.strategy}, {engine.base.dtype}"
        room = f"room for {engine.stats().kv_budget:,} tokens"
        why = f"; not llama cpu: {engine.why_not_lean}" if engine.why_not_lean else ""
        yield Figure("sampler", how, room + why)
        sample(engine, 1, answer, seed=0)
        for requests in (1, 8, 64):
            before, started = engine.stats().decode_steps, time.perf_counter()
            sample(engine, requests, answer, seed=requests)
            seconds = time.perf_counter() - started
            step = 1e3 * seconds / (engine.stats().decode_steps - before)
            rate = f"{requests * answer / seconds:,.0f} tokens/s"
            detail = f"{PROMPT} + {answer} tokens each; {step:.1f} ms a step, prompts included"
            yield Figure(f"sampling, {requests} at once", rate, detail)
        yield peak_memory("sampling", engine.base.device)


def update(options: argparse.Namespace) -> Figures:
    """Forward and backward of a step, and the optimizer."""
    base = load(options)
    per_token, per_trained = useful_flops(base)
    learner = Learner(base, rank=RANK)
    by = "blocks" if learner._logprobs.why_no_flex else "flex_attention"
    how = learner.why_not_shared or f"prefixes are shared, by {by}"
    yield Figure("learner", f"{base.dtype}", f"{how}; micro-batch {learner.token_budget} tokens")
    shapes = [(2, 4, 64, 32)] if options.quick else [(8, 8, 64, 64), (8, 8, 512, 128)]
    for shape in shapes:
        rows, (groups, size, prompt, answer) = random_rows(base, shape), shape
        work = partial(learner.forward_backward, rows)
        seconds = quickest(work, base.device, times=1 if options.quick else 3)
        trained, unique = groups * size * answer, count_tokens(rows).unique
        rate = (unique * per_token + trained * per_trained) / seconds / 1e12
        detail = f"{seconds:.2f} s, {unique / seconds:,.0f} unique tokens/s"
        if not expert_count(base.model.config):
            detail += f", {rate:.3g} TFLOP/s without attention"
        what = f"update, {groups} × {size} rows of {prompt} + {answer}"
        yield Figure(what, f"{trained / seconds:,.0f} trained tokens/s", detail)
    started = time.perf_counter()
    learner.optim_step()
    wait(base.device)
    yield Figure("optimizer step", f"{1e3 * (time.perf_counter() - started):.0f} ms")
    yield peak_memory("update", base.device)


def publish(options: argparse.Namespace) -> Figures:
    """From the learner's weights to the sampler answering with them; then both on one answer."""
    learner = Learner(load(options), rank=RANK)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in learner.model.named_parameters():
        if "lora_B" in name:  # zero at the start, where every adapter is the base model
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
    times: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, sampler(options, Path(folder), learner) as engine:
        for turn in (2, 3, 4):
            path, started = Path(folder) / f"version-{turn}", time.perf_counter()
            save_adapter(learner.model, "default", path)
            saved = time.perf_counter()
            engine.load_adapter(ADAPTER, turn, path).result()
            wait(engine.base.device)
            times.append((saved - started, time.perf_counter() - saved))
        size = (Path(folder) / "version-4" / WEIGHTS_FILE).stat().st_size / 2**20
        write, swap = (f"{1e3 * seconds:.0f} ms" for seconds in min(times, key=sum))
        detail = f"write {write}, swap {swap}; rank {RANK}, {size:.0f} MiB, best of 3"
        yield Figure("publish", f"{1e3 * sum(min(times, key=sum)):.0f} ms", detail)
        asked = sample(engine, 8, 32, seed=1)
    rows: list[TrainingRow] = []
    for prompt, answer in asked:
        tokens = prompt + [x.token_id for x in answer]
        mask = [at >= len(prompt) for at in range(len(tokens))]
        logprobs = [0.0] * len(prompt) + [x.logprob for x in answer]
        rows.append(TrainingRow(tokens, mask, logprobs, [1.0] * len(tokens)))
    seen = learner.forward_backward(rows, backward=False)
    worst, mean = seen.max_logprob_difference, seen.mean_logprob_difference
    detail = f"{mean:.1e} on average; log-probs of {seen.tokens} tokens, {learner.base.dtype}"
    yield Figure("sampler against trainer", f"{worst:.1e} at most", detail)


def train(options: argparse.Namespace) -> Figures:
    """A real agent over HTTP: ``agentrl train`` on examples/hello."""
    steps = 1 if options.quick else 3
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "agentrl", "train", f"{HELLO / 'agent.py'}:agent",
            "--tasks", str(HELLO / "train.jsonl"), "--steps", str(steps), "--max-tokens", "32",
            "--batch-size", "8", "--group-size", "8", "--runners", "16",
            "--model", options.model, "--model.device", options.device,
            "--model.dtype", options.dtype, "--runs", folder, "--name", "run",
        ]  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            said = (done.stdout + done.stderr).strip()[-400:]
            raise RuntimeError(f"exit code {done.returncode}: {said}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        written = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in summary["seconds"].items())
    yield Figure(f"agentrl train, {steps} × 8 × 8 rollouts", f"{seconds:.1f} s", spent)
    last = [line for line in map(json.loads, written) if "tokens_per_second" in line][-1]
    apart = last["sampler_trainer/max_logprob_difference"] or 0.0
    rate = f"{last['tokens_per_second']:,.0f} tokens/s sampled"
    yield Figure("its last step", rate, f"sampler against trainer {apart:.1e} at most")
    calls = summary["calls"]
    added = "add up" if calls.pop("adds_up") else "**do not add up**"
    yield Figure("its calls", added, str(calls))


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    part.__name__: part for part in (device, sampling, update, publish, train)
}


# ---- what the parts share


def load(options: argparse.Namespace) -> BaseModel:
    return load_base(options.model, device=options.device, dtype=options.dtype)


@contextlib.contextmanager
def sampler(
    options: argparse.Namespace, folder: Path, learner: Learner | None = None
) -> Iterator[SamplerEngine]:
    """A sampler over a model of its own, as in the gateway, with the learner's adapter."""
    own = learner or Learner(load(options), rank=RANK)
    save_adapter(own.model, "default", folder / "first")
    del own
    gc.collect()  # PEFT's modules refer to each other
    engine = SamplerEngine(load(options))
    engine.start()
    try:
        engine.load_adapter(ADAPTER, 1, folder / "first").result()
        yield engine
    finally:
        engine.stop()


def sample(engine: SamplerEngine, requests: int, answer: int, seed: int) -> Asked:
    """Ask random prompts, all at once, for answers of exactly ``answer`` tokens; return both."""
    draw = random.Random(seed)
    asked: Asked = []
    ended: list[str] = []
    done = threading.Semaphore(0)

    def collect(event: Token | Finished, into: list[Token]) -> None:
        if isinstance(event, Finished):
            ended.append(event.error or event.reason)
            done.release()
        else:
            into.append(event)

    for number in range(requests):
        prompt, into = random_ids(draw, engine.base, PROMPT), list[Token]()
        asked.append((prompt, into))
        params = SampleParams(max_tokens=answer, seed=number)
        engine.submit(SampleRequest(prompt, params, ADAPTER, lambda e, into=into: collect(e, into)))
    for _ in asked:
        done.acquire()
    if other := {*ended} - {"length"}:
        raise RuntimeError(f"answers ended otherwise than by their length: {sorted(other)}")
    return asked


def random_ids(draw: random.Random, base: BaseModel, count: int) -> list[int]:
    return [draw.randrange(base.model.config.get_text_config().vocab_size) for _ in range(count)]


def random_rows(base: BaseModel, shape: tuple[int, int, int, int]) -> list[TrainingRow]:
    draw, rows = random.Random(0), list[TrainingRow]()
    groups, size, prompt, answer = shape
    mask = [False] * prompt + [True] * answer
    for _ in range(groups):
        shared = random_ids(draw, base, prompt)
        for _ in range(size):
            tokens = shared + random_ids(draw, base, answer)
            credit = [draw.gauss(0, 1)] * len(mask)
            rows.append(TrainingRow(tokens, mask, [-5.0] * len(mask), credit))
    return rows


def useful_flops(base: BaseModel) -> tuple[int, int]:
    """Flops of forward and backward: a unique token's in the layers, a trained token's in the head.

    4 a weight, because a frozen one gets no gradient. Attention and the adapter are left out.
    """
    embedding: Any = base.model.get_input_embeddings()
    head: Any = base.model.get_output_embeddings()
    outside = {id(x.weight): x.weight.numel() for x in (embedding, head)}  # one if they are tied
    layers = sum(p.numel() for p in base.model.parameters()) - sum(outside.values())
    return 4 * layers, 4 * head.weight.numel()


def quickest(work: Callable[[], object], on: torch.device, times: int) -> float:
    """Seconds of the quickest run, after one or two that compile and choose kernels."""
    for _ in range(1 if on.type == "cpu" else 2):
        work()
    wait(on)
    least = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        work()
        wait(on)
        least = min(least, time.perf_counter() - started)
    return least


def wait(on: torch.device) -> None:
    if on.type != "cpu":
        torch.get_device_module(on).synchronize()


def peak_memory(part: str, on: torch.device) -> Figure:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = most / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, else kB
    if on.type == "cuda":
        most = torch.cuda.max_memory_reserved(on) / 2**30
        return Figure(f"peak memory, {part}", f"{most:.1f} GiB", f"and {host:.1f} GiB on the host")
    note = "of the process"
    if on.type == "mps":  # torch keeps no peak there
        note += f"; Metal holds {torch.mps.driver_allocated_memory() / 2**30:.1f} GiB at the end"
    return Figure(f"peak memory, {part}", f"{host:.1f} GiB", note)


def device_name(found: torch.device) -> str:
    if found.type == "cuda":
        return torch.cuda.get_device_name(found)
    ask = ["sysctl", "-n", "machdep.cpu.brand_string"]
    if sys.platform == "linux":
        ask = ["sed", "-n", "s/^model name.*: //p;", "/proc/cpuinfo"]
    told = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.splitlines()
    return told[0] if told else platform.machine()


# ---- the report


def run_part(part: str, options: argparse.Namespace) -> list[Figure]:
    """Run a part; what it measured before a failure counts."""
    command = [sys.executable, __file__, "--part", part, *sys.argv[1:]]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    out, fault = "", None
    try:
        out, _ = child.communicate(timeout=options.timeout)
        if child.returncode < 0:
            fault = f"killed by {signal.Signals(-child.returncode).name}: out of memory?"
    except subprocess.TimeoutExpired:
        fault = f"not done after {options.timeout:.0f} s"
    finally:
        if child.poll() is None:  # not done, or Ctrl-C
            os.killpg(child.pid, signal.SIGTERM)  # agentrl train then ends in order
            out, _ = child.communicate()
    figures = [Figure(**json.loads(x)) for x in out.splitlines() if x.startswith('{"measured"')]
    if child.returncode > 0 and not any(x.value == FAILED for x in figures):
        fault = f"exit code {child.returncode}"
    return figures + ([Figure(part, FAILED, fault)] if fault else [])


def measure_part(part: str, options: argparse.Namespace) -> None:
    """Print the figures of a part, a line of JSON each."""
    try:
        for figure in PARTS[part](options):
            print(json.dumps(asdict(figure)), flush=True)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        print(json.dumps(asdict(Figure(part, FAILED, why))), flush=True)
        sys.exit(1)


def report(figures: list[Figure], started: str, load: float, seconds: float) -> str:
    rows = [[x.measured, x.value, " ".join(x.detail.replace("|", "/").split())] for x in figures]
    used = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return "\n".join(
        [
            f"`python benchmarks/device.py {shlex.join(sys.argv[1:])}`", "",
            f"{started}, in {seconds:.0f} s. {platform.platform()}, {os.cpu_count()} cores, load "
            f"average before the run {load:.1f}. Python {platform.python_version()}, {used}.", "",
            "| measured | figure | detail |", "|---|--:|---|",
            *(f"| {' | '.join(row)} |" for row in rows), "",
        ]
    )  # fmt: skip


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--model", default="smollm2-135m", help="as for agentrl train")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, ...")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--quick", action="store_true", help="small sizes, one repeat")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each part")
    parser.add_argument("--out", type=Path, help="write the report here too")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return measure_part(options.part, options)
    started, load, begun = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0], time.perf_counter()
    figures: list[Figure] = []
    for number, part in enumerate(options.only, start=1):
        print(f"[{number}/{len(options.only)}] {part}", file=sys.stderr, flush=True)
        for figure in (found := run_part(part, options)):
            print(f"    {figure.measured}: {figure.value}", file=sys.stderr, flush=True)
        figures += found
    text = report(figures, started, load, time.perf_counter() - begun)
    print(text)
    if options.out:
        options.out.write_text(text)
    sys.exit(any(figure.value == FAILED for figure in figures))


if __name__ == "__main__":
    main()
