"""What a decode step of the embedded sampler costs beside what the cores can do, and how far its
log-probs are from a plain forward's. A part of ``run.py``; prints one line of JSON."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any, get_args

import torch
from benchmarks.roof import product_gflops, read_gigabytes
from benchmarks.sampler.agentrl_side import POLICY, sample
from benchmarks.sampler.workload import VOCABULARY, Workload, side_options, workload
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl_trainer.inference import (
    Finished,
    SampleParams,
    SamplerEngine,
    SampleRequest,
    Token,
)
from agentrl_trainer.models.devices import on_own_thread
from agentrl_trainer.models.loading import BaseModel, load_base
from agentrl_trainer.names import SamplerWeights

BATCHES = (1, 8, 32, 64)
CONTEXT = 256
ANSWER = 48
COMPARED = 8
"""Requests whose log-probs are compared."""


def started(base: BaseModel, folder: Path, weights: SamplerWeights) -> SamplerEngine:
    engine = SamplerEngine(base, weights=weights)
    engine.start()
    engine.load_adapter(POLICY, 1, folder / "adapter").result()
    return engine


def decode_step(engine: SamplerEngine, batch: int) -> float:
    """Seconds of a step that decodes so many rows: between the last row's first token and the first
    row's last one."""
    draw = random.Random(batch)
    times: list[list[float]] = [[] for _ in range(batch)]
    done = threading.Semaphore(0)
    for own in times:
        prompt = [draw.randrange(VOCABULARY) for _ in range(CONTEXT)]

        def event(one: Token | Finished, own: list[float] = own) -> None:
            if isinstance(one, Finished):
                done.release()
            else:
                own.append(time.perf_counter())

        engine.submit(SampleRequest(prompt, SampleParams(ANSWER, seed=0), POLICY, event))
    for _ in times:
        done.acquire()
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    return (end - begin) / sum(begin < at <= end for at in times[-1])


def roof(
    config: Any, weights: int, batch: int, gigabytes: float, gflops: float
) -> dict[str, float]:
    """What a step must read and compute: all weights once, each row's keys and values."""
    seen = CONTEXT + ANSWER / 2
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * seen
    scores = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seen
    read = 4 * (weights + batch * cached)
    flops = batch * (2 * weights + scores)
    return {
        "megabytes": 1e-6 * read,
        "gflop": 1e-9 * flops,
        "memory_ms": 1e-6 * read / gigabytes,
        "arithmetic_ms": 1e-6 * flops / gflops,
    }


@torch.inference_mode()
def differences(folder: Path, asked: Workload, answers: list[list[Token]]) -> dict[str, float]:
    """Largest and mean difference of log-probs from the same model's in float64."""
    exact = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    exact = PeftModel.from_pretrained(exact, folder / "adapter").double().eval()
    apart: list[torch.Tensor] = []
    for prompt, tokens in zip(asked.prompts, answers, strict=True):
        answer = [t.token_id for t in tokens]
        logits = exact(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        apart.append((expected - torch.tensor([t.logprob for t in tokens])).abs())
    every = torch.cat(apart)
    return {"largest": float(every.max()), "mean": float(every.mean())}


def main() -> None:
    options = side_options(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    begun = time.perf_counter()
    # On a thread that ends: OpenMP lets those of the sampler sleep while others are kept.
    gflops, gigabytes = on_own_thread(product_gflops), on_own_thread(read_gigabytes)
    found: dict[str, Any] = {
        "product_gflops": gflops, "read_gigabytes": gigabytes, "context": CONTEXT,
        "compared": COMPARED,
    }  # fmt: skip
    asked = workload(COMPARED, seed=1)
    found["roofs"], found["weights"] = {}, {}
    for weights in get_args(SamplerWeights):
        source = str(options.folder / "base")
        base = on_own_thread(load_base, source, device="cpu", dtype="float32")
        if weights == "model":
            # The head is the embedding, until the engine copies it.
            count = sum(p.numel() for p in base.model.parameters())
            config = base.model.config
            found["roofs"] = {b: roof(config, count, b, gigabytes, gflops) for b in BATCHES}
        engine = started(base, options.folder, weights)
        ms = {batch: 1e3 * decode_step(engine, batch) for batch in BATCHES}
        answers = sample(engine, asked)
        engine.stop()
        apart = on_own_thread(differences, options.folder, asked, answers)
        found["weights"][weights] = {"ms": ms, "difference": apart}
    print(json.dumps({"seconds": time.perf_counter() - begun} | found))


if __name__ == "__main__":
    main()
