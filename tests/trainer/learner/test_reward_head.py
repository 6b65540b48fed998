"""Reward models: the same scores, losses and gradients as transformers' and PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import (
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    get_peft_model,
)
from small_learner import VOCAB, learner
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.learner.reward_head import (
    pair_scores_loss,
    regression_loss,
    score_row,
)
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import (
    HEAD_KEY,
    ModelError,
    read_reward_head,
    save_adapter,
)
from agentrl_trainer.models.sources import resolve_model

TINY = resolve_model("agentrl-tiny")
"""The folder: PEFT looks for the base model by the name in its own folders."""


def texts(count: int = 6) -> list[list[int]]:
    """Pairs with a common start, of different lengths; chosen and rejected in turn."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for at in range(count):
        if at % 2 == 0:
            prompt = torch.randint(3, VOCAB, (5,), generator=draw).tolist()
        made.append(prompt + torch.randint(3, VOCAB, (2 + 3 * at % 7,), generator=draw).tolist())
    return made


def tiny_reward_model(**options: Any) -> Learner:
    """With B and the head off zero, where the gradient of A would vanish."""
    made = Learner(load_base(TINY, device="cpu"), rank=4, alpha=8, score=True, **options)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in made.parameters["default"].items():
        if "lora_B" in name or name == HEAD_KEY:
            parameter.data.normal_(std=0.02, generator=draw)
    return made


def plain_reward_model(ours: Learner) -> Any:
    """transformers' model under PEFT's LoRA, with the weights of ours."""
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1)
    targets = list(cast(Any, ours.model.peft_config["default"]).target_modules)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="SEQ_CLS")
    peft = get_peft_model(model, config).eval()
    found = trainable(peft)
    with torch.no_grad():
        for name, parameter in ours.parameters["default"].items():
            found[name].copy_(parameter)
    return peft


def trainable(peft: Any) -> dict[str, Tensor]:
    """Trainable parameters by the learner's names."""
    named = {n: p for n, p in peft.named_parameters() if p.requires_grad}
    short = {HEAD_KEY if ".score." in n else n.replace(".default", ""): p for n, p in named.items()}
    assert len(short) == len(named)
    return short


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("loss", ["pairs", "scores"])
@pytest.mark.parametrize("token_budget", [4096, 16])
def test_loss_and_gradient_are_those_of_a_plain_classifier(loss: str, token_budget: int) -> None:
    ours = tiny_reward_model(token_budget=token_budget)
    peft = plain_reward_model(ours)
    rows, targets = texts(), [0.5, -1.0, 2.0, 0.0, 1.0, 1.5]
    function = pair_scores_loss if loss == "pairs" else regression_loss(targets)
    scored = [score_row(row) for row in rows]
    stats, _ = ours.forward_backward_custom(scored, function)
    scores = peft(**padded(rows)).logits[:, 0]
    expected, _ = function(scored, list(scores))
    expected.backward()
    assert stats.loss == pytest.approx(expected.item(), abs=1e-5)
    theirs = trainable(peft)
    mine = ours.parameters["default"]
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 0
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)


def test_peft_loads_what_is_saved(tmp_path: Path) -> None:
    ours = tiny_reward_model()
    rows = texts()
    ours.save("default", tmp_path / "v1")
    loaded: Any = AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "v1", num_labels=1
    )
    scores = [row[-1] for row in ours.forward([score_row(row) for row in rows])]
    with torch.no_grad():
        theirs = loaded.eval()(**padded(rows)).logits[:, 0].tolist()
    assert scores == pytest.approx(theirs, abs=1e-5)
    assert len(set(scores)) == len(scores)


def test_a_reward_model_is_told_from_an_adapter_that_writes(tmp_path: Path) -> None:
    ours = tiny_reward_model()
    ours.save("default", tmp_path / "scores")
    save_adapter(ours.model, "default", tmp_path / "writes")
    kinds = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())["task_type"]
        for name in ("scores", "writes")
    ]
    assert kinds == ["SEQ_CLS", "CAUSAL_LM"]
    head = read_reward_head(tmp_path / "scores")
    assert torch.equal(head, ours.reward_heads["default"].score.weight)
    with pytest.raises(ModelError, match="no head of one label"):
        read_reward_head(tmp_path / "writes")


def test_the_head_is_part_of_the_state_and_steps_with_the_adapter() -> None:
    first, second = (learner(score=True, seed=seed) for seed in (3, 4))
    rows = [score_row(row) for row in texts()]
    assert {score for row in first.forward(rows) for score in row} == {0.0}
    for _ in range(2):
        first.forward_backward_custom(rows, pair_scores_loss)
        first.optim_step(AdamParams(learning_rate=1e-2))
    assert first.forward(rows) != second.forward(rows)
    second.load_state_dict(first.state_dict())
    for trainer in (first, second):
        trainer.forward_backward_custom(rows, pair_scores_loss)
        trainer.optim_step(AdamParams(learning_rate=1e-2))
    assert second.forward(rows) == first.forward(rows)


def test_a_regression_explains_the_variance() -> None:
    targets = torch.tensor([1.0, 2.0, 6.0])
    function = regression_loss(targets.tolist())
    loss, found = function([], list(targets))
    assert (loss.item(), found["rewards/explained"]) == (0.0, 1.0)
    assert found["rewards/accuracies"] == 1.0
    _, found = function([], list(torch.tensor([0.0, 3.0, 2.0])))
    assert found["rewards/accuracies"] == pytest.approx(2 / 3)
    loss, found = function([], list(torch.full((3,), 3.0)))
    assert (loss.item(), found["rewards/explained"]) == pytest.approx((14 / 3, 0.0))
    assert found["rewards/error"] == pytest.approx((14 / 3) ** 0.5)
