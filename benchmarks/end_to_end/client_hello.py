"""The hello task by agentrl's client API, with no agent around it: what TRL's trainer does too.

Sampler and learner in one process, on one thread, with trl_hello.py's numbers: 16 tasks of 4
completions a step, the mean over the step's tokens, no clipping of gradients, Adam alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


from agentrl import AdamParams, Datum, ModelInput, SamplingClient, SamplingParams, ServiceClient

TASKS, COMPLETIONS, NEW = 16, 4, 32


def score(reply: str, n: int) -> float:
    """As examples/hello/agent.py has it."""
    reply = reply.lower()
    if f"i am {n}" in reply or f"i'm {n}" in reply:
        return 1.0
    return -1.0 if f"not {n}" in reply else 0.0


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def held_out(policy: SamplingClient, tokenizer, asked: list[int]) -> float:
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0)
    replies = policy.sample_batch([prompt(tokenizer, n) for n in asked], 1, greedy).result()
    said = [tokenizer.decode(reply.sequences[0].tokens) for reply in replies]
    return fmean(score(text, n) >= 1 for text, n in zip(said, asked, strict=True))


def prompt(tokenizer, n: int) -> list[int]:
    message = {"role": "user", "content": f"Let's play a game. Say you are {n}."}
    given = {"add_generation_prompt": True, "return_dict": True}
    return tokenizer.apply_chat_template([message], **given)["input_ids"]


def datum(given: list[int], sequence, advantage: float) -> Datum:
    row, context = given + sequence.tokens, [0.0] * (len(given) - 1)
    inputs = {
        "target_tokens": row[1:],
        "logprobs": context + sequence.logprobs,
        "advantages": context + [advantage] * len(sequence.tokens),
    }
    return Datum(ModelInput.from_ints(row[:-1]), inputs)


def learn(
    folder: Path,
    *,
    model: str,
    tasks: Path,
    eval_tasks: Path,
    learning_rate: float,
    seed: int,
    rank: int = 32,
    steps: int = 40,
    eval_every: int = 5,
    stop_at: float = 0.95,
) -> dict[str, Any]:
    """``steps``, ``held_out`` [(step, accuracy)], and ``seconds_per_step`` without evaluations."""
    asked_first, asked_later = numbers(tasks), numbers(eval_tasks)
    draw = random.Random(seed)
    adam = AdamParams(learning_rate=learning_rate, beta2=0.95, eps=1e-12)
    with ServiceClient(folder=folder) as service:
        client = service.create_lora_training_client(model, rank=rank, seed=seed)
        policy = client.save_weights_and_get_sampling_client()
        tokenizer = policy.get_tokenizer()
        accuracy = [(0, held_out(policy, tokenizer, asked_later))]
        seconds, step = 0.0, 0
        while step < steps and accuracy[-1][1] < stop_at:
            began = time.perf_counter()
            step += 1
            asked = draw.sample(asked_first, TASKS)
            prompts = [prompt(tokenizer, n) for n in asked]
            how = SamplingParams(
                max_tokens=NEW
            )  # one seed would be the same noise for every prompt
            data = []
            replies = policy.sample_batch(prompts, COMPLETIONS, how).result()
            for n, given, reply in zip(asked, prompts, replies, strict=True):
                rewards = [score(tokenizer.decode(one.tokens), n) for one in reply.sequences]
                data += [
                    datum(given, one, reward - fmean(rewards))
                    for one, reward in zip(reply.sequences, rewards, strict=True)
                ]
            client.forward_backward(data, "importance_sampling", normalize_by=None)
            client.optim_step(adam)
            policy = client.save_weights_and_get_sampling_client()
            seconds += time.perf_counter() - began
            if step % eval_every == 0 or step == steps:
                accuracy.append((step, held_out(policy, tokenizer, asked_later)))
    return {
        "steps": step, "held_out": accuracy, "seconds_per_step": seconds / step,
        "evaluated_at": time.time(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--eval-tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--stop-at", type=float, default=0.95)
    options = vars(parser.parse_args())
    out: Path = options.pop("out")
    (out / "figures.json").write_text(json.dumps(learn(out / "weights", **options)))


if __name__ == "__main__":
    main()
