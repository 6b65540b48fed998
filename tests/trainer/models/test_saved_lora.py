"""LoRAs that PEFT itself made: what of them can be trained here, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from small_learner import qwen3
from small_models import as_base

from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import (
    adapter_parameters,
    attach_adapter,
    attach_saved_adapter,
    load_adapter_weights,
    lora_config,
    save_adapter,
)
from agentrl_trainer.models.saved_lora import WEIGHTS_FILE, read_lora
from agentrl_trainer.models.sources import ModelError


def made_by_peft(folder: Path, **features: Any) -> Path:
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | features)
    get_peft_model(qwen3(), config).save_pretrained(folder)
    return folder


def edited(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layers_to_transform": [1]}, "layers_to_transform"),
        ({"exclude_modules": ["v_proj"]}, "exclude_modules"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
    ],
)
def test_features_that_are_not_trained_are_refused_by_name(
    tmp_path: Path, features: dict[str, Any], name: str
) -> None:
    with pytest.raises(ModelError, match=rf"has {name} = .*merge_and_unload") as refused:
        read_lora(made_by_peft(tmp_path, **features))
    assert str(tmp_path) in str(refused.value)


def test_what_a_later_peft_adds_is_refused_and_what_it_leaves_off_is_not(tmp_path: Path) -> None:
    folder = made_by_peft(tmp_path)
    read_lora(edited(folder, use_newer_kind=False, newer_options={}))
    with pytest.raises(ModelError, match="has use_newer_kind = true"):
        read_lora(edited(folder, use_newer_kind=True))
    for fields, said in [({"peft_type": "IA3"}, 'IA3"'), ({"task_type": "SEQ_CLS"}, "task_type")]:
        with pytest.raises(ModelError, match=said):
            read_lora(edited(made_by_peft(tmp_path), **fields))


def test_a_file_of_pickles_is_refused(tmp_path: Path) -> None:
    (made_by_peft(tmp_path) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        read_lora(tmp_path)


def test_rank_scale_and_targets_are_the_folders(tmp_path: Path) -> None:
    """As Unsloth writes them: without a task type, with what its model class was."""
    unsloth = {
        "task_type": None, "base_model_name_or_path": "unsloth/Qwen3-4B-unsloth-bnb-4bit",
        "auto_mapping": {"base_model_class": "Qwen3ForCausalLM", "unsloth_fixed": True},
        "loftq_config": {},
    }  # fmt: skip
    folder = made_by_peft(tmp_path, r=16, lora_alpha=8, use_rslora=True, lora_dropout=0.1)
    found = read_lora(edited(folder, **unsloth))
    assert (found.rank, found.alpha, found.targets) == (16, 32, ["q_proj", "v_proj"])
    assert found.base == "unsloth/Qwen3-4B-unsloth-bnb-4bit"
    assert [note.split()[0] for note in found.notes] == ["use_rslora:", "lora_dropout"]


@pytest.mark.parametrize(
    "names", [("0", "1"), ("policy", "mlp"), ("policy", "weight"), ("q_proj", "lora_A")]
)
def test_an_adapter_is_whole_beside_one_that_is_named_as_a_part_of_the_model(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    base = load_base("agentrl-tiny", device="cpu", dtype="float32")
    model = attach_adapter(base, names[0], lora_config(4, 32.0), 0)
    attach_adapter(model, names[1], lora_config(4, 32.0), 1)
    for name in names:
        own = adapter_parameters(model, name)
        assert len(own) == 2 * 7 * 3
        with torch.no_grad():
            for parameter in own.values():
                parameter.normal_()
        save_adapter(model, name, tmp_path / name)
        assert len(load_file(tmp_path / name / WEIGHTS_FILE)) == 2 * 7 * 3
        kept = {key: parameter.clone() for key, parameter in own.items()}
        with torch.no_grad():
            for parameter in own.values():
                parameter.zero_()
        load_adapter_weights(model, name, tmp_path / name)
        assert all(torch.equal(own[key], kept[key]) for key in kept)


def test_a_reference_may_have_what_is_not_trained(tmp_path: Path) -> None:
    folder = made_by_peft(tmp_path, use_dora=True)
    model = attach_adapter(as_base(qwen3()), "policy", lora_config(4, 32.0), 0)
    attach_saved_adapter(model, "reference", folder)
    assert adapter_parameters(model, "reference").keys() == load_file(folder / WEIGHTS_FILE).keys()
