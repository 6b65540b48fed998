"""Every causal language model that transformers has, very small and random: what works with it.

``python tests/support/model_zoo.py`` goes over all of them and writes the table of docs/models.md;
``python tests/support/model_zoo.py KIND...`` says it of some. test_model_zoo.py does so of a few.
"""

from __future__ import annotations

import inspect
import random
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from small_models import (
    Asked,
    byte_tokenizer,
    lora_b_from,
    running_engine,
    training_row,
    worst_difference,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import set_verbosity_error

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.inference import SampleParams
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import load_adapter_weights, save_adapter
from agentrl_trainer.models.sources import ModelError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_START, _END = "<!-- made by tests/support/model_zoo.py -->", "<!-- until here -->"
VOCAB = 257
MOST_PARAMETERS = 20_000_000
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "dim_model": 32, "emb_dim": 32,
    "intermediate_size": 40, "ffn_hidden_size": 40, "n_inner": 40, "dim_ff": 40, "dff": 40,
    "ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_ffn_dim": 40, "d_inner": 40,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2,
    "decoder_layers": 2, "encoder_layers": 1, "num_decoder_layers": 2, "num_encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "n_head_kv": 2, "num_kv_heads": 2,
    "head_dim": 8, "d_head": 8, "kv_channels": 8, "dim_head": 8, "attention_head_dim": 8,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256,
    "initializer_range": 0.15, "init_std": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 256,
    # lengths from which on something else happens: short, so that it does in the rows below; longer
    # than agentrl's own trial of a model, so that windows have to be shrunk there
    "sliding_window": 34, "attention_chunk_size": 34, "index_topk": 34, "window_size": 34,
    "floor_scale": 34,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_top_k": 2, "moe_k": 2, "moe_topk": 2, "num_experts_per_token": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "expert_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 40, "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 16,
    # state spaces and linear attention
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
    "mamba_dt_rank": 4, "time_step_rank": 4, "chunk_size": 8, "mamba_chunk_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "lru_width": 32, "mamba_d_ssm": 64, "mamba_headdim": 8,
    "conv_L_cache": 3, "use_mambapy": False,
    # towers
    "depth": 1, "embed_dim": 32, "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
    "deepstack_visual_indexes": [0], "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32, "mm_tokens_per_image": 4, "fullatt_block_indexes": [0],
    "image_token_id": 253, "image_token_index": 253, "video_token_id": 252,
    "boi_token_index": 251, "eoi_token_index": 251, "vision_start_token_id": 251,
    "vision_end_token_id": 251, "vision_token_id": 253, "audio_token_id": 250,
    "boi_token_id": 251, "eoi_token_id": 251, "boa_token_id": 251, "eoa_token_id": 251,
    "mrope_section": [1, 1, 2],
}  # fmt: skip

# What a family wants besides, or instead. A part's name stands for the kind it is of.
# fmt: off
_MLA = {"num_key_value_heads": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_CONV = {"layer_types": ["conv", "full_attention"]}
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
_LOGITS = {"logit_scale": 0.5}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                              "rope_theta": 10000.0}}
_WHOLE_ROPE = {"rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_EYES = "siglip_vision_model"
ALSO: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text",
         "glm4_moe_lite", "glm_moe_dsa", "youtu", "longcat_flash"), _MLA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONV),
    **dict.fromkeys(("laguna", "mellum"), _WINDOW),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), _LOGITS),
    **{kind: {"text_config": _MROPE} for kind in ("qwen2_vl", "qwen2_5_vl", "glm4v")},
    "minicpm3": {**_MLA, "scale_emb": 1, "dim_model_base": 32},
    "bailing_hybrid": {**_MLA, **_LINEAR},
    "kimi_linear": {**_MLA, **_LINEAR, "linear_head_dim": 8, "linear_num_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "bamba": {"attn_layer_indices": [1]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2,
               "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0, "head_dim": None, "step_kernel": "native",
              "chunkwise_kernel": "chunkwise--native_autograd", "chunk_size": 8, "num_heads": 4,
              "sequence_kernel": "native_sequence__native"},
    "gemma3n_text": {**_PER_LAYER, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 4,
                     "intermediate_size": 40, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": {**_PER_LAYER, **_WINDOW, "global_head_dim": 16},
    "gemma4_unified_text": {**_PER_LAYER, **_WINDOW, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1}, "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "gemma3": {"text_config": "gemma3_text", "vision_config": _EYES},
    "paligemma": {"text_config": "gemma", "vision_config": _EYES},
    "mistral3": {"text_config": "mistral", "vision_config": "pixtral"},
    "llava": {"text_config": "llama", "vision_config": "clip_vision_model"},
    "llava_next": {"text_config": "mistral", "vision_config": "clip_vision_model"},
    "aya_vision": {"text_config": "cohere2", "vision_config": _EYES},
    "cohere2_vision": {"text_config": "cohere2", "vision_config": _EYES},
    "lfm2_vl": {"text_config": "lfm2", "vision_config": "siglip2_vision_model"},
    "glm4v_moe": {"text_config": "glm4v_moe_text"}, "glm4v_moe_text": _WHOLE_ROPE,
    "glm46v": {"text_config": "glm4v_moe_text", "vision_config": "glm4v_vision"},
    "internvl": {"text_config": "qwen2"}, "ovis2": {"text_config": "qwen2"},
    "smolvlm": {"text_config": "llama"}, "idefics3": {"text_config": "llama"},
    "kimi_k25": {"text_config": "deepseek_v3"}, "minicpmv4_6": {"text_config": "qwen3_5_text"},
    "ernie4_5_vl_moe": {"text_config": {**_MROPE, "moe_intermediate_size": [16, 16]}},
    "qwen2_audio": {"text_config": "qwen2", "audio_config": "qwen2_audio_encoder"},
    "voxtral": {"text_config": "llama", "audio_config": "voxtral_encoder"},
}
MULTIMODAL = (
    "aya_vision", "cohere2_vision", "ernie4_5_vl_moe", "gemma3", "gemma3n", "gemma4", "glm46v",
    "glm4v", "glm4v_moe", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llama4", "llava",
    "llava_next", "minicpmv4_6", "mistral3", "mllama", "ovis2", "paligemma", "phi4_multimodal",
    "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "voxtral",
)
# fmt: on


