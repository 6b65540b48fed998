"""Every causal language model that transformers has, very small and random."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from test_sampler_models import Asked, byte_tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentrl_trainer.batches import Datum
from agentrl_trainer.learner import AdamParams, Learner
from agentrl_trainer.model import ModelError, load_adapter_weights, load_base
from agentrl_trainer.sampler import SampleParams, SamplerEngine

VOCAB = 257
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
    # lengths from which on something else happens: short, so that it does
    "sliding_window": 8, "attention_chunk_size": 8, "index_topk": 6, "window_size": 8,
    "floor_scale": 8,
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

_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_MLA = {"num_key_value_heads": 4}
ALSO: dict[str, dict[str, Any]] = {
    "axk1": _MLA, "axk2": _MLA, "deepseek_v2": _MLA, "deepseek_v3": _MLA, "deepseek_v32": _MLA,
    "dots3_note_text": _MLA, "glm4_moe_lite": _MLA, "glm_moe_dsa": _MLA, "youtu": _MLA, "minicpm3": _MLA,
    "longcat_flash": _MLA, "kimi_linear": _MLA,
    "bailing_hybrid": {**_MLA, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": _LINEAR, "qwen3_5_text": _LINEAR, "qwen3_5_moe_text": _LINEAR, "qwen4_exp_text": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "intermediate_size": 40, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": {"vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_unified_text": {"vocab_size_per_layer_input": 257, "hidden_size_per_layer_input": 8, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native", "step_kernel": "native", "chunk_size": 8},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"]},
    "zamba2": {"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"]},
    "kimi_linear": {**_MLA, **_LINEAR, "linear_head_dim": 8, "linear_num_heads": 4, "head_dim": 8},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]},
    "cohere": {"logit_scale": 0.5}, "cohere2": {"logit_scale": 0.5}, "cohere2_moe": {"logit_scale": 0.5},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0, "chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native", "step_kernel": "native", "chunk_size": 8, "head_dim": None},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "hidden_size": 32},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4, "n_embd": 32},
    "gptj": {"rotary_dim": 4},
    "dots1": {"n_shared_experts": 1},
    "bert": {"is_decoder": True},
}


MULTIMODAL = (
    "gemma3", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    "llama4", "mistral3", "mllama", "llava", "llava_next", "internvl", "smolvlm", "idefics3", "glm4v", "glm4v_moe", "glm46v",
    "aya_vision", "lfm2_vl", "cohere2_vision", "ovis2", "paligemma", "kimi_k25", "ernie4_5_vl_moe", "gemma3n", "qwen2_audio", "voxtral", "phi4_multimodal", "minicpmv4_6",
)


_EYES = "siglip_vision_model"
_MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}}
ALSO |= {
    "gemma3": {"text_config": "gemma3_text", "vision_config": _EYES},
    "paligemma": {"text_config": "gemma", "vision_config": _EYES},
    "mistral3": {"text_config": "mistral", "vision_config": "pixtral"},
    "llava": {"text_config": "llama", "vision_config": "clip_vision_model"},
    "llava_next": {"text_config": "mistral", "vision_config": "clip_vision_model"},
    "aya_vision": {"text_config": "cohere2", "vision_config": _EYES},
    "cohere2_vision": {"text_config": "cohere2", "vision_config": _EYES},
    "internvl": {"text_config": "qwen2"}, "smolvlm": {"text_config": "llama"}, "idefics3": {"text_config": "llama"},
    "lfm2_vl": {"text_config": "lfm2", "vision_config": "siglip2_vision_model"}, "ovis2": {"text_config": "qwen2"},
    "kimi_k25": {"text_config": "deepseek_v3"}, "glm46v": {"text_config": "glm4v_moe_text", "vision_config": "glm4v_vision"},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}, "minicpmv4_6": {"text_config": "qwen3_5_text"},
    "qwen2_vl": _MROPE, "qwen2_5_vl": _MROPE, "glm4v": _MROPE, "glm4v_moe": {"text_config": "glm4v_moe_text"},
    "ernie4_5_vl_moe": {"text_config": {**_MROPE["text_config"], "moe_intermediate_size": [16, 16]}},
    "qwen2_audio": {"text_config": "qwen2", "audio_config": "qwen2_audio_encoder"},
    "voxtral": {"text_config": "llama", "audio_config": "voxtral_encoder"},
}


def tiny_config(kind: str) -> PreTrainedConfig:
    return _small(CONFIG_MAPPING[kind], ALSO.get(kind, {}))


def _small(cls: type[PreTrainedConfig], also: dict[str, Any]) -> PreTrainedConfig:
    names = _names(cls)
    values = {name: value for name, value in SMALL.items() if name in names}
    subs = getattr(cls, "sub_configs", {})
    for name, sub in subs.items():
        part = also.get(name)
        if isinstance(part, str):
            values[name] = _small(CONFIG_MAPPING[part], ALSO.get(part, {}))
        elif isinstance(sub, type) and issubclass(sub, PreTrainedConfig):
            values[name] = _small(sub, {**ALSO.get(sub.model_type, {}), **(part or {})})
    return cls(**{**values, **{k: v for k, v in also.items() if k not in subs}})


def _names(cls: type[PreTrainedConfig]) -> set[str]:
    found = set(inspect.signature(cls.__init__).parameters)
    for base in cls.__mro__:
        found |= set(getattr(base, "__annotations__", {}))
    return found | set(getattr(cls, "attribute_map", {}))


def tiny_model(kind: str) -> PreTrainedModel:
    config = tiny_config(kind)
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForMultimodalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > 20_000_000:
        raise ValueError(f"it is not small: {size}")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # none left at zero or one: mistakes would not show
            if parameter.is_floating_point() and parameter.std(unbiased=False) == 0:
                parameter += torch.randn_like(parameter) * 0.1
    return model



def examine(kind: str, folder: Path) -> dict[str, str]:
    """What of agentrl works with the model, and how far it is from transformers' own forward."""
    found: dict[str, str] = {}
    try:
        model = tiny_model(kind)
        model.save_pretrained(folder / "base")
        byte_tokenizer().save_pretrained(folder / "base")
        base = load_base(str(folder / "base"), device="cpu")
    except ModelError as error:
        return {"load": f"refused: {error}"}
    except Exception as error:
        return {"load": f"zoo: {type(error).__name__}: {error}"}
    found["load"] = "ok"
    try:
        learner = Learner(base, rank=4, alpha=8.0, adam=AdamParams(lr=3e-2))
    except Exception as error:
        return found | {"train": f"refused: {type(error).__name__}: {error}"}
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in learner.model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                p.normal_(0, 0.1)
    learner.save_adapter("default", folder / "v1")
    try:
        found |= _train(learner, folder)
    except Exception as error:
        import traceback; traceback.print_exc()
        found["train"] = f"fails: {type(error).__name__}: {error}"
    try:
        learner.save_adapter("default", folder / "v2")
        found |= _sample(folder)
    except ModelError as error:
        found["sample"] = f"refused: {error}"
    except Exception as error:
        import traceback; traceback.print_exc()
        found["sample"] = f"fails: {type(error).__name__}: {error}"
    return found


