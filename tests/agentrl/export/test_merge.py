"""``export --merged``: what is written computes what base and adapter do."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.export.adapter import export
from agentrl_trainer.models.lora_targets import no_false_warnings

IDS = torch.arange(3, 23)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def dense(tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()


def mixture(tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=tied,
    )
    return Qwen3MoeForCausalLM(config).eval()


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
    model = (mixture if "experts" in case else dense)(tied)
    base = stored(model, tmp_path / "base")
    peft = adapted(model, tmp_path / "peft", **CASES[case])
    expected, plain = peft(IDS).logits, model(IDS).logits
    assert (expected - plain).abs().max() > 0.01

    out = tmp_path / "out"
    export(str(tmp_path / "peft"), out, merged=True, model=base, adapter=None)

    whole = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(whole(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    still_tied = tied and case not in UNTIES
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is still_tied
    with safe_open(str(out / "model.safetensors"), "pt") as weights:
        names = set(weights.keys())
    assert ("lm_head.weight" in names) is not still_tied
    embeddings = whole.get_input_embeddings().weight
    if case != "embeddings":
        assert torch.equal(embeddings, model.get_input_embeddings().weight)
