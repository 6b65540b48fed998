"""Loading models, and adapters in and out of PEFT folders."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from peft import PeftModel
from test_sampler_models import as_base, byte_tokenizer, llama, qwen3
from transformers import GenerationConfig, T5Config

from agentrl_trainer import model as model_module
from agentrl_trainer.model import (
    ModelError,
    adapter_shapes,
    attach_adapter,
    load_adapter_weights,
    load_base,
    lora_config,
    resolve_model,
    save_adapter,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("model") / "random-qwen3"
    own = qwen3()
    own.generation_config = GenerationConfig(eos_token_id=[7, 9])
    own.save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    return target


def randomise(peft_model: PeftModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_()


def adapter_tensors(peft_model: PeftModel, name: str = "policy") -> dict[str, torch.Tensor]:
    return {k: p.detach().clone() for k, p in peft_model.named_parameters() if f".{name}." in k}


def test_load_base(folder) -> None:
    base = load_base(str(folder))
    assert base.context_length == 512
    assert base.eos_ids == {7, 9, 256}
    assert base.name == str(folder)
    assert not base.model.training
    assert not any(p.requires_grad for p in base.model.parameters())
    if base.device.type == "cpu":
        assert base.dtype == torch.float32
    assert load_base(str(folder), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_resolve_model(folder, tmp_path, monkeypatch) -> None:
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for name, message in (
        ("", "model: is empty"),
        ("./nowhere", "no folder './nowhere'"),
        (str(tmp_path), "without a config.json"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve_model(name)
    from agentrl_trainer import tiny

    monkeypatch.setattr(tiny, "MODEL_DIR", tmp_path / "gone")
    with pytest.raises(ModelError, match="rebuild them with"):
        resolve_model("agentrl-tiny")
    monkeypatch.setattr(tiny, "MODEL_DIR", folder)
    assert load_base("agentrl-tiny").name == "agentrl-tiny"


def test_code_beside_a_model_that_transformers_has_is_not_run(folder, tmp_path) -> None:
    """Many repositories keep the code from before transformers knew the model."""
    copied = tmp_path / "both"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "modeling_own.py").write_text("raise SystemExit('it was run')")
    assert type(load_base(str(copied)).model).__module__.startswith("transformers.models.qwen3")


def test_refusals(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not load 'no-such-model'"):
        load_base("no-such-model")
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_base(str(tmp_path / "t5"))
    (tmp_path / "eyes").mkdir()
    (tmp_path / "eyes" / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    with pytest.raises(ModelError, match="multimodal"):
        load_base(str(tmp_path / "eyes"))
    (tmp_path / "own").mkdir()
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": "own", **code}))
    (tmp_path / "own" / "modeling_own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ModelError, match=r"\(own\) comes with code of its own.*conversion"):
        load_base(str(tmp_path / "own"))
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="not a causal language model"):
        load_base(str(tmp_path / "vit"))
    qwen3().save_pretrained(tmp_path / "silent")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "silent")
    with pytest.raises(ModelError, match="no chat template"):
        load_base(str(tmp_path / "silent"))
    with pytest.raises(ModelError, match="dtype: 'float33'"):
        load_base(str(folder), dtype="float33")
    with pytest.raises(ModelError, match="device: 'tpux'"):
        load_base(str(folder), device="tpux")


def test_attach_is_deterministic_and_leaves_the_global_seed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = attach_adapter(as_base(qwen3()), "policy", lora_config(4, 8), seed=1)
    torch.manual_seed(5)
    one = adapter_tensors(attach_adapter(as_base(qwen3()), "policy", lora_config(4, 8), seed=1))
    torch.manual_seed(5)
    attach_adapter(first, "judge", lora_config(2, 8), seed=1)
    assert torch.equal(torch.rand(3), expected)
    two = adapter_tensors(first)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    other = adapter_tensors(attach_adapter(as_base(qwen3()), "policy", lora_config(4, 8), seed=2))
    assert any(not torch.equal(one[k], other[k]) for k in one)
    # q, k, v, o, gate, up, down in each of two layers; not the output embedding.
    assert len(one) == 2 * 7 * 2
    assert not any("lm_head" in k or "embed" in k for k in one)
    with pytest.raises(ModelError, match="already attached"):
        attach_adapter(first, "policy", lora_config(4, 8), seed=1)


def test_save_and_load_in_place(tmp_path) -> None:
    config = lora_config(4, 8)
    saved = attach_adapter(as_base(qwen3()), "policy", config, seed=1)
    randomise(saved, 3)
    target = tmp_path / "run" / "v1"
    save_adapter(saved, "policy", target)
    save_adapter(saved, "policy", target)  # replacing is allowed
    assert sorted(p.name for p in target.parent.iterdir()) == ["v1"]
    assert sorted(p.name for p in target.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = json.loads((target / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "test-model"
    assert (written["r"], written["lora_alpha"], written["peft_type"]) == (4, 8, "LORA")
    assert all(4 in shape for shape in adapter_shapes(target).values())

    loaded = attach_adapter(as_base(qwen3()), "policy", config, seed=9)
    attach_adapter(loaded, "judge", config, seed=9)
    before = {k: p for k, p in loaded.named_parameters() if ".policy." in k}
    load_adapter_weights(loaded, "policy", target)
    after = {k: p for k, p in loaded.named_parameters() if ".policy." in k}
    assert all(before[k] is after[k] for k in before)
    assert all(torch.equal(after[k], v) for k, v in adapter_tensors(saved).items())

    # PEFT itself reads the folder and computes the same.
    ids = torch.tensor([[1, 2, 3]])
    by_peft = PeftModel.from_pretrained(qwen3(), str(target))
    with torch.no_grad():
        assert torch.equal(by_peft(ids).logits, saved(ids).logits)


def test_load_explains_mismatches(tmp_path) -> None:
    saved = attach_adapter(as_base(qwen3()), "policy", lora_config(4, 8), seed=1)
    save_adapter(saved, "policy", tmp_path / "v1")
    rank8 = attach_adapter(as_base(qwen3()), "policy", lora_config(8, 8), seed=1)
    with pytest.raises(ModelError, match=r"has shape .* but adapter 'policy' has"):
        load_adapter_weights(rank8, "policy", tmp_path / "v1")
    deeper = attach_adapter(as_base(qwen3(layers=3)), "policy", lora_config(4, 8), seed=1)
    with pytest.raises(ModelError, match="lacks tensors"):
        load_adapter_weights(deeper, "policy", tmp_path / "v1")
    fewer = attach_adapter(as_base(qwen3()), "policy", lora_config(4, 8, ["q_proj"]), seed=1)
    with pytest.raises(ModelError, match="has unknown tensors"):
        load_adapter_weights(fewer, "policy", tmp_path / "v1")
    with pytest.raises(ModelError, match="does not exist"):
        load_adapter_weights(saved, "policy", tmp_path / "nowhere")
    with pytest.raises(ModelError, match="'judge' is not attached"):
        load_adapter_weights(saved, "judge", tmp_path / "v1")


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch) -> None:
    peft_model = attach_adapter(as_base(llama()), "policy", lora_config(4, 8), seed=1)
    save_adapter(peft_model, "policy", tmp_path / "v1")
    before = (tmp_path / "v1" / "adapter_model.safetensors").read_bytes()
    randomise(peft_model, 1)

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(model_module, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_adapter(peft_model, "policy", tmp_path / "v1")
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]
    assert (tmp_path / "v1" / "adapter_model.safetensors").read_bytes() == before


def test_four_bits_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match="bitsandbytes"):
        load_base("agentrl-tiny", device="cpu", load_in_4bit=True)


def test_a_base_in_four_bits_learns() -> None:
    pytest.importorskip("bitsandbytes")
    from agentrl_trainer.batches import Datum
    from agentrl_trainer.learner import AdamParams, Learner

    base = load_base("agentrl-tiny", device="cpu", load_in_4bit=True)
    kinds = {type(m).__name__ for m in base.model.modules()}
    assert "Linear4bit" in kinds
    learner = Learner(base, rank=4, adam=AdamParams(lr=1e-2))
    assert learner.why_not_shared is None
    datum = Datum([5, 6, 7, 8], [False, False, True, True], [0.0] * 4, [1.0] * 4)
    losses = [learner.step([datum, datum], "cross_entropy").loss for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1
