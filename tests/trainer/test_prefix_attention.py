"""Token tries against the same rows one by one, on miniature models of several families."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl_trainer.data.packing import pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.logprobs import TokenLogprobs
from agentrl_trainer.models.prefix_attention import Trie, pack_trie

VOCAB = 67
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that mistakes show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama 3.1": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
    "gemma 2, both caps, window": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **SMALL, head_dim=8, query_pre_attn_scalar=8, sliding_window=5,
            final_logit_softcapping=3.0, attn_logit_softcapping=2.0,
        )
    ),
    "granite, scaled logits": lambda: GraniteForCausalLM(
        GraniteConfig(**SMALL, logits_scaling=4.0)
    ),
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
        )
    ),
    "gpt-oss, sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, **EXPERTS, head_dim=8, sliding_window=5)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, **EXPERTS)),
}  # fmt: skip

CANNOT: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "dynamic rope": (
        lambda: LlamaForCausalLM(
            LlamaConfig(
                **SMALL,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            )
        ),
        "dynamic",
    ),
    "state space": (
        lambda: FalconMambaForCausalLM(
            FalconMambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
        "mamba|layers of|rejects|differ",
    ),
}


def model_of(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build().eval().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)  # a gradient through everything
    return model


def group(seed: int = 0) -> list[TrainingRow]:
    """Samples of two prompts; within the first, three rows share a first turn as well."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    first, second = ids(11), ids(6)
    turn = first + ids(5)
    rows = [*(turn + ids(n) for n in (7, 2, 9)), first + ids(1), *(second + ids(n) for n in (3, 4))]
    rows += [rows[0], ids(2)]  # one sampled twice; one that shares nothing
    return [
        TrainingRow(
            tokens=row,
            mask=[at > 0 and (at >= 11 or len(row) < 11) for at in range(len(row))],
            logprobs=[0.0] * len(row),
            advantages=[rng.gauss(0, 1) for _ in row],
        )
        for row in rows
    ]


def weighted(model: PreTrainedModel, datums: list[TrainingRow]) -> tuple[dict[Any, float], Tensor]:
    """Every trained token's log-prob, and a gradient of all of them."""
    logprobs = TokenLogprobs(model, max_logits=5 * VOCAB)
    assert logprobs.why_padded is None
    model.zero_grad()
    found: dict[Any, float] = {}
    for batch in pack(datums, token_budget=45):
        values = logprobs(batch)
        (values * batch.advantages).sum().backward()
        where = zip(batch.rows.tolist(), batch.columns.tolist(), values.tolist(), strict=True)
        found |= {(batch.indices[row], column + 1): value for row, column, value in where}
    gradient = cast(nn.Embedding, model.get_input_embeddings()).weight.grad
    assert gradient is not None
    return found, gradient.clone()


def one_by_one(
    model: PreTrainedModel, datums: list[TrainingRow]
) -> tuple[dict[Any, float], Tensor]:
    model.zero_grad()
    expected: dict[Any, float] = {}
    for index, datum in enumerate(datums):
        logits = model(input_ids=torch.tensor([datum.tokens])).logits[0, :-1]
        values = logits.log_softmax(-1).gather(-1, torch.tensor(datum.tokens[1:])[:, None])[:, 0]
        mask = torch.tensor(datum.mask[1:])
        (values * torch.tensor(datum.advantages[1:]))[mask].sum().backward()
        expected |= {(index, at + 1): values[at].item() for at in mask.nonzero()[:, 0].tolist()}
    gradient = cast(nn.Embedding, model.get_input_embeddings()).weight.grad
    assert gradient is not None
    return expected, gradient.clone()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_log_probs_and_gradients_are_those_of_single_rows(family: str) -> None:
    model = model_of(FAMILIES[family])
    expected, gradient = one_by_one(model, group())
    found, own = weighted(model, group())
    assert found.keys() == expected.keys()
    worst = max(abs(found[key] - expected[key]) for key in expected)
    assert worst < 1e-5
    assert (own - gradient).abs().max() < 1e-5 * max(1.0, float(gradient.abs().max()))


@pytest.mark.parametrize("family", sorted(CANNOT))
def test_a_model_that_cannot_says_why_and_gets_padded_rows(family: str) -> None:
    build, why = CANNOT[family]
    model = model_of(build)
    expected, _ = one_by_one(model, group())
    logprobs = TokenLogprobs(model)
    assert logprobs.why_padded is not None
    assert re.search(why, logprobs.why_padded), logprobs.why_padded
    found: dict[Any, float] = {}
    for batch in pack(group(), token_budget=100, share=False):
        where = zip(
            batch.rows.tolist(), batch.columns.tolist(), logprobs(batch).tolist(), strict=True
        )
        found |= {(batch.indices[row], column + 1): value for row, column, value in where}
    assert found == pytest.approx(expected, abs=1e-5)


def test_long_rope_is_declined() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0], "factor": 8.0,
    }  # fmt: skip
    model = model_of(lambda: Phi3ForCausalLM(Phi3Config(**SMALL, rope_parameters=rope)))
    assert "longrope" in str(TokenLogprobs(model).why_padded)


def test_each_prefix_goes_through_the_model_once() -> None:
    model = model_of(FAMILIES["llama"])
    seen: list[int] = []
    logprobs = TokenLogprobs(model)
    model.get_submodule("model.layers.0.mlp").register_forward_hook(
        lambda _m, args, _out: seen.append(args[0].shape[1])
    )
    (batch,) = pack(group(), token_budget=10**6)
    logprobs(batch)
    prefixes = {tuple(d.tokens[: at + 1]) for d in group() for at in range(len(d.tokens) - 1)}
    assert seen == [len(prefixes)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12))
def test_a_trie_is_its_rows(rows: list[list[int]]) -> None:
    """Whatever branches: all prefixes once, every query sees its own row up to itself only."""
    rows.sort()
    packed = pack_trie(rows)
    assert len(packed.tokens) == len({tuple(r[: n + 1]) for r in rows for n in range(len(r))})
    for row, path in zip(rows, packed.paths, strict=True):
        assert [packed.tokens[at] for at in path] == row
        assert [packed.depths[at] for at in path] == list(range(len(row)))
    assert visible(packed.trie) == {
        at: path[: depth + 1] for path in packed.paths for depth, at in enumerate(path)
    }


def visible(trie: Trie) -> dict[int, list[int]]:
    """By place in the trie, the places its query attends to."""
    slots: list[list[int]] = []
    places: list[int] = []
    for block in trie.blocks:
        mask = block.mask(None, torch.float32)[:, 0] == 0
        for row in range(len(block.queries)):
            for q in range(block.queries.shape[1]):
                places.append(int(block.queries[row, q]))
                slots.append(block.keys[row][mask[row, q]].tolist())
    assert [places[slot] for slot in trie.order.tolist()] == list(range(len(trie.order)))
    return {at: slots[slot] for at, slot in enumerate(trie.order.tolist())}
