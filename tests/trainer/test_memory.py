"""Estimates of memory are what models take: counted exactly, activations to a fifth."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import qwen3, save_model, training_row
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from agentrl_trainer.inference.adapter_swap import RoundedWeights
from agentrl_trainer.inference.engine import SamplerEngine
from agentrl_trainer.inference.forward import choose_forward
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.memory import estimate_memory, fitting_token_budget
from agentrl_trainer.models.host_memory import ADAM_BYTES, model_size
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


def parts(name: str, tokens: int, **settings: Any) -> dict[str, int]:
    settings = {"rank": 8, "cached": 1, "device": CPU} | settings
    found = estimate_memory(name, tokens=tokens, **settings)
    assert found is not None
    return {name.partition(" of ")[0]: size for name, size in found.items()}


def activation(name: str, **settings: Any) -> int:
    """Of 400 tokens, without the logits, whose number is bounded."""
    return (
        parts(name, 10**6 + 400, **settings)["activations"]
        - parts(name, 10**6, **settings)["activations"]
    )


@pytest.mark.parametrize("name", ["agentrl-tiny", "qwen3"])
def test_estimates(name: str, tmp_path: Path) -> None:
    source = save_model(qwen3(), tmp_path) if name == "qwen3" else name
    estimate = parts(source, 400)
    assert parts(source, 400, parts=2)["weights"] == estimate["weights"] // 2
    # FSDP2 and verl's workers compute a layer as PEFT does, which keeps the MLP's inner values.
    assert activation(source, parts=1) > activation(source)
    base = load_base(source, device="cpu")
    assert estimate["weights"] == sum(p.numel() * 4 for p in base.model.parameters())
    learner = Learner(base, rank=8)
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    assert estimate["adapter and optimizer"] == 16 * trained
    _, forward, _ = choose_forward(load_base(source, device="cpu"), llama_cpu=True)
    assert estimate["KV cache"] == forward.bytes_per_token
    size = model_size(source)  # without loading it
    assert size is not None
    assert size.weights == estimate["weights"]
    assert ADAM_BYTES * 8 * size.widths == estimate["adapter and optimizer"]
    assert size.of_token == estimate["KV cache"]
    assert kept_by(learner, 400) == pytest.approx(activation(source), rel=0.2)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_sampler_with_rounded_weights_holds_what_is_estimated(
    weights: Any, tied: bool, tmp_path: Path
) -> None:
    how = LlamaConfig(
        vocab_size=288, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    source = save_model(LlamaForCausalLM(how), tmp_path)
    found = parts(source, 400, sampler_weights=weights)
    engine = SamplerEngine(load_base(source, device="cpu"), weights=weights)
    assert isinstance(engine._weights, RoundedWeights)
    products: list[Any] = engine._weights._lean.rounded_products
    held = sum(p.nbytes for p in engine.base.model.parameters())
    held += sum(product._weight.nbytes for product in products)
    two_versions = 2 * found["adapter and optimizer"] // 4
    assert found["sampler"] == held + two_versions


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ("{", "{}"),
        ("[]", "{}"),
        ('{"num_attention_heads": [1]}', "{}"),
        ('{"hidden_size": null}', "{}"),
        ("{}", "version https://git-lfs.github.com/spec/v1"),
    ],
)
def test_files_that_cannot_be_read_tell_no_size(config: str, weights: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    head = len(weights).to_bytes(8, "little") if weights == "{}" else b""
    (tmp_path / "model.safetensors").write_bytes(head + weights.encode())
    assert model_size(str(tmp_path)) is None


def test_a_model_that_no_hub_can_have_tells_no_size() -> None:
    assert model_size("no such model") is None


def test_settings_change_the_estimate() -> None:
    plain, two = parts("agentrl-tiny", 400), parts("agentrl-tiny", 400, adapters=2)
    assert two["adapter and optimizer"] == 2 * plain["adapter and optimizer"]
    assert two["sampler"] > plain["sampler"]
    assert parts("agentrl-tiny", 400, dtype="bfloat16")["weights"] == plain["weights"] / 2
    assert parts("agentrl-tiny", 400, load_in_4bit=True)["weights"] < plain["weights"] / 2
    recomputed = activation("agentrl-tiny", gradient_checkpointing=True)
    assert recomputed < activation("agentrl-tiny") / 2
    half, quarter = (
        parts("agentrl-tiny", 400, sampler_weights=to)["sampler"] for to in ("bfloat16", "int8")
    )
    assert quarter < half < plain["sampler"]
    assert "sampler" not in parts("agentrl-tiny", 400, cached=0)


def test_a_mixture_keeps_what_a_tokens_experts_compute(tmp_path: Path) -> None:
    def of(active: int) -> int:
        made = Qwen3MoeConfig(
            vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=24,
            num_experts_per_tok=active,
        )  # fmt: skip
        made.save_pretrained(tmp_path)
        return activation(str(tmp_path))

    experts = 4 * 400 * (32 + 2 * 24 + 24 + 32)  # in and out of both of an expert's products
    assert of(2) - of(1) == experts


def test_unknown_models_have_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert estimate_memory(str(tmp_path), tokens=1, cached=1, rank=8, device=CPU) is None


@pytest.mark.parametrize(("memory", "tokens"), [(80 * 2**30, 16384), (3 * 2**27, 2048), (1, 1024)])
def test_a_gpu_gets_micro_batches_that_it_holds(
    memory: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    gpu = torch.device("cuda")
    assert fitting_token_budget("agentrl-tiny", rank=8, device=gpu) == tokens
    assert fitting_token_budget("agentrl-tiny", rank=8, device=CPU) == 4096
