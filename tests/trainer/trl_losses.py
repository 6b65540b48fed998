"""Runs in TRL's own virtual environment: GRPOTrainer's loss on given log-probs, as JSON.

No model: ``_compute_loss`` gets its log-probs from a stand-in for the forward pass, and everything
after that is TRL's code.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from trl import GRPOConfig, GRPOTrainer


def loss(case: dict) -> dict:
    lp = torch.tensor(case["logprobs"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(case["mask"])
    args = GRPOConfig(output_dir="unused", bf16=False, use_cpu=True, report_to=[], **case["args"])
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        args=args,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high if args.epsilon_high is not None else args.epsilon,
        beta=args.beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=args.max_completion_length,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        entropy_coef=0.0,
        aux_loss_enabled=False,
        _metrics={"train": __import__("collections").defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, device="cpu"
        ),
        _get_per_token_logps_and_entropies=lambda *_a, **_k: (lp, torch.zeros_like(lp), None),
    )
    model = SimpleNamespace(training=True)
    trainer.model = model
    inputs = {
        "prompt_ids": torch.zeros(len(lp), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(lp), 1, dtype=torch.long),
        "completion_ids": torch.zeros(lp.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(case["advantages"], dtype=torch.float64),
        "old_per_token_logps": torch.tensor(case["old"], dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
    }
    if args.beta:
        inputs["ref_per_token_logps"] = torch.tensor(case["reference"], dtype=torch.float64)
    args.steps_per_generation = 1
    value = trainer._compute_loss(model, inputs)
    value.backward()
    return {"loss": value.item(), "gradient": lp.grad.tolist()}


if __name__ == "__main__":
    json.dump([loss(case) for case in json.load(sys.stdin)], sys.stdout)
