"""Loading models, and adapters in and out of PEFT folders."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
import torch
import transformers as hf
from peft import PeftModel
from safetensors.torch import save_file
from small_learner import one_step
from small_models import (
    Asked,
    as_base,
    byte_tokenizer,
    llama,
    qwen3,
    running_engine,
    save_model,
    training_row,
    worst_difference,
)
from transformers.quantizers import quantizer_bnb_4bit

from agentrl.export.adapter import export
from agentrl_trainer import tiny
from agentrl_trainer.inference import SampleParams
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models import lora
from agentrl_trainer.models.loading import load_base, load_facts
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter
from agentrl_trainer.models.sources import ModelError, resolve_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("model") / "random-qwen3"
    own = qwen3()
    own.generation_config = hf.GenerationConfig(eos_token_id=[7, 9])
    save_model(own, target)
    return target


def adapted(seed: int = 1, *, layers: int = 2, rank: int = 4, targets: Any = "all-linear") -> Any:
    config = lora_config(rank, 8, targets)
    return attach_adapter(as_base(qwen3(layers)), "policy", config, seed)


def weights(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's, as they are in the model."""
    return {k: p for k, p in model.named_parameters() if ".policy." in k}


def test_the_templates_end_of_a_turn_ends_an_answer_whatever_the_eos_is(tmp_path: Path) -> None:
    """As of base models that have the template of their instruct version."""
    shutil.copytree(tiny.MODEL_DIR, tmp_path / "base")
    ends = {
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": 0}, "config.json": {"eos_token_id": 0},
    }  # fmt: skip
    for name, end in ends.items():
        file = tmp_path / "base" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | end))
    base = str(tmp_path / "base")
    assert load_base(base, device="cpu").eos_ids == load_facts(base).eos_ids == {0, 2}


