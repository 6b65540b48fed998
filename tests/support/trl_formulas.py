"""Runs with a Python that has TRL: its trainers' formulas on given numbers, a JSON line each.

No model: a trainer gets its log-probs from a stand-in for the forward pass, and everything after
that is TRL's code.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch
from peer import answer_questions
from trl import (
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

# What is made of lists of floats is made in double precision.
torch.set_default_dtype(torch.float64)

_ALONE = SimpleNamespace(
    num_processes=1,
    process_index=0,
    device="cpu",
    sync_gradients=True,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, **_: x,
)

COPIED = (
    "beta", "loss_type", "importance_sampling_level", "scale_rewards", "max_completion_length",
    "use_vllm", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max",
)  # fmt: skip


def online(config: type, kind: type, args: dict, **attributes: object) -> object:
    """A GRPO or RLOO trainer without a model, as far as its formulas look. Most of its attributes
    have the names of its arguments."""
    args = config(output_dir="unused", bf16=False, use_cpu=True, report_to=[], **args)
    args.steps_per_generation = 1
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer = object.__new__(kind)
    trainer.__dict__.update(
        {name: getattr(args, name) for name in COPIED if hasattr(args, name)},
        args=args,
        accelerator=_ALONE,
        model=model,
        ref_model=model,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high if args.epsilon_high is not None else args.epsilon,
        num_iterations=1,
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        log_multimodal=False,
        reward_weights=torch.ones(1),
        reward_func_names=["reward"],
        reward_funcs=[None],
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _metrics={"train": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        **attributes,
    )
    return trainer


def grpo(args: dict, **attributes: object) -> GRPOTrainer:
    return online(
        GRPOConfig,
        GRPOTrainer,
        args,
        multi_objective_aggregation="sum_then_normalize",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        environment_factories=None,
        environments=None,
        tools=None,
        _entropy_bonus_enabled=False,
        entropy_coef=0.0,
        **attributes,
    )


def metrics_of(trainer: object) -> dict:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def loss(args: dict, batch: dict) -> dict:
    """GRPO's loss from the log-probs of three policies: of now, of before, of the reference."""
    lp = torch.tensor(batch["logprobs"], requires_grad=True)
    mask = torch.tensor(batch["mask"])
    trainer = grpo(args)
    trainer._get_per_token_logps_and_entropies = lambda *_a, **_k: (lp, torch.zeros_like(lp), None)
    inputs = {
        "prompt_ids": torch.zeros(len(lp), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(lp), 1, dtype=torch.long),
        "completion_ids": torch.zeros(lp.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(batch["advantages"]),
        "old_per_token_logps": torch.tensor(batch["old"]),
        "num_items_in_batch": mask.sum(),
    }
    if trainer.beta:
        inputs["ref_per_token_logps"] = torch.tensor(batch["reference"])
    value = trainer._compute_loss(trainer.model, inputs)
    value.backward()
    return {"loss": value.item(), "gradient": lp.grad.tolist(), "metrics": metrics_of(trainer)}


def advantages(trainer: str, args: dict, rewards: list[list[float]]) -> dict:
    """Of groups of one size, for trainer ``grpo`` or ``rloo``. NaN is a missing reward."""
    flat = [reward for group in rewards for reward in group]
    one = {"num_generations": len(rewards[0])}
    answers = [[1]] * len(flat)
    if trainer == "grpo":
        ours = grpo(args, **one)
        ours._generate = lambda _: (answers, answers, None, answers, None, {}, None, None)
    else:
        ours = online(
            RLOOConfig,
            RLOOTrainer,
            args,
            **one,
            normalize_advantages=args.get("normalize_advantages", False),
            reward_clip_range=None,
        )
        ours._generate = lambda _: (answers, answers, answers)
    nothing = torch.zeros(len(flat), 1)
    ours._get_per_token_logps_and_entropies = lambda *_a, **_k: (nothing, nothing, None)
    ours._calculate_rewards = lambda *_: torch.tensor(flat)[:, None]
    found = ours._generate_and_score_completions([{"prompt": "?"} for _ in flat])
    rows = found["advantages"].view(len(rewards), -1).tolist()
    return {"advantages": rows, "metrics": metrics_of(ours)}


# ---- pairs of answers


def offline(kind: type, args: dict, **attributes: object) -> object:
    """A trainer on pairs without a model, as far as its formulas look."""
    trainer = object.__new__(kind)
    fixed = {"label_smoothing": 0.0, "aux_loss_enabled": False, "_total_train_tokens": 0}
    fixed |= {"_tp_size": 1, "precompute_ref_logps": True, "ld_alpha": None}
    trainer.__dict__.update(
        fixed, model=SimpleNamespace(training=True), accelerator=_ALONE,
        _metrics={"train": defaultdict(list)}, **args, **attributes,
    )  # fmt: skip
    return trainer


def preference(loss: str, args: dict, batch: dict) -> dict:
    """The loss of pairs from the log-probs of their tokens [pairs, T], in two policies."""
    chosen, rejected = (torch.tensor(batch[of], requires_grad=True) for of in _BOTH)
    value, metrics = _LOSSES[loss](args, chosen, rejected, batch)
    value.backward()
    return {
        "loss": value.item(),
        "gradient": [chosen.grad.tolist(), rejected.grad.tolist()],
        "metrics": metrics,
    }


def _model_of(chosen: torch.Tensor, rejected: torch.Tensor) -> object:
    both = torch.cat([chosen, rejected])
    rest = {"entropy": both.detach(), "mean_logits": both.detach(), "is_top1": both < 0}
    return lambda **_: SimpleNamespace(log_probs=both, **rest)


def _inputs(batch: dict) -> dict:
    """What both DPO and KTO read; one prompt token stands before each answer."""
    mask = torch.tensor(batch["chosen_mask"] + batch["rejected_mask"])
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], 1).long()
    return {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}


