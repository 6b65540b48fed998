"""A mixture of experts through the whole machine: trained, published, sampled, exported."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from settings import nested
from training_run import Run
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.config.commands import ServeConfig
from agentrl.export.adapter import export
from agentrl.samplers.vllm.adapters import LoadedAdapter
from agentrl.samplers.vllm.server import vllm_command
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter
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
    settings = {"rank": 4, "learning_rate": 1e-2, "batch_size": 2, "runners": 1}
    run = Run(tmp_path, "mixed", model=mixture, **settings).finish()
    assert "each of the 4 experts in 2 layers has a LoRA of rank 2" in run.output
    # Which decoder samples, once: in the run's notes, and in what the gateway says.
    said = "sampled by the model's own modules, not by the lean decoder: it is a mixture of experts"
    assert run.output.count(said) == 1
    assert (run.folder.logs / "gateway.log").read_text().count(said) == 1
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


def test_vllm_is_told_of_the_experts(tmp_path: Path, mixture: Path) -> None:
    """When it is started, with each adapter, and in what ``export`` says."""
    folder = tmp_path / "v1"
    base = load_base(str(mixture), device="cpu")
    save_adapter(attach_adapter(base, "policy", lora_config(4, 8), 0), "policy", folder)
    assert LoadedAdapter("policy@1", 1, str(folder)).body()["is_3d_lora_weight"] is True
    exported = export(str(folder), tmp_path / "out", merged=False, model=str(mixture), adapter=None)
    [command] = exported.servers["vLLM"]
    assert "--enable-mixed-moe-lora-format" in command
    lora = json.loads(shlex.split(command)[-1])
    assert lora["path"] == str(tmp_path / "out")
    assert lora["is_3d_lora_weight"] is True
    for model, expected in ((str(mixture), True), (str(MODEL_DIR), False)):
        asked = nested(sampler="vllm", model=model, vllm_python=fake_vllm(tmp_path))
        command = vllm_command(ServeConfig.model_validate(asked), max_rank=8)
        assert ("--enable-mixed-moe-lora-format" in command) is expected

    dense = tmp_path / "dense"
    tiny = attach_adapter(load_base("agentrl-tiny"), "policy", lora_config(4, 8), 0)
    save_adapter(tiny, "policy", dense)
    assert set(LoadedAdapter("a", 1, str(dense)).body()) == {"lora_name", "lora_path"}


def fake_vllm(folder: Path) -> Path:
    """An interpreter that says that it has vLLM; it is not asked for more."""
    python = folder / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    return python