def reference(folder: Path, version: str) -> Any:
    own = load_base(str(folder / "base"), device="cpu").model
    model = PeftModel.from_pretrained(own, str(folder / version), is_trainable=True).eval()
    load_adapter_weights(model, "default", folder / version)  # PEFT loses some of Laguna's
    return model


def plain(model: Any, row: list[int]) -> torch.Tensor:
    """[len(row) - 1] log-probs of the tokens after the first."""
    ids = torch.tensor([row])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def group() -> list[Datum]:
    draw = random.Random(0)
    ids = lambda n: [draw.randrange(3, 250) for _ in range(n)]
    prompt = ids(19)
    turn = prompt + ids(6)
    rows = [turn + ids(13), turn + ids(4), prompt + ids(9), prompt + ids(1), ids(5)]
    return [Datum(r, [i > 3 for i in range(len(r))], [0.0] * len(r), [draw.gauss(0, 1) for _ in r]) for r in rows]


def _train(learner: Learner, folder: Path) -> dict[str, str]:
    datums = group()
    truth = reference(folder, "v1")
    worst = 0.0
    for datum, values in zip(datums, learner.forward(datums), strict=True):
        lp = plain(truth, datum.tokens)
        mask = torch.tensor(datum.mask[1:])
        (lp * torch.tensor(datum.advantages[1:]) * mask).sum().neg().backward()
        worst = max(worst, float(((torch.tensor(values[1:]) - lp.detach()) * mask).abs().max()))
    learner.forward_backward(datums, "cross_entropy", normalize_by=1.0)
    expected = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None}
    missing = len(expected.keys() ^ got.keys())
    scale = max(float(g.abs().max()) for g in expected.values())
    off = max(float((got[n] - expected[n]).abs().max()) for n in expected if n in got) / scale
    said = "shared" if learner.why_not_shared is None else f"rows ({learner.why_not_shared})"
    stats = learner.optim_step()
    assert not stats.skipped_non_finite
    return {"train": said, "logprobs": f"{worst:.1e}", "gradients": f"{off:.1e}" + (f" {missing} differ in having one" if missing else "")}


def _sample(folder: Path) -> dict[str, str]:
    engine = SamplerEngine(load_base(str(folder / "base"), device="cpu"))
    engine.start()
    worst = 0.0
    try:
        for version in (1, 2):
            engine.load_adapter("policy", version, folder / f"v{version}").result(60)
            truth = reference(folder, f"v{version}")
            rows = [d.tokens for d in group()]
            asked = [Asked(engine, row, SampleParams(max_tokens=6 + 4 * i, n=1 + i % 2, seed=i), "policy") for i, row in enumerate(rows)]
            for a in asked:
                a.wait()
            first = asked[0].prompt + asked[0].answers[0].ids
            asked.append(Asked(engine, first + [7, 8, 9], SampleParams(max_tokens=12, seed=9), "policy"))
            for a in asked:
                for answer in a.wait():
                    assert answer.end is not None and answer.end.error is None, answer.end
                    with torch.no_grad():
                        lp = plain(truth, a.prompt + answer.ids)[len(a.prompt) - 1:]
                    got = torch.tensor([t.logprob for t in answer.tokens])
                    worst = max(worst, float((got - lp).abs().max()))
                    assert {t.adapter_version for t in answer.tokens} == {version}
        reused = engine.stats().reused_tokens
    finally:
        engine.stop()
    return {"sample": engine._forward.how, "sampled": f"{worst:.1e}", "reused": str(reused)}


if __name__ == "__main__":
    import sys, time, tempfile, json, warnings
    warnings.simplefilter("ignore")
    from transformers.utils.logging import set_verbosity_error
    set_verbosity_error()
    torch.set_num_threads(1)
    for kind in sys.argv[2:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        t = time.time()
        with tempfile.TemporaryDirectory() as tmp:
            row = examine(kind, Path(tmp))
        with open(sys.argv[1], "a") as out:
            out.write(json.dumps({"kind": kind, **row, "s": round(time.time() - t, 1)}) + "\n")
