"""``export --merged``: what is written computes what base and adapter do, in the base's types."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.export.adapter import export
from agentrl_trainer.models.loading import checkpoint_dtype, load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter
from agentrl_trainer.models.lora_targets import no_false_warnings

IDS = torch.arange(3, 23)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def stored(model: PreTrainedModel, folder: Path) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")),
        eos_token="b",
        chat_template="{{ messages }}",
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def adapted(model: PreTrainedModel, folder: Path, **options: Any) -> PeftModel:
    """With random weights in all that the adapter has, and saved."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    with no_false_warnings():
        peft = cast(PeftModel, get_peft_model(copy.deepcopy(model), config)).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in peft.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.1)
    peft.save_pretrained(str(folder), save_embedding_layers=False)
    return peft


def merge(folder: Path, base: str) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """Merge ``folder/peft`` into a base: the new folder, its weights and its configuration."""
    out = folder / "out"
    export(str(folder / "peft"), out, merged=True, model=base, adapter=None)
    config = json.loads((out / "config.json").read_text())
    return out, load_file(str(out / "model.safetensors")), config


ATTENTION = ["q_proj", "v_proj"]
CASES = {
    "head": {"target_modules": [*ATTENTION, "lm_head"]},
    "head alone": {"target_modules": ["lm_head"]},
    "embeddings": {"target_modules": [*ATTENTION, "embed_tokens"]},
    "head saved whole": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "neither": {"target_modules": ATTENTION},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "experts and head": {
        "target_modules": ["lm_head"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
UNTIES = set(CASES) - {"neither", "experts"}


@pytest.mark.filterwarnings("ignore:.*tied")  # PEFT's, when such an adapter is made
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", CASES)
def test_a_merged_export_computes_what_base_and_adapter_do(
    case: str, tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    if "experts" in case:
        config = Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, tie_word_embeddings=tied)
        model: PreTrainedModel = Qwen3MoeForCausalLM(config).eval()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()
    peft = adapted(model, tmp_path / "peft", **CASES[case])
    expected, plain = peft(IDS).logits, model(IDS).logits
    assert (expected - plain).abs().max() > 0.01

    out, weights, written = merge(tmp_path, stored(model, tmp_path / "base"))
    whole = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(whole(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    still_tied = tied and case not in UNTIES
    assert written["tie_word_embeddings"] is still_tied
    assert ("lm_head.weight" in weights) is not still_tied
    embeddings = whole.get_input_embeddings().weight
    if case != "embeddings":
        assert torch.equal(embeddings, model.get_input_embeddings().weight)


def test_a_merged_model_is_as_large_as_its_base(tmp_path: Path) -> None:
    tiny = load_base("agentrl-tiny", device="cpu")
    base = str(tmp_path / "base")
    tiny.model.to(torch.bfloat16).save_pretrained(base)
    tiny.tokenizer.save_pretrained(base)
    assert checkpoint_dtype(base) == torch.bfloat16
    peft = attach_adapter(load_base(base, device="cpu"), "policy", lora_config(4, 8), 0)
    draw = torch.Generator().manual_seed(0)
    expected = {}
    for name, layer in peft.named_modules():
        if isinstance(layer, LoraLayer):
            a, b = layer.lora_A["policy"].weight, layer.lora_B["policy"].weight
            with torch.no_grad():
                b.copy_(torch.randn(b.shape, generator=draw) * 0.05)
            exact = layer.get_base_layer().weight.double() + 8 / 4 * b.double() @ a.double()
            expected[name.removeprefix("base_model.model.")] = exact.detach()
    save_adapter(peft, "policy", tmp_path / "peft")

    out, weights, written = merge(tmp_path, base)
    assert written["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    sizes = [(Path(folder) / "model.safetensors").stat().st_size for folder in (base, out)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1  # weights as the other files
    assert len(expected) == 21
    for name, exact in expected.items():  # rounded once: to the nearest of the type
        found = weights[f"{name}.weight"]
        assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8
        assert (found != exact.to(torch.bfloat16)).float().mean() < 1e-3
    ids = torch.arange(5, 25)[None]
    merged, plain = (
        load_base(str(folder), device="cpu").model(ids).logits.log_softmax(-1)
        for folder in (out, base)
    )
    live = peft(ids).logits.log_softmax(-1)
    chosen = live.argmax(-1, keepdim=True)
    assert (merged - live).gather(-1, chosen).abs().max() < 0.05
    assert (plain - live).gather(-1, chosen).abs().max() > 0.2


def test_a_merged_model_of_text_and_images_has_its_processor(tmp_path: Path) -> None:
    config = Gemma3Config(
        text_config={**SIZES, "num_hidden_layers": 1},
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4, image_token_index=63,
    )  # fmt: skip
    base = stored(Gemma3ForConditionalGeneration(config), tmp_path / "base")
    (tmp_path / "base/preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    peft = attach_adapter(load_base(base, device="cpu"), "policy", lora_config(4, 8), 0)
    save_adapter(peft, "policy", tmp_path / "peft")
    out, _, _ = merge(tmp_path, base)
    assert (out / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    assert not (out / "processor_config.json").exists()


def test_a_merged_model_keeps_in_float32_what_its_base_keeps(tmp_path: Path) -> None:
    """How this router corrects its scores: in bfloat16, other experts would be chosen."""
    config = Glm4MoeConfig(
        **SIZES, **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).to(torch.bfloat16)
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    exact = torch.rand(4)
    model.get_buffer(bias).data = exact
    base = stored(model, tmp_path / "base")
    peft = attach_adapter(load_base(base, device="cpu"), "policy", lora_config(4, 8, ["q_proj"]), 0)
    save_adapter(peft, "policy", tmp_path / "peft")
    _, weights, written = merge(tmp_path, base)
    assert torch.equal(weights.pop(bias), exact)
    biases = {name for name in weights if name.endswith("correction_bias")}
    assert {weights[name].dtype for name in weights.keys() - biases} == {torch.bfloat16}
    assert written["dtype"] == "bfloat16"
