"""The embedded sampler against transformers: ``generate`` and its continuous batching.

    python benchmarks/sampler/run.py [--model agentrl-tiny] [--requests 64] [--rank 16]

Both answer the same requests with the same LoRA adapter, on one CPU thread; tokens asked for are
counted, padding is not. ``generate`` gets all requests as one left-padded batch and has to run as
long as the longest answer, with the adapter as PEFT runs it and, for the best it can do, merged.
Without ``--model`` a random Qwen3 of the size of agentrl-tiny is used: speed does not depend on
what the weights say. Also prints the time of a decode step at batch 1, 16 and 64, and the largest
difference between the sampler's log-probabilities and a plain forward's.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl_trainer.model import BaseModel, attach_adapter, load_base, lora_config, save_adapter
from agentrl_trainer.sampler import (
    Event,
    Finished,
    SampleParams,
    SamplerEngine,
    SampleRequest,
    Token,
)


class Took(NamedTuple):
    seconds: float
    cpu_seconds: float  # of the whole process: all sides work in it


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
    return BaseModel(model, tokenizer, "random-qwen3", cpu, torch.float32, 2048, frozenset())


def with_adapter(base: BaseModel, rank: int, folder: Path) -> PeftModel:
    """A random adapter in ``folder``, and a model of its own which has it."""
    own = BaseModel(
        copy.deepcopy(base.model), base.tokenizer, base.name, base.device, base.dtype,
        base.context_length, base.eos_ids,
    )  # fmt: skip
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
    for prompt, length, into in zip(prompts, lengths, answers, strict=True):
        params = SampleParams(max_tokens=length)
        engine.submit(
            SampleRequest(prompt, params, "policy", lambda e, into=into: collect(e, into))
        )
    for _ in prompts:
        done.acquire()
    return clock.took(), answers


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


@torch.inference_mode()
def worst_difference(model: PeftModel, prompts: list[list[int]], answers: list[list[Token]]):
    worst = 0.0
    for prompt, tokens in zip(prompts, answers, strict=True):
        answer = [t.token_id for t in tokens]
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found = torch.tensor([t.logprob for t in tokens])
        worst = max(worst, float((expected - found).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a random model of agentrl-tiny's size")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)

    base = load_base(options.model, device="cpu") if options.model else random_base()
    draw = random.Random(0)
    vocab = base.model.config.vocab_size

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(length)]

    prompts = [prompt(draw.randint(16, 256)) for _ in range(options.requests)]
    lengths = [draw.randint(16, 192) for _ in range(options.requests)]
    with tempfile.TemporaryDirectory() as folder:
        reference = with_adapter(base, options.rank, Path(folder) / "v1")
        engine = SamplerEngine(base)
        engine.start()
        engine.load_adapter("policy", 1, Path(folder) / "v1").result()
        sample(engine, [prompt(8)], [8])  # warm-up
        ours, answers = sample(engine, prompts, lengths)
        for batch in (1, 16, 64):
            before = engine.stats()
            took, _ = sample(engine, [prompt(4) for _ in range(batch)], [200] * batch)
            steps = engine.stats().decode_steps - before.decode_steps
            print(f"decode step, batch {batch:2}: {1e3 * took.seconds / steps:5.2f} ms")
        engine.stop()

    wanted = sum(lengths)
    worst = worst_difference(reference, prompts, answers)
    generate(reference, [prompt(8)], [8])
    unmerged = generate(reference, prompts, lengths)
    plain = reference.merge_and_unload()
    others = {"generate (PEFT)": unmerged, "generate (merged)": generate(plain, prompts, lengths)}
    continuous(plain, [prompt(8)], [8])
    others["continuous (merged)"] = continuous(plain, prompts, lengths)
    print(f"largest log-probability difference to a plain forward: {worst:.1e}")
    print(f"sampler:             {wanted / ours.seconds:7.0f} tokens/s")
    for name, took in others.items():
        print(
            f"{name + ':':20} {wanted / took.seconds:7.0f} tokens/s   "
            f"ratio {took.seconds / ours.seconds:.1f}, "
            f"in CPU seconds {took.cpu_seconds / ours.cpu_seconds:.1f}"
        )


if __name__ == "__main__":
    main()
