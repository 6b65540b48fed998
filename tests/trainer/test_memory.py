"""Estimates of memory are what models take: counted exactly, activations to a fifth."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import qwen3, save_model, training_row

from agentrl_trainer.inference.forward import choose_forward
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.memory import estimate_memory
from agentrl_trainer.models.loading import load_base

CPU = torch.device("cpu")


def kept_by(learner: Learner, tokens: int) -> int:
    """Bytes that a forward keeps for its backward, besides parameters."""
    draw = random.Random(0)
    rows = [training_row([draw.randrange(200) for _ in range(tokens // 4)]) for _ in range(4)]
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in learner.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner.forward_backward(rows)
    return sum(kept.values())


@pytest.mark.parametrize("name", ["agentrl-tiny", "qwen3"])
def test_estimates(name: str, tmp_path: Path) -> None:
    source = save_model(qwen3(), tmp_path) if name == "qwen3" else name
    estimate = estimate_memory(source, rank=8, device=CPU)
    assert estimate is not None
    base = load_base(source, device="cpu")
    sizes = {p: p.numel() * p.element_size() for p in base.model.parameters()}
    assert estimate.weights == sum(sizes.values())
    learner = Learner(base, rank=8)
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    assert estimate.adapter == 16 * trained
    _, forward, _ = choose_forward(load_base(source, device="cpu"), llama_cpu=True)
    assert estimate.kv == forward.bytes_per_token
    assert kept_by(learner, 400) == pytest.approx(400 * estimate.activation, rel=0.2)


def test_settings_lower_the_estimate() -> None:
    def of(**settings: Any) -> Any:
        return estimate_memory("agentrl-tiny", rank=8, device=CPU, **settings)

    plain = of()
    assert of(dtype="bfloat16").weights == plain.weights / 2
    assert of(load_in_4bit=True).weights < plain.weights / 2
    assert of(gradient_checkpointing=True).activation < plain.activation / 2


def test_unknown_models_have_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert estimate_memory(str(tmp_path), rank=8, device=CPU) is None