def _small(cls: type[PreTrainedConfig], also: dict[str, Any]) -> PreTrainedConfig:
    names = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "attribute_map", {})}
    names = names.union(*(getattr(base, "__annotations__", {}) for base in cls.__mro__))
    values = {name: value for name, value in SMALL.items() if name in names}
    parts = getattr(cls, "sub_configs", {})
    for name, part in parts.items():
        own = also.get(name)
        if isinstance(own, str):
            values[name] = _small(CONFIG_MAPPING[own], ALSO.get(own, {}))
        elif isinstance(part, type) and issubclass(part, PreTrainedConfig):
            values[name] = _small(part, {**ALSO.get(part.model_type, {}), **(own or {})})
    return cls(**{**values, **{name: value for name, value in also.items() if name not in parts}})


def tiny_model(kind: str) -> PreTrainedModel:
    config = _small(CONFIG_MAPPING[kind], ALSO.get(kind, {}))
    text = config.get_text_config() is config
    auto = AutoModelForCausalLM if text else AutoModelForMultimodalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its small one has {size:,} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # none left at zero or one: mistakes would not show
            if parameter.is_floating_point() and parameter.std(unbiased=False) == 0:
                parameter += torch.randn_like(parameter) * 0.1
    return model


@dataclass
class Seen:
    """What of agentrl works with a model, and how far it is from transformers' own forward."""

    trains: str = ""
    """shared or rows; empty: not tried, or refused."""
    samples: str = ""
    logprobs: float = 0.0
    """Largest difference, of the trainer's and of the sampler's."""
    gradients: float = 0.0
    """Largest difference, as a share of the largest gradient."""
    why: str = ""
    """No model could be made, or it is refused."""

    def row(self, kind: str) -> str:
        above = (f"{limit:.0e}" for limit in (1e-5, 1e-4, 1e-3) if self.logprobs <= limit)
        return f"| `{kind}` | {self.trains} | {self.samples} | {next(above, 'differs')} |"


def examine(kind: str, folder: Path) -> Seen:
    try:
        model = tiny_model(kind)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 23)[None], use_cache=False)
        model.save_pretrained(folder / "base")
    except Exception as error:  # of the zoo, not of agentrl
        return Seen(why=f"not tried: {type(error).__name__}: {error}")
    byte_tokenizer().save_pretrained(folder / "base")
    try:
        base = load_base(str(folder / "base"), device="cpu")
        learner = Learner(base, rank=4, alpha=8.0, adam=AdamParams(learning_rate=3e-2))
    except ModelError as error:
        return Seen(why=f"refused: {error}".replace(f"{folder}/base", kind))
    lora_b_from(1, learner.model)
    save_adapter(learner.model, "default", folder / "v1")
    seen = Seen(trains="shared" if learner.why_not_shared is None else "rows")
    seen.logprobs, seen.gradients = _train(learner, folder)
    save_adapter(learner.model, "default", folder / "v2")
    try:
        seen.samples, sampled = _sample(folder)
        seen.logprobs = max(seen.logprobs, sampled)
    except ModelError:
        seen.samples = "refused"
    return seen


