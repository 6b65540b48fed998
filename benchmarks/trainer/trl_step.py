"""TRL's side of ``memory.py``: one real step of GRPOTrainer, generation included."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from benchmarks.trainer.cases import RANK
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of a micro-batch")
    parser.add_argument("--generate", type=int, required=True, help="rows generated at once")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tasks = [json.loads(line) for line in options.tasks.read_text().splitlines()]
    count, answer = len(tasks) * options.group, tasks[0]["answer"]
    prompts = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=count // options.rows,
            generation_batch_size=options.generate, num_generations=options.group,
            max_completion_length=answer, generation_kwargs={"min_new_tokens": answer},
            max_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.0,
            loss_type="dapo", scale_rewards="none", report_to="none", disable_tqdm=True,
            logging_strategy="no", save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        lengths: list[tuple[int, int]] = []

        tokenizer = AutoTokenizer.from_pretrained(options.model)

        def reward(prompts=None, completion_ids=None, **_):
            for prompt, completion in zip(prompts, completion_ids, strict=True):
                ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
                lengths.append((len(ids["input_ids"]), len(completion)))
            return [random.random() for _ in completion_ids]

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
    print(json.dumps({"rows": len(lengths), "lengths": sorted(set(lengths))}))


if __name__ == "__main__":
    main()
