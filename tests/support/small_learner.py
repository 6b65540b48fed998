"""Random miniature models, learners over them and rows for these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import transformers as hf
from small_models import lora_b_from
from torch import Tensor

from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams, LossConfig
from agentrl_trainer.learner.step_stats import StepStats
from agentrl_trainer.models.loading import BaseModel

VOCAB = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,  # far from uniform, so that mistakes show
}  # fmt: skip


def built(config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_config(config)


def qwen3(**more: Any) -> hf.PreTrainedModel:
    return built(hf.Qwen3Config(**{**SMALL, **more}))


CAPS = {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
OTHER_SIZES = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
llama = partial(built, hf.LlamaConfig(**SMALL))
gemma2 = partial(built, hf.Gemma2Config(**SMALL, **CAPS))
WITHOUT_HEADS = {name: size for name, size in SMALL.items() if name != "head_dim"}
cohere = partial(built, hf.CohereConfig(**WITHOUT_HEADS, logit_scale=0.25))
qwen3_moe = partial(built, hf.Qwen3MoeConfig(**SMALL, **EXPERTS))
gpt2 = partial(built, hf.GPT2Config(vocab_size=VOCAB, **OTHER_SIZES, initializer_range=0.3))


def base_model(build: Any = qwen3, seed: int = 0) -> BaseModel:
    torch.manual_seed(seed)
    model = build().eval().requires_grad_(False)
    return BaseModel(
        model=model, tokenizer=cast(Any, None), name="random", device=torch.device("cpu"),
        dtype=torch.float32, context_length=64, eos_ids=frozenset({2}),
    )  # fmt: skip


def learner(*, off_start: bool = False, **options: Any) -> Learner:
    """``off_start``: B is not zero, where half of LoRA's gradients vanish and adapters agree."""
    options = {"rank": 4, "alpha": 8, "adam": AdamParams(learning_rate=1e-2), **options}
    trainer = Learner(base_model(options.pop("build", qwen3)), **options)
    if off_start:
        lora_b_from(5, trainer.model)
    return trainer


def data(
    seed: int = 0, rows: int = 7, adapters: tuple[str, ...] = ("default",)
) -> list[TrainingRow]:
    rng = random.Random(seed)
    datums = []
    for row in range(rows):
        length = rng.randrange(3, 20)
        mask = [at > 0 and rng.random() < 0.5 for at in range(length)]
        mask[-1] = True
        datums.append(
            TrainingRow(
                tokens=[rng.randrange(3, VOCAB) for _ in range(length)],
                mask=mask,
                logprobs=[-rng.expovariate(0.3) if on else 0.0 for on in mask],
                advantages=[rng.gauss(0, 1) if on else 0.0 for on in mask],
                adapter=adapters[row % len(adapters)],
            )
        )
    return datums


def warm(datums: list[TrainingRow]) -> list[TrainingRow]:
    """Each token at a temperature of its own."""
    columns = [[0.5 + (t % 7) / 4 for t in range(len(datum.tokens))] for datum in datums]
    return with_extra(datums, temperature=columns)


def on_policy(trainer: Learner, datums: list[TrainingRow], spread: float = 0) -> list[TrainingRow]:
    """Rows sampled by the policy; with a ``spread`` by something close, ratios on both sides of the
    clip range."""
    rng = random.Random(1)
    return [
        replace(datum, logprobs=[lp + rng.gauss(0, spread) for lp in logprobs])
        for datum, logprobs in zip(datums, trainer.forward(datums), strict=True)
    ]


def nearly_on_policy(trainer: Learner, datums: list[TrainingRow]) -> list[TrainingRow]:
    return on_policy(trainer, datums, 0.3)


def gradients(trainer: Learner) -> dict[str, Tensor]:
    """Take the policy's accumulated gradients, so that the next ones start from nothing."""
    named = trainer.model.named_parameters()
    found = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
    for parameter in trainer.model.parameters():
        parameter.grad = None
    return found


def plain_logprobs(trainer: Learner, datum: TrainingRow) -> Tensor:
    """One row, the whole model, all logits, float64 softmax; of the trained tokens."""
    trainer.model.set_adapter(datum.adapter)
    logits = trainer.model(input_ids=torch.tensor([datum.tokens])).logits[0, :-1].double()
    if "temperature" in datum.extra:
        logits = logits / torch.tensor(datum.extra["temperature"][1:])[:, None]
    found = logits.log_softmax(-1).gather(-1, torch.tensor(datum.tokens[1:])[:, None])[:, 0]
    return found[torch.tensor(datum.mask[1:])]


def trained(datum: TrainingRow, column: list[float]) -> Tensor:
    """The values of a column in the trained places."""
    return torch.tensor(column, dtype=torch.float64)[torch.tensor(datum.mask)]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], **tolerance: float) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], **tolerance, msg=lambda m, k=key: f"{k}: {m}")


def one_step(
    learner: Learner, rows: Sequence[TrainingRow], loss: str = "importance_sampling",
    loss_config: LossConfig | None = None, adam: AdamParams | None = None,
) -> StepStats:  # fmt: skip
    """Make one whole optimizer step on these rows."""
    stats, optim = learner.forward_backward(rows, loss, loss_config), learner.optim_step(adam)
    return replace(stats, grad_norm=optim.grad_norm, skipped_non_finite=optim.skipped_non_finite)
