"""TRL's side of ``run.py``: GRPOTrainer's own loss and its gradient, one case.

The inputs are those its ``_generate_and_score_completions`` makes when nothing is off-policy (no
old log-probs, no reference model); environment tokens are left out by ``tool_mask``, as it does.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from cases import CASES, RANK, Row
from datasets import Dataset
from measure import report
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def trainer_for(model, scratch: str) -> GRPOTrainer:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), pad_token="<pad>", eos_token="<eos>"
    )
    config = GRPOConfig(
        output_dir=scratch, per_device_train_batch_size=8, num_generations=8, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to="none",
        disable_tqdm=True, loss_type="dapo", scale_rewards="none", beta=0.0, max_steps=1,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    return GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=RANK,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )


def inputs(rows: list[Row], step_tokens: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right."""
    prompt = max(len(row.prompt) for row in rows)
    completion = max(len(row.completion) for row in rows)

    def left(values, row):
        return [0] * (prompt - len(row.prompt)) + values

    def right(values, row):
        return values + [0] * (completion - len(row.completion))

    return {
        "prompt_ids": torch.tensor([left(r.prompt, r) for r in rows]),
        "prompt_mask": torch.tensor([left([1] * len(r.prompt), r) for r in rows]),
        "completion_ids": torch.tensor([right(r.completion, r) for r in rows]),
        "completion_mask": torch.tensor([right([1] * len(r.completion), r) for r in rows]),
        "tool_mask": torch.tensor([right([int(t) for t in r.trained], r) for r in rows]),
        "advantages": torch.tensor([r.advantage for r in rows]),
        "num_items_in_batch": torch.tensor(step_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="rows of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_for(model, scratch)
    model = trainer.model.train()
    # Rows of like length together, so that little is padded.
    rows = sorted(CASES[options.case](), key=lambda row: len(row.prompt))
    trained = sum(sum(row.trained) for row in rows)
    batches = [
        inputs(rows[at : at + options.rows], trained) for at in range(0, len(rows), options.rows)
    ]

    trainer.current_gradient_accumulation_steps = len(batches)  # its training loop sets this

    def forward_backward() -> None:
        for batch in batches:
            trainer.compute_loss(model, batch).backward()
        model.zero_grad(set_to_none=True)

    few = inputs(CASES[options.case]()[:2], trained)
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([few["prompt_ids"], few["completion_ids"]], 1),
            torch.cat([few["prompt_mask"], few["completion_mask"]], 1),
            few["completion_ids"].shape[1],
        )
    picked = logps[few["tool_mask"].bool()]
    report(forward_backward, float(picked.mean()), trained, options.repeats)


if __name__ == "__main__":
    main()
