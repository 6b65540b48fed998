"""Which models the sampler serves, and that each is served exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from model_zoo import tiny_model
from small_models import Asked, as_base, llama, make_adapter, settle, worst_difference

from agentrl_trainer.inference import SampleParams, SamplerEngine
from agentrl_trainer.inference.batched_forward import BatchedForward
from agentrl_trainer.inference.kv_cache import Part
from agentrl_trainer.inference.llama_cpu import LlamaCpuForward
from agentrl_trainer.inference.prefix_cache import KVPool
from agentrl_trainer.inference.recurrent_cache import Past, RowByRowForward, tensor_bytes
from agentrl_trainer.models.loading import BaseModel
from agentrl_trainer.models.sources import ModelError


def small(kind: str) -> BaseModel:
    model = tiny_model(kind)
    model.config.max_position_embeddings = 256  # some have no limit
    return as_base(model)


@pytest.mark.parametrize(
    ("kind", "strategy"), [("qwen3", "llama cpu"), ("llama", "llama cpu"), ("gpt2", "batched")]
)
def test_the_quickest_strategy_that_applies_is_exact(engine_of, kind: str, strategy: str) -> None:
    base = small(kind)
    reference = copy.deepcopy(base.model)
    engine = engine_of(base)
    assert engine.strategy == strategy
    answer = Asked(engine, [1, 2, 3], SampleParams(max_tokens=20, seed=1)).one()
    assert len(answer.tokens) == 20
    assert worst_difference(reference, [1, 2, 3], answer) < 1e-5


@pytest.mark.parametrize("merge_below", [0, 10**9])
@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "gemma2"])  # windows, sinks, caps
def test_windows_are_exact_far_beyond_their_size(
    engine_of, kind: str, merge_below: int, tmp_path
) -> None:
    base = small(kind)
    reference = make_adapter(base, tmp_path / "v1", seed=1)
    engine = engine_of(base, merge_below=merge_below, prefill_chunk=64)
    assert engine.strategy == "batched"
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    shared = [i * 7 % 250 for i in range(60)]
    prompts = [shared[:n] + [n] * (n % 5) for n in (1, 9, 15, 16, 17, 40, 60, 60)]
    lengths = (SampleParams(max_tokens=8 + 9 * i, seed=i) for i in range(8))
    asked = [Asked(engine, *of, "policy") for of in zip(prompts, lengths, strict=True)]
    turn = [*asked[0].prompt, *asked[0].one().ids, 3, 4, 5]
    asked.append(Asked(engine, turn, SampleParams(max_tokens=40), "policy"))
    for one in asked:
        assert worst_difference(reference, one.prompt, one.one()) < 2e-5
    assert engine.stats().reused_tokens > 50


@pytest.mark.parametrize(("kind", "past"), [("bloom", Past.CHUNKS), ("mamba", Past.STEPS)])
def test_rows_one_by_one_are_exact(engine_of, kind: str, past: Past, caplog) -> None:
    """Bloom reads positions off a 2D mask, which rows computed together do not have."""
    base = small(kind)
    reference = copy.deepcopy(base.model)
    engine = engine_of(base, prefill_chunk=32)
    assert "row by row, which is slow" in caplog.text
    assert engine._scheduler.forward.past is past
    asked = [
        Asked(engine, [*range(n)], SampleParams(max_tokens=20, seed=n, n=2)) for n in (1, 5, 70)
    ]
    answers = [answer for one in asked for answer in one.wait()]
    settle(engine)
    before = engine.stats()
    turn = [*range(70), *answers[-1].ids, 3, 4]
    asked.append(Asked(engine, turn, SampleParams(max_tokens=5)))
    for one in asked:
        for answer in one.wait():
            assert worst_difference(reference, one.prompt, answer) < 1e-5
    after = engine.stats()
    # All but the last token of the turn before, which was sampled and never computed.
    assert after.reused_tokens - before.reused_tokens == len(turn) - 3
    assert after.prefill_tokens - before.prefill_tokens == 3


def test_short_prefixes_of_a_recurrent_model_are_charged_their_whole_state(engine_of) -> None:
    engine = engine_of(small("mamba"), kv_tokens=20_000)
    for i in range(12):
        Asked(engine, [*range(i, i + 10)], SampleParams(max_tokens=6, seed=i)).wait()
    settle(engine)
    kept = engine._scheduler.pool
    assert len(kept._entries) == 12
    held = sum(tensor_bytes(entry.kv.cache) for entry in kept._entries)
    charged = engine.stats().kv_tokens * engine._scheduler.forward.bytes_per_token
    assert held <= charged <= 2 * held


def test_a_state_that_cannot_be_told_right_in_half_precision_is_not_gone_on_from() -> None:
    base = small("mamba")
    half = as_base(base.model.to(torch.bfloat16))
    assert SamplerEngine(half)._scheduler.forward.past is Past.STEPS


def test_refuses_a_model_that_looks_ahead() -> None:
    with pytest.raises(
        ModelError, match=r"cannot serve.*vLLM.*row by row, recomputed: its logits differ"
    ):
        SamplerEngine(small("bert-generation"))


@pytest.mark.parametrize("kind", [LlamaCpuForward, BatchedForward, RowByRowForward])
def test_logits_are_those_of_the_wanted_rows(kind) -> None:
    base = as_base(llama())
    forward = kind(base, {}, past=Past.CHUNKS) if kind is RowByRowForward else kind(base, {})

    def logits(wanted: list[list[int] | None]) -> list[torch.Tensor]:
        parts: list[Part] = []
        of_parts = [[1, 2, 3], [4]], [[5, 6], [7, 8, 9], [2]]
        for chunks, rows_of in zip(of_parts, wanted, strict=True):
            rows = forward.new_rows(KVPool(10**6))
            rows.reserve(len(chunks), 20)
            for chunk in chunks:
                rows.append(chunk)
            parts.append(Part(rows, chunks, [0] * len(chunks), rows_of))
        with torch.inference_mode():
            return forward(parts)

    first, second = logits([None, None])
    for some in [[0], [2, 0]], [[], [1]], [None, []], [[], []]:
        for all_rows, asked, found in zip((first, second), some, logits(some), strict=True):
            expected = all_rows if asked is None else all_rows[asked]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