def _dpo(args: dict, chosen: torch.Tensor, rejected: torch.Tensor, batch: dict) -> tuple:
    fixed = {"loss_weights": [1.0], "f_divergence_type": "reverse_kl", "use_weighting": False}
    trainer = offline(DPOTrainer, args, **fixed)
    known = {f"ref_{of}_logps": torch.tensor(batch[f"reference_{of}"]) for of in _BOTH}
    inputs = _inputs(batch) | known
    return trainer._compute_loss(_model_of(chosen, rejected), inputs, False), metrics_of(trainer)


def _kto(args: dict, chosen: torch.Tensor, rejected: torch.Tensor, batch: dict) -> tuple:
    fixed = {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}
    trainer = offline(KTOTrainer, args, calculate_KL=True, **fixed)
    trainer._compute_kl_logps = lambda *_: torch.tensor(batch["mismatched"])
    pairs = len(chosen)
    inputs = _inputs(batch) | {
        "label": torch.tensor([True] * pairs + [False] * pairs),
        "ref_logps": torch.tensor(batch["reference_chosen"] + batch["reference_rejected"]),
        "ref_KL_logps": torch.tensor(batch["reference_mismatched"]),
    }
    return trainer._compute_loss(_model_of(chosen, rejected), inputs, False), metrics_of(trainer)


def _without_reference(kind: type, fixed: dict) -> object:
    def loss(args: dict, chosen: torch.Tensor, rejected: torch.Tensor, batch: dict) -> tuple:
        trainer = offline(kind, args, **fixed)
        tokens = [torch.tensor(batch[f"{of}_mask"]).sum(1) for of in _BOTH]
        means = [one.sum(1) / n for one, n in zip((chosen, rejected), tokens, strict=True)]
        nothing = torch.zeros(1)
        supervised = -chosen.sum() / tokens[0].sum()
        trainer.concatenated_forward = lambda *_: (*means, nothing, nothing, supervised)
        return trainer.get_batch_loss_metrics(None, {})

    return loss


_BOTH = ("chosen", "rejected")
_LOSSES = {
    "sigmoid": _dpo,
    "ipo": _dpo,
    "kto": _kto,
    "orpo": _without_reference(ORPOTrainer, {}),
    "simpo": _without_reference(CPOTrainer, {"loss_type": "simpo", "alpha": 0.0, "cpo_alpha": 0.0}),
}


def bradley_terry(chosen: list[float], rejected: list[float]) -> dict:
    """The reward model's loss and metrics of the scores of pairs."""
    trainer = offline(RewardTrainer, {})
    trainer.args = SimpleNamespace(center_rewards_coefficient=None)
    scores = torch.tensor(chosen + rejected, requires_grad=True)
    model = lambda **_: SimpleNamespace(logits=scores[:, None])  # noqa: E731
    value = trainer.compute_loss(model, {"attention_mask": torch.ones(1)})
    value.backward()
    metrics = metrics_of(trainer)
    return {"loss": value.item(), "gradient": scores.grad.tolist(), "metrics": metrics}


if __name__ == "__main__":
    answer_questions(globals())