def reference(folder: Path, version: str) -> PeftModel:
    """In float64, where the model can: what a log-prob is off by is then ours alone."""
    own = load_base(str(folder / "base"), device="cpu").model
    own.set_experts_implementation("eager")  # grouped products know no float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(own, str(folder / version), is_trainable=True).eval()
    load_adapter_weights(model, "default", folder / version)  # PEFT loses some of Laguna's
    return model if "inkling2" in own.config.model_type else model.double()


def plain(model: Any, row: list[int]) -> torch.Tensor:
    """[len(row) - 1] log-probs of the tokens after the first, of a row by itself."""
    ids = torch.tensor([row])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def group(vocabulary: int = 250) -> list[TrainingRow]:
    """Rows which share a prompt, and two of them a turn; beyond the small models' windows."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    prompt = ids(27)
    turn = prompt + ids(6)
    rows = [turn + ids(13), turn + ids(4), prompt + ids(9), prompt + ids(1), ids(5)]
    made = [training_row(row, start=4) for row in rows]
    return [replace(row, advantages=[draw.gauss(0, 1) for _ in row.tokens]) for row in made]


def _train(learner: Learner, folder: Path) -> tuple[float, float]:
    """One step; how far log-probs and gradients before it are from the reference's."""
    datums = group()
    truth = reference(folder, "v1")
    worst = 0.0
    for datum, values in zip(datums, learner.forward(datums), strict=True):
        logprobs = plain(truth, datum.tokens)
        mask = torch.tensor(datum.mask[1:])
        (logprobs * torch.tensor(datum.advantages[1:]) * mask).sum().neg().backward()
        worst = max(worst, float(((torch.tensor(values[1:]) - logprobs) * mask).abs().max()))
    learner.forward_backward(datums, "cross_entropy", normalize_by=1.0)
    expected = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    off = max(float((found[n] - expected[n]).abs().max()) for n in expected) / scale
    assert not learner.optim_step().skipped_non_finite
    return worst, off


def _sample(folder: Path) -> tuple[str, float]:
    """Prompts of several lengths at once, a second turn, given rows, and all again after a swap."""
    worst = 0.0
    with running_engine(load_base(str(folder / "base"), device="cpu")) as engine:
        for version in (1, 2):
            engine.load_adapter("policy", version, folder / f"v{version}").result(60)
            truth = reference(folder, f"v{version}")
            asked = [
                Asked(engine, datum.tokens, SampleParams(3 + 2 * i, n=1 + i % 2, seed=i), "policy")
                for i, datum in enumerate(group())
            ]
            (first,) = asked[0].wait()
            turn = [*asked[0].prompt, *first.ids, 7, 8, 9]
            asked.append(Asked(engine, turn, SampleParams(6, seed=9), "policy"))
            for one in asked:
                for answer in one.wait():
                    assert answer.end is not None
                    assert answer.end.error is None, answer.end.error
                    assert {t.adapter_version for t in answer.tokens} == {version}
                    worst = max(worst, worst_difference(truth, one.prompt, answer))
            rows = [datum.tokens for datum in group()]
            for row, scored in zip(rows, engine.score(rows, "policy").result(60), strict=True):
                with torch.no_grad():
                    off = torch.tensor(scored.logprobs[1:]) - plain(truth, row)
                worst = max(worst, float(off.abs().max()))
        assert engine.stats().reused_tokens > 0
    return engine.strategy, worst


def examined(kind: str) -> Seen:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models' own code: complex numbers, unused arguments
        return examine(kind, Path(folder))


def page() -> str:
    """docs/models.md with the table made anew."""
    rows: list[str] = []
    refused: dict[str, list[str]] = {}
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL}):
        try:
            seen = examined(kind)
        except Exception as error:
            seen = Seen(why=f"fails: {type(error).__name__}: {error}")
        sys.stderr.write(f"{kind}: {seen}\n")
        if seen.trains:
            rows.append(seen.row(kind))
        else:
            refused.setdefault(_reason(seen.why), []).append(f"`{kind}`")
    left = [f"- {reason}: {', '.join(names)}" for reason, names in sorted(refused.items())]
    before, rest = PAGE.read_text("utf-8").split(_START)
    after = rest.split(_END)[1]
    head = "| `model_type` | trains | sampled | off by |\n|---|---|---|---|"
    table = "\n".join([head, *rows, "", "Not among them:", "", *left])
    return f"{before}{_START}\n{table}\n{_END}{after}"


def _reason(why: str) -> str:
    if "come later" in why:
        return "refused, for their log-probs depend on tokens that come later"
    if "more than tokens" in why:
        return "refused, for the small one's forward fails on short rows"
    if why.startswith("not tried"):
        return "not tried, for no small one could be made here"
    return why[:90]


if __name__ == "__main__":
    set_verbosity_error()
    torch.set_num_threads(1)
    if names := sys.argv[1:]:
        for name in names:
            sys.stdout.write(f"{name}: {examined(name)}\n")
    else:
        PAGE.write_text(page(), "utf-8")
