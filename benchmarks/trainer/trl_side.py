"""TRL's side of ``run.py``: GRPOTrainer's own loss and its gradient, one case, one pass.

The inputs are those its ``_generate_and_score_completions`` makes when nothing is off-policy (no
old log-probs, no reference model); environment tokens are left out by ``tool_mask``, as it does.
"""

from __future__ import annotations

import os
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from benchmarks.trainer.cases import CASES, RANK, Row, trl_rows
from benchmarks.trainer.measure import measured, report, side_options
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def trainer_for(model: str, scratch: str) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=scratch, per_device_train_batch_size=8, num_generations=8, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to="none",
        disable_tqdm=True, loss_type="dapo", scale_rewards="none", beta=0.0, max_steps=1,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(model),
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

    def left(values: list[int], row: Row) -> list[int]:
        return [0] * (prompt - len(row.prompt)) + values

    def right(values: list[int], row: Row) -> list[int]:
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
    parser = side_options(__doc__)
    parser.add_argument("--rows", type=int, required=True, help="rows of a micro-batch")
    parser.add_argument("--part", type=int, help="only so many rows, of middle length")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_for(options.model, scratch)
    model = trainer.model.train()
    rows = trl_rows(CASES[options.case])
    # Rows of like length together, so that little is padded.
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
    if options.part:
        first = max(0, len(order) - options.part) // 2
        order = order[first : first + options.part]
    step_tokens = sum(sum(row.trained) for row in rows)
    batches = [order[at : at + options.rows] for at in range(0, len(order), options.rows)]
    trainer.current_gradient_accumulation_steps = len(batches)  # its training loop sets this

    # What its loss computes on the way, to be compared.
    seen: list[torch.Tensor] = []
    compute = trainer._get_per_token_logps_and_entropies

    def kept(*args, **options):
        found = compute(*args, **options)
        seen.append(found[0].detach())
        return found

    trainer._get_per_token_logps_and_entropies = kept

    def step(some: list[list[int]]) -> None:
        seen.clear()
        for batch in some:
            loss = trainer.compute_loss(model, inputs([rows[at] for at in batch], step_tokens))
            loss.backward()
        model.zero_grad(set_to_none=True)

    found = measured(lambda: step(batches[:1]), lambda: step(batches))
    own: dict[int, list[float]] = {}
    for batch, logprobs in zip(batches, seen, strict=True):
        for at, values in zip(batch, logprobs.tolist(), strict=True):
            own[at] = [lp for lp, on in zip(values, rows[at].trained, strict=False) if on]
    found |= {
        "rows": options.rows,
        "trained_tokens": sum(map(len, own.values())),
        "computed_tokens": sum(len(b) * max(len(rows[at]) for at in b) for b in batches),
    }
    report(found, [lp for at in sorted(own) for lp in own[at]], options.out)


if __name__ == "__main__":
    main()
