"""The sampler's own decoder: who gets it, and that adapters reach it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_sampler_models import Asked, as_base, llama, qwen3, worst_difference
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from agentrl_trainer.model import attach_adapter, lora_config, save_adapter
from agentrl_trainer.sampler import SampleParams, SamplerEngine


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def gemma() -> PreTrainedModel:
    """Of the same parts as Llama, with another meaning: norms of 1 + weight, scaled embeddings."""
    config = GemmaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, hidden_act="silu",
        max_position_embeddings=64,
    )  # fmt: skip
    return GemmaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "lean"), [(qwen3, True), (llama, True), (gpt2, False), (gemma, False)]
)
def test_models_of_the_llama_family_are_decoded_lean(make, lean: bool) -> None:
    assert (SamplerEngine(as_base(make()))._forward.lean is not None) == lean


def test_adapters_that_are_not_merged_need_the_models_own_modules() -> None:
    assert SamplerEngine(as_base(qwen3()), merge_below=0)._forward.lean is None
    half = as_base(qwen3().to(torch.bfloat16))
    assert SamplerEngine(half)._forward.lean is None


def test_an_adapter_of_some_layers_comes_and_goes(tmp_path: Path) -> None:
    """Of the layers whose weights are joined, only some are adapted."""
    model = qwen3()
    plain = copy.deepcopy(model)
    adapted = attach_adapter(
        as_base(copy.deepcopy(model)), "policy", lora_config(4, 8, ["k_proj", "up_proj"]), 0
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    save_adapter(adapted, "policy", tmp_path / "v1")
    engine = SamplerEngine(as_base(model))
    engine.start()
    try:
        engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
        for name, reference in (("policy", adapted), (None, plain), ("policy", adapted)):
            asked = Asked(engine, [1, 2, 3], SampleParams(max_tokens=300, seed=1), name)
            assert worst_difference(reference, asked.prompt, asked.wait()[0]) < 2e-5
    finally:
        engine.stop()
    assert worst_difference(plain, asked.prompt, asked.wait()[0]) > 0.1  # it is no small adapter
