"""TRL's GRPOTrainer on the hello task: the other side of ``run.py``, in a venv of its own.

Set up to be quick on a CPU: one ``generate`` for the 64 completions of a step and one for
the held-out prompts, one forward and backward over the whole batch, nothing logged, nothing saved
but the adapter at the end. Plain ``generate``: TRL's continuous batching was not tried.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def score(reply: str, n: int) -> float:
    """As examples/hello/agent.py has it."""
    reply = reply.lower()
    if f"i am {n}" in reply or f"i'm {n}" in reply:
        return 1.0
    return -1.0 if f"not {n}" in reply else 0.0


def reward(completions: list[list[dict[str, str]]], n: list[int], **_: object) -> list[float]:
    return [score(c[0]["content"], m) for c, m in zip(completions, n, strict=True)]


def message(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Let's play a game. Say you are {n}."}]


class HeldOut(TrainerCallback):
    """Greedy accuracy on the held-out prompts, every so many steps; stops training at the goal."""

    def __init__(self, numbers: list[int], tokenizer, every: int, goal: float, new: int) -> None:
        self.numbers, self.tokenizer = numbers, tokenizer
        self.every, self.goal, self.new = every, goal, new
        self.inputs = tokenizer.apply_chat_template(
            [message(n) for n in numbers], add_generation_prompt=True, padding=True,
            padding_side="left", return_tensors="pt", return_dict=True,
        )  # fmt: skip
        self.accuracy: list[tuple[int, float]] = []
        self.step_ends: list[float] = []
        self.eval_seconds = 0.0
        self.began = self.evaluated_at = 0.0

    def measure(self, step: int, model) -> float:
        started = time.perf_counter()
        training = model.training
        model.eval()
        with torch.no_grad():
            ids = model.generate(**self.inputs, max_new_tokens=self.new, do_sample=False)
        model.train(training)
        replies = self.tokenizer.batch_decode(
            ids[:, self.inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right = [score(r, n) >= 1 for r, n in zip(replies, self.numbers, strict=True)]
        self.accuracy.append((step, sum(right) / len(right)))
        self.evaluated_at = time.time()
        self.eval_seconds += time.perf_counter() - started
        return self.accuracy[-1][1]

    def on_train_begin(self, args, state, control, model=None, **_):
        self.measure(0, model)
        self.began = time.time()

    def on_step_end(self, args, state, control, model=None, **_):
        self.step_ends.append(time.time())
        if state.global_step % self.every == 0 or state.global_step == args.max_steps:
            reached = self.measure(state.global_step, model) >= self.goal
            control.should_training_stop = control.should_training_stop or reached


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--eval-tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for adapter and figures")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--stop-at", type=float, default=0.95)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks = numbers(options.tasks)
    config = GRPOConfig(
        output_dir=str(options.out),
        seed=options.seed,
        # 16 tasks x 4 completions, one generation, one forward and backward, one optimizer step
        per_device_train_batch_size=64,
        num_generations=4,
        gradient_accumulation_steps=1,
        num_iterations=1,
        max_steps=options.steps,
        max_completion_length=32,
        temperature=1.0,
        # ratio * advantage over all tokens of the step; on-policy, so the ratio is 1, no clipping
        loss_type="dapo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-12,
        weight_decay=0.0,
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    held_out = HeldOut(
        numbers(options.eval_tasks), tokenizer, options.eval_every, options.stop_at, 32
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [message(n) for n in tasks], "n": tasks}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=32, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        callbacks=[held_out],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(options.out))
    steps = len(held_out.step_ends)
    loop = held_out.step_ends[-1] - held_out.began
    # evaluations within the loop: all but the first (before it) and the last (after it)
    inner = held_out.eval_seconds * (len(held_out.accuracy) - 2) / len(held_out.accuracy)
    (options.out / "figures.json").write_text(
        json.dumps(
            {
                "steps": steps,
                "held_out": held_out.accuracy,
                "seconds_per_step": (loop - inner) / steps,
                "eval_seconds": held_out.eval_seconds,
                "evaluated_at": held_out.evaluated_at,
            }
        )
    )


if __name__ == "__main__":
    main()
