"""Small ones of many families against transformers' own forward, and the page about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import PAGE, examined, group, plain, tiny_model
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from small_learner import one_step
from small_models import Asked, as_base, make_adapter, save_model, worst_difference
from transformers import PreTrainedModel

from agentrl.export.adapter import export
from agentrl_trainer.inference import SampleParams
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import save_adapter
from agentrl_trainer.models.sources import ModelError

# One of each: recomputed rows, sparse attention, soft caps, a multimodal checkpoint with windows,
# other layers, a window that is a buffer, sinks, a state space, names that PEFT renames, chunks,
# experts, an expert that every token meets, linear attention, layers with weights in common, a
# layer's output changed in place.
ON_PAGE = [
    "bamba", "deepseek_v32", "gemma2", "gemma3", "gemma3n_text", "gpt2", "gpt_neo", "gpt_oss",
    "jamba", "laguna", "llama4", "mistral", "mixtral", "olmoe", "qwen2_moe", "qwen3_5",
    "qwen3_moe", "zamba",
]  # fmt: skip


@pytest.mark.parametrize("kind", ON_PAGE)
def test_the_page_says_what_is(kind: str) -> None:
    seen = examined(kind)
    assert seen.logprobs < 1e-5
    assert seen.gradients < 1e-5
    assert seen.row(kind) in PAGE.read_text("utf-8").splitlines(), seen


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_of_a_multimodal_model_the_language_model_learns(targets: Any, tmp_path: Path) -> None:
    """Under names which PEFT finds in the whole checkpoint."""
    whole = tiny_model("gemma3")
    base = load_base(save_model(whole, tmp_path / "base"), device="cpu")
    learner = Learner(base, rank=4, targets=targets)
    towers = {n: p.clone() for n, p in learner.base.model.named_parameters() if "vision" in n}
    one_step(learner, group(), "cross_entropy", adam=AdamParams(learning_rate=1e-2))
    after = dict(learner.base.model.named_parameters())
    assert towers
    assert all(torch.equal(after[name], before) for name, before in towers.items())

    save_adapter(learner.model, "default", tmp_path / "v1")
    saved = load_file(str(tmp_path / "v1" / "adapter_model.safetensors"))
    assert len(saved) == 2 * 2 * (7 if targets == "all-linear" else 2)
    assert all(".model.language_model.layers." in name for name in saved)
    by_peft = PeftModel.from_pretrained(whole, str(tmp_path / "v1"))
    found = get_peft_model_state_dict(by_peft)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_names_that_peft_loses_reach_the_sampler(engine_of, tmp_path: Path) -> None:
    """Unmerged, as large models are: PEFT's own layers, which read the folder themselves."""
    base = as_base(tiny_model("laguna"))
    reference = make_adapter(base, tmp_path / "v1", seed=1)
    engine = engine_of(base, merge_below=0)
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    asked = Asked(engine, [1, 2, 3], SampleParams(max_tokens=20, seed=1), "policy")
    assert worst_difference(reference, asked.prompt, asked.one()) < 1e-5


@pytest.mark.parametrize("kind", ["laguna", "gemma2", "jamba", "mixtral", "olmoe", "qwen2_moe"])
def test_a_merged_export_is_what_was_trained(kind: str, tmp_path: Path) -> None:
    reference = merged(kind, tmp_path)
    whole = load_base(str(tmp_path / "out"), device="cpu").model
    with torch.no_grad():
        for datum in group():
            off = plain(whole, datum.tokens) - plain(reference, datum.tokens)
            assert off.abs().max() < 1e-5


def test_what_cannot_be_merged_is_not(tmp_path: Path) -> None:
    """Zamba's blocks share a weight and have each a LoRA; the files could not say it."""
    with pytest.raises(ModelError, match=r"merged: .* share one weight.*without --merged"):
        merged("zamba", tmp_path)
    assert not (tmp_path / "out").exists()


def merged(kind: str, folder: Path) -> PreTrainedModel:
    """Export base and adapter as one model to ``out``; returns what they are together."""
    base = save_model(tiny_model(kind), folder / "base")
    whole = make_adapter(load_base(base, device="cpu"), folder / "v1", seed=1)
    export(str(folder / "v1"), folder / "out", merged=True, model=base, adapter=None)
    return whole


@pytest.mark.parametrize("kind", ["bert", "rembert"])
def test_models_that_look_ahead_are_refused(kind: str) -> None:
    assert "depend on tokens that come later" in examined(kind).why
    assert f"| `{kind}`" not in PAGE.read_text("utf-8")
