"""A mixture of experts through the whole machine: trained, published, sampled, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import Run
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.export import export
from agentrl_trainer.tiny import MODEL_DIR

EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Random, with the words of the model that ships."""
    folder = tmp_path / "mixture"
    tiny = json.loads((MODEL_DIR / "config.json").read_text())
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=tiny["vocab_size"], hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
            moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
            max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=True,
            eos_token_id=tiny["eos_token_id"],
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    for file in MODEL_DIR.glob("*token*"):
        shutil.copy(file, folder)
    for file in MODEL_DIR.glob("*.jinja"):
        shutil.copy(file, folder)
    return folder


def test_a_mixture_of_experts_is_trained_and_sampled_as_one_policy(
    tmp_path: Path, mixture: Path
) -> None:
    run = Run(tmp_path, "mixed", model=mixture, rank=4, learning_rate=1e-2).finish()
    assert "each of the 4 experts in 2 layers has a LoRA of rank 2" in run.output
    rows = [row for row in run.folder.read_metrics() if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["sampler_trainer/max_logprob_difference"] < 1e-5
    # Experts have learnt in both steps, and routers are in no file.
    first, second = (
        load_file(str(run.folder.adapter_version("policy", step) / "adapter_model.safetensors"))
        for step in (1, 2)
    )
    for part in (f"{EXPERTS}.lora_B.weight", f"{EXPERTS}.base_layer.lora_B.weight"):
        assert float(first[part].abs().max()) > 0
        assert not torch.equal(first[part], second[part])
    assert not [name for name in second if "gate." in name]

    out = tmp_path / "merged"
    export(str(run.folder.root), out, merged=True, model=None, adapter=None)
    ids = torch.arange(5, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    base = AutoModelForCausalLM.from_pretrained(mixture)(ids).logits
    assert float((merged - base).detach().abs().max()) > 1e-3