def test_load_base(folder) -> None:
    base = load_base(str(folder))
    assert (base.name, base.context_length, base.eos_ids) == (str(folder), 512, {7, 9, 256})
    assert not base.model.training
    assert not any(p.requires_grad for p in base.model.parameters())
    if base.device.type == "cpu":
        assert base.dtype == torch.float32
    assert load_base(str(folder), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_resolve_model(folder, tmp_path, monkeypatch) -> None:
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for name, message in (
        ("", "without a config.json"),
        ("./nowhere", "no folder './nowhere'"),
        (str(tmp_path), "without a config.json"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve_model(name)
    monkeypatch.setattr(tiny, "MODEL_DIR", tmp_path / "gone")
    with pytest.raises(ModelError, match="rebuild them with"):
        resolve_model("agentrl-tiny")
    monkeypatch.setattr(tiny, "MODEL_DIR", folder)
    assert load_base("agentrl-tiny").name == "agentrl-tiny"


def test_a_tokenizer_with_code_of_its_own(tmp_path, monkeypatch) -> None:
    """Of a model which transformers has, whose own old code stays unused (Moonlight's files)."""
    copied = tmp_path / "own-tokenizer"
    save_model(llama(), copied)
    for name, entry in (
        ("config.json", {"AutoConfig": "old.Config", "AutoModelForCausalLM": "old.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_own.Own", None]}),
    ):
        config = json.loads((copied / name).read_text())
        config["auto_map"] = entry
        if "tokenizer" in name:
            config["tokenizer_class"] = "Own"
        (copied / name).write_text(json.dumps(config))
    (copied / "old.py").write_text("raise SystemExit('it was run')")
    (copied / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    monkeypatch.setattr(hf.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for load in (load_facts, load_base):
        with pytest.raises(ModelError, match="trust_remote_code"):
            load(str(copied))
        assert type(load(str(copied), trust_remote_code=True).tokenizer).__name__ == "Own"


def test_refusals(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hf.T5Config().save_pretrained(tmp_path / "t5")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    qwen3().save_pretrained(tmp_path / "silent")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "silent")
    for name, options, message in (
        ("no-such-model", {}, "could not load 'no-such-model'"),
        (str(tmp_path / "t5"), {}, "encoder-decoder"),
        (str(tmp_path / "vit"), {}, "not a causal language model"),
        (str(tmp_path / "silent"), {}, "no chat template"),
        (str(folder), {"dtype": "float33"}, "dtype: 'float33'"),
        (str(folder), {"device": "tpux"}, "device: 'tpux'"),
    ):
        with pytest.raises(ModelError, match=message):
            load_base(name, **options)


OWN_CODE = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=257, hidden_size=16, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)

class Own(PreTrainedModel, GenerationMixin):
    '''The mean of all tokens so far; no cache.'''
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache=None):
        steps = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)[:, None]
        mean = self.embed(input_ids).cumsum(1) / steps
        return CausalLMOutput(logits=self.head(torch.tanh(self.mix(mean))))
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A model which transformers does not have, as people publish theirs."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN_CODE)
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    torch.manual_seed(0)
    mean = {"embed.weight": (257, 16), "mix.weight": (16, 16), "mix.bias": (16,)}
    head = {"head.weight": (257, 16), "head.bias": (257,)}
    save_file(
        {name: torch.randn(shape) for name, shape in (mean | head).items()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_code_of_its_own_is_run_for_those_who_trust_it(own: str, tmp_path, monkeypatch) -> None:
    for load in (load_base, load_facts):
        with pytest.raises(ModelError, match=r"\(own\) comes with code .*trust_remote_code"):
            load(own)
    monkeypatch.setattr(hf.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_facts(own, trust_remote_code=True).context_length == 2**17

    learner = Learner(load_base(own, device="cpu", trust_remote_code=True), rank=4)
    assert set(learner.model.peft_config["default"].target_modules) == {"mix"}
    rows = [training_row([5, 6, 7, 8], start=2)] * 2
    first, *_, last = (one_step(learner, rows, "cross_entropy").loss for _ in range(5))
    assert last < first
    save_adapter(learner.model, "default", tmp_path / "v1")

    with running_engine(load_base(own, device="cpu", trust_remote_code=True)) as engine:
        assert engine.strategy == "row by row, recomputed"
        engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
        answer = Asked(engine, [5, 6], SampleParams(max_tokens=9, seed=1), "policy").one()
    assert len(answer.tokens) == 9
    assert worst_difference(learner.base.model, [5, 6], answer) < 1e-5

    options: dict[str, Any] = {"merged": True, "model": own, "adapter": None}
    with pytest.raises(ModelError, match="trust_remote_code"):
        export(str(tmp_path / "v1"), tmp_path / "out", **options)
    done = export(str(tmp_path / "v1"), tmp_path / "out", **options, trust_remote_code=True)
    assert all("--trust-remote-code" in done.servers[name][0] for name in ("agentrl", "vLLM"))
    merged = load_base(str(tmp_path / "out"), device="cpu", trust_remote_code=True).model
    assert worst_difference(merged, [5, 6], answer) < 1e-5


TEXT = {"vocab_size": 257, "hidden_size": 32, "pad_token_id": 0}
LONG: dict[str, Any] = {
    "max_position_embeddings": 512, "num_attention_heads": 4,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (hf.LlamaConfig(**TEXT, max_position_embeddings=512), 512),
        (hf.MambaConfig(**TEXT), 1000),  # the tokenizer's
        (hf.BloomConfig(**TEXT, seq_length=300), 300),
        (hf.Phi3Config(**TEXT, **LONG, original_max_position_embeddings=128), 128),
    ],
)
def test_context_lengths(config: Any, length: int, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 1000
    tokenizer.save_pretrained(tmp_path)
    assert load_facts(str(tmp_path)).context_length == length


def test_attach_is_deterministic_and_leaves_the_global_seed() -> None:
    first = adapted()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    attach_adapter(first, "judge", lora_config(2, 8), seed=1)
    assert torch.equal(torch.rand(3), expected)
    one, two, other = weights(adapted()), weights(first), weights(adapted(seed=2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)
    # q, k, v, o, gate, up, down in each of two layers; not the output embedding.
    assert len(one) == 2 * 7 * 2
    assert not any("lm_head" in k or "embed" in k for k in one)
    with pytest.raises(ModelError, match="already attached"):
        attach_adapter(first, "policy", lora_config(4, 8), seed=1)


def test_save_and_load_in_place(tmp_path) -> None:
    saved = adapted()
    for parameter in weights(saved).values():
        torch.nn.init.normal_(parameter)
    target = tmp_path / "run" / "v1"
    save_adapter(saved, "policy", target)
    save_adapter(saved, "policy", target)  # replacing is allowed
    files = {p.relative_to(target.parent).as_posix() for p in target.parent.rglob("*")}
    assert files == {"v1", "v1/adapter_config.json", "v1/adapter_model.safetensors"}
    written = json.loads((target / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "test-model"
    assert (written["r"], written["lora_alpha"], written["peft_type"]) == (4, 8, "LORA")

    loaded = adapted(seed=9)
    attach_adapter(loaded, "judge", lora_config(4, 8), seed=9)
    before = weights(loaded)
    lora.load_adapter_weights(loaded, "policy", target)
    after = weights(loaded)
    assert all(before[k] is after[k] for k in before)
    assert all(torch.equal(after[k], v) for k, v in weights(saved).items())

    # PEFT itself reads the folder and computes the same.
    ids = torch.tensor([[1, 2, 3]])
    by_peft = PeftModel.from_pretrained(qwen3(), str(target))
    with torch.no_grad():
        assert torch.equal(by_peft(ids).logits, saved(ids).logits)


@pytest.mark.parametrize(
    ("layers", "rank", "targets", "message"),
    [
        (2, 8, "all-linear", r"is \[4, 96\] in the folder and \[8, 96\] in the adapter"),
        (3, 4, "all-linear", r"layers\.2.* is missing in the folder"),
        (2, 4, ["q_proj"], "down_proj.* and missing in the adapter"),
    ],
)
def test_load_explains_mismatches(
    layers: int, rank: int, targets: Any, message: str, tmp_path: Path
) -> None:
    save_adapter(adapted(), "policy", tmp_path)
    other = adapted(layers=layers, rank=rank, targets=targets)
    with pytest.raises(ModelError, match=message):
        lora.load_adapter_weights(other, "policy", tmp_path)


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch) -> None:
    peft_model = adapted()
    save_adapter(peft_model, "policy", tmp_path / "v1")
    before = (tmp_path / "v1" / "adapter_model.safetensors").read_bytes()
    torch.nn.init.normal_(next(iter(weights(peft_model).values())))

    full = Mock(side_effect=OSError("no space left"))
    monkeypatch.setattr(lora, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_adapter(peft_model, "policy", tmp_path / "v1")
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]
    assert (tmp_path / "v1" / "adapter_model.safetensors").read_bytes() == before


def test_four_bits_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ModelError, match="bitsandbytes"):
        load_base("agentrl-tiny", device="cpu", load_in_4bit=True)
