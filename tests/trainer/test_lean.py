"""The sampler's own decoder: who gets it, and that adapters reach it."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_models import Asked, as_base, llama, make_adapter, qwen3, worst_difference
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from agentrl_trainer.inference import SampleParams, SamplerEngine, batched_forward
from agentrl_trainer.inference import llama_cpu as lean_module
from agentrl_trainer.inference.batched_forward import BLOCK, split_blocks
from agentrl_trainer.inference.llama_cpu import FusedLinear, RmsNorm, can_pack
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def gemma() -> PreTrainedModel:
    """Of the same parts as Llama, with another meaning: norms of 1 + weight, scaled embeddings."""
    config = GemmaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, hidden_act="silu",
        max_position_embeddings=64,
    )  # fmt: skip
    return GemmaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "why_not"),
    [
        (qwen3, None),
        (llama, None),
        (gpt2, "its decoder has other parts"),
        (gemma, "its logits differ by"),
    ],
)
def test_models_of_the_llama_family_are_decoded_lean(make, why_not: str | None) -> None:
    engine = SamplerEngine(as_base(make()))
    assert (engine.strategy != "llama cpu") == (why_not is not None)
    assert (engine.why_not_lean or "").startswith(why_not or "")
    assert bool(engine.why_not_lean) == bool(why_not)


def test_a_torch_without_its_private_operations_decodes_lean_all_the_same(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert can_pack(qwen3())
    monkeypatch.setattr(lean_module, "_onednn", SimpleNamespace())
    base = as_base(qwen3())
    plain = copy.deepcopy(base.model)
    engine = SamplerEngine(base)
    lean = engine._forward.decoder
    assert lean is not None
    assert all(product._packed is None for product in lean.base_products)
    engine.start()
    try:
        (answer,) = Asked(engine, list(range(20)), SampleParams(max_tokens=8)).wait()
    finally:
        engine.stop()
    assert worst_difference(plain, list(range(20)), answer) < 1e-5


def test_adapters_that_are_not_merged_need_the_models_own_modules() -> None:
    large = SamplerEngine(as_base(qwen3()), merge_below=0)
    assert large.strategy == "batched"
    assert "million parameters" in (large.why_not_lean or "")
    half = SamplerEngine(as_base(qwen3().to(torch.bfloat16)))
    assert half.strategy == "batched"
    assert half.why_not_lean == "its weights are bfloat16"


def test_an_adapter_of_some_layers_comes_and_goes(tmp_path: Path) -> None:
    """Of the layers whose weights are joined, only some are adapted."""
    model = qwen3()
    plain = copy.deepcopy(model)
    adapted = attach_adapter(
        as_base(copy.deepcopy(model)), "policy", lora_config(4, 8, ["k_proj", "up_proj"]), 0
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    save_adapter(adapted, "policy", tmp_path / "v1")
    engine = SamplerEngine(as_base(model))
    engine.start()
    try:
        engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
        for name, reference in (("policy", adapted), (None, plain), ("policy", adapted)):
            asked = Asked(engine, [1, 2, 3], SampleParams(max_tokens=300, seed=1), name)
            assert worst_difference(reference, asked.prompt, asked.wait()[0]) < 2e-5
    finally:
        engine.stop()
    assert worst_difference(plain, asked.prompt, asked.wait()[0]) > 0.1  # it is no small adapter


def test_many_rows_of_mixed_lengths_while_an_adapter_is_swapped(
    tmp_path: Path, monkeypatch
) -> None:
    """Products by oneDNN (where there is AVX-512), attention in blocks, versions side by side."""
    split: list[int] = []
    disordered: list[str] = []

    def blocks(lengths, view):
        found = split_blocks(lengths, view)
        split.append(len(found))
        return found

    def look() -> None:
        for lane in engine._scheduler.adapters.lanes:
            lengths = [len(s.tokens) for s in lane.decoding]
            chunks = [lengths[i : i + BLOCK] for i in range(0, len(lengths), BLOCK)]
            if any(max(a) > min(b) for a, b in itertools.pairwise(chunks)):
                disordered.append(f"{lane.version}: {chunks}")

    monkeypatch.setattr(batched_forward, "split_blocks", blocks)
    base = as_base(qwen3())
    references = {v: make_adapter(base, tmp_path / f"v{v}", seed=v) for v in (1, 2)}
    engine = SamplerEngine(base, after_round=look, prefill_chunk=1024)
    draw = random.Random(0)
    engine.start()
    try:
        asked: list[Asked] = []
        for version in (1, 2):
            engine.load_adapter("policy", version, tmp_path / f"v{version}").result(30)
            for _ in range(40):
                length = draw.choice((draw.randint(1, 30), draw.randint(200, 300)))
                ids = [draw.randrange(256) for _ in range(length)]
                params = SampleParams(max_tokens=draw.randint(10, 90))
                asked.append(Asked(engine, ids, params, "policy"))
            asked[-1 if version == 2 else 20].first.wait(30)
        for a in asked:
            (answer,) = a.wait()
            (version,) = {t.adapter_version for t in answer.tokens}
            assert worst_difference(references[version], a.prompt, answer) < 1e-5
    finally:
        engine.stop()
    assert {t.adapter_version for a in asked for t in a.answers[0].tokens} == {1, 2}
    assert max(split) > 1
    assert not disordered


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=70))
def test_blocks_reach_every_token_of_their_rows(lengths: list[int]) -> None:
    view = max(lengths) + 9
    blocks = split_blocks(lengths, view)
    assert blocks[0][0] == 0
    ends = [first for first, _ in blocks[1:]] + [len(lengths)]
    for (first, reach), end in zip(blocks, ends, strict=True):
        assert first < end
        assert max(lengths[first:end]) < reach <= view


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_is_rms_norm(scale: float) -> None:
    x = torch.randn(5, 3, 16) * scale
    weight = torch.randn(3, 16)
    expected = F.rms_norm(x, (16,), None, 1e-6) * weight
    torch.testing.assert_close(RmsNorm(weight, 1e-6)(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 15, 16, 70])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_linear_layers(rows: int, bias: bool) -> None:
    weights = [torch.randn(8, 24), torch.randn(16, 24)]
    shift = torch.randn(24) if bias else None
    x, more = torch.randn(rows, 24), torch.randn(rows, 24)
    expected = F.linear(x, torch.cat(weights), shift)
    for packed in {False, torch.backends.cpu.get_cpu_capability().startswith("AVX")}:
        product = FusedLinear(weights, shift, packed=packed)
        torch.testing.assert_close(product(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(product.plus(x, more), expected + more, rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, product.parts, weights))
