"""One side of ``gpu.py``, one case: a random model on the device; prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable

import torch
from cases import GPU_CASES, GPU_RANK, SHAPES
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


def random_model(shape: str, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    fields = {name: value for name, value in SHAPES[shape].items() if name != "vocab"}
    config = Qwen3Config(vocab_size=SHAPES[shape]["vocab"], initializer_range=0.02, **fields)
    config.dtype = torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def agentrl_step(options: argparse.Namespace) -> tuple[Callable[[], None], int, str]:
    from typing import Any, cast

    from agentrl_side import datum

    from agentrl_trainer.learner.learner import Learner
    from agentrl_trainer.models.loading import BaseModel

    device = torch.device(options.device)
    model = random_model(options.shape, options.device).eval().requires_grad_(False)
    base = BaseModel(
        model=model, tokenizer=cast(Any, None), name="random", device=device,
        dtype=torch.bfloat16, context_length=32768, eos_ids=frozenset(),
    )  # fmt: skip
    learner = Learner(base, rank=GPU_RANK, gradient_checkpointing=options.checkpointing)
    datums = [datum(row) for row in GPU_CASES[options.case](options.shape)]

    def step() -> None:
        learner.forward_backward(datums)
        learner.discard_gradients()

    why = learner.why_not_shared or learner._logprobs.why_no_flex
    return step, sum(one.trained for one in datums), why or "tries, flex_attention"


def trl_step(options: argparse.Namespace) -> tuple[Callable[[], None], int, str]:
    from trl_side import inputs, trainer_for

    model = random_model(options.shape, options.device)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_for(
            model, scratch, rank=GPU_RANK, use_cpu=not options.device.startswith("cuda"),
            gradient_checkpointing=options.checkpointing,
        )  # fmt: skip
    model = trainer.model.train()
    rows = sorted(GPU_CASES[options.case](options.shape), key=lambda row: len(row.prompt))
    trained = sum(sum(row.trained) for row in rows)
    batches = [
        {
            name: value.to(options.device)
            for name, value in inputs(rows[at : at + options.rows], trained).items()
        }
        for at in range(0, len(rows), options.rows)
    ]
    trainer.current_gradient_accumulation_steps = len(batches)

    def step() -> None:
        for batch in batches:
            trainer.compute_loss(model, batch).backward()
        model.zero_grad(set_to_none=True)

    return step, trained, "padded rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True, choices=["agentrl", "trl"])
    parser.add_argument("--case", required=True, choices=GPU_CASES)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=16, help="TRL's micro-batch")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    step, trained, how = (agentrl_step if options.side == "agentrl" else trl_step)(options)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    step()  # compiles, chooses kernels
    step()
    wait()
    seconds: list[float] = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - started)
    found: dict[str, object] = {"seconds": min(seconds), "trained_tokens": trained, "how": how}
    if on_gpu:
        found["gigabytes"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(found))


if __name__ == "__main__":
    main()
