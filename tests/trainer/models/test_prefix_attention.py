"""Token tries against the same rows one by one, on miniature models of several families.

flex_attention has no gradients on a CPU: they are checked through the mask it is given.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import group, plain
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from agentrl_trainer.data.packing import pack
from agentrl_trainer.learner.logprobs import TokenLogprobs, scatter
from agentrl_trainer.learner.model_support import why_no_flex
from agentrl_trainer.models.prefix_attention import Trie, pack_trie, trie_attention

VOCAB = 67
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,  # far from uniform, so that mistakes show
}  # fmt: skip
WIDE = {**SMALL, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0], "factor": 8.0,
}  # fmt: skip
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
CAPS = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}

FAMILIES: dict[str, hf.PreTrainedConfig] = {
    "qwen3, tied": hf.Qwen3Config(**WIDE, tie_word_embeddings=True),
    "llama 3.1": hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "gemma 2, both caps, window": hf.Gemma2Config(**WIDE, **CAPS, sliding_window=5),
    "granite, scaled logits": hf.GraniteConfig(**SMALL, logits_scaling=4.0),
    "gpt-oss, sinks": hf.GptOssConfig(**WIDE, **EXPERTS, sliding_window=5),
}
CANNOT: dict[str, tuple[hf.PreTrainedConfig, str]] = {
    "dynamic rope": (hf.LlamaConfig(**SMALL, rope_parameters=DYNAMIC_ROPE), "dynamic"),
    "long rope": (hf.Phi3Config(**SMALL, rope_parameters=LONG_ROPE), "longrope"),
    "state space": (
        hf.FalconMambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4),
        "mamba|layers of|rejects|differ",
    ),
}


def model_of(config: hf.PreTrainedConfig) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)  # a gradient through everything
    return model


GROUP = group(VOCAB)


def embedding_gradient(model: hf.PreTrainedModel) -> Tensor:
    weight = cast(nn.Embedding, model.get_input_embeddings()).weight
    found, weight.grad = weight.grad, None
    assert found is not None
    return found


def one_by_one(model: hf.PreTrainedModel) -> tuple[list[list[float]], Tensor]:
    """Every trained token's log-prob, 0 elsewhere, and a gradient of all of them."""
    expected: list[list[float]] = []
    for row in GROUP:
        values = plain(model, row.tokens) * torch.tensor(row.mask[1:])
        (values * torch.tensor(row.advantages[1:])).sum().backward()
        expected.append([0.0, *values.tolist()])
    return expected, embedding_gradient(model)


def computed(logprobs: TokenLogprobs, **packing: Any) -> list[list[float]]:
    """The same by micro-batches, with a backward pass through each."""
    found = [[0.0] * len(row.tokens) for row in GROUP]
    for batch in pack(GROUP, **packing):
        values = logprobs(batch)
        (values * batch.advantages).sum().backward()
        scatter(batch, values, found)
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_log_probs_and_gradients_are_those_of_single_rows(family: str) -> None:
    model = model_of(FAMILIES[family])
    expected, gradient = one_by_one(model)
    logprobs = TokenLogprobs(model, max_logits=5 * VOCAB)
    assert logprobs.why_padded is None
    for found, row in zip(computed(logprobs, token_budget=45), expected, strict=True):
        assert found == pytest.approx(row, abs=1e-5)
    worst = (embedding_gradient(model) - gradient).abs().max()
    assert worst < 1e-5 * max(1.0, float(gradient.abs().max()))


@pytest.mark.parametrize("family", sorted(CANNOT))
def test_a_model_that_cannot_says_why_and_gets_padded_rows(family: str) -> None:
    config, why = CANNOT[family]
    model = model_of(config)
    logprobs = TokenLogprobs(model)
    assert re.search(why, logprobs.why_padded or ""), logprobs.why_padded
    if family == "long rope":  # its rows depend on their length
        return
    padded = computed(logprobs, token_budget=100, share=False)
    for found, row in zip(padded, one_by_one(model)[0], strict=True):
        assert found == pytest.approx(row, abs=1e-5)


some_rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=10)


@settings(deadline=None, max_examples=60)
@given(some_rows, st.sampled_from([None, 1, 3]))
def test_a_trie_is_its_rows(rows: list[list[int]], window: int | None) -> None:
    """Whatever branches: all prefixes once, every query sees its own row up to itself only, through
    the blocks and through flex_attention's mask."""
    rows.sort()
    tokens, paths, trie = pack_trie(rows)
    size = len(tokens)
    assert size == len({tuple(r[: n + 1]) for r in rows for n in range(len(r))})
    expected = torch.zeros(size, size, dtype=torch.bool)
    for row, path in zip(rows, paths, strict=True):
        assert [tokens[at] for at in path] == row
        assert [trie.depths[at] for at in path] == list(range(len(row)))
        for depth, place in enumerate(path):
            expected[place, path[max(0, depth - (window or size) + 1) : depth + 1]] = True
    flex = create_mask(trie.sees(window), 1, 1, size, size, device="cpu")
    assert torch.equal(flex[0, 0], expected)
    assert torch.equal(seen_by_blocks(trie, window), expected)


def seen_by_blocks(trie: Trie, window: int | None) -> Tensor:
    """[U, U], by place in the trie, the places that its query attends to."""
    seen: list[Tensor] = []
    places: list[int] = []
    for block in trie.blocks:
        masks = block.mask(window, torch.float32)[:, 0] == 0
        for queries, keys, mask in zip(block.queries, block.keys, masks, strict=True):
            for place, visible in zip(queries.tolist(), mask, strict=True):
                row = torch.zeros(len(trie.order), dtype=torch.bool)
                row[keys[visible]] = True
                places.append(place)
                seen.append(row)
    assert [places[slot] for slot in trie.order.tolist()] == list(range(len(trie.order)))
    return torch.stack(seen)[trie.order]


# ---- flex_attention, which a GPU uses

HEADS, GROUPS, DIM = 4, 2, 16
ROWS = sorted(
    [
        [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 9], [1, 2, 5],
        [1, 2], [6, 6, 6, 6, 6, 6, 6], [7],
    ]
)  # fmt: skip


def states(trie: Trie) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, len(trie.ends), DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def attention(trie: Trie, states: list[Tensor], **options: Any) -> Tensor:
    return trie_attention(nn.Module(), *states, None, trie=trie, **options)[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"scaling": 0.1}], ids=str
)
def test_flex_attention_over_a_trie_is_attention_over_its_blocks(options: dict[str, Any]) -> None:
    *_, trie = pack_trie(ROWS)
    own = [x.detach() for x in states(trie)]
    by_blocks, by_flex = (
        attention(replace(trie, flex=flex), own, **options) for flex in (False, True)
    )
    torch.testing.assert_close(by_flex, by_blocks, rtol=1e-5, atol=1e-5)


def test_gradients_through_the_mask_are_those_through_the_blocks() -> None:
    *_, trie = pack_trie(ROWS)
    size = len(trie.ends)
    own = states(trie)
    weights = torch.randn(1, size, HEADS, DIM)
    by_blocks = torch.autograd.grad((attention(trie, own) * weights).sum(), own)
    mask = create_mask(trie.sees(None), 1, 1, size, size, device="cpu")
    out = F.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    by_mask = torch.autograd.grad((out * weights).sum(), own)
    torch.testing.assert_close(by_mask, by_blocks, rtol=1e-5, atol=1e-5)


def test_a_cpu_keeps_each_key_once_however_many_rows_it_is_part_of() -> None:
    *_, trie = pack_trie([[1] * 50 + [2 + row] * 4 for row in range(8)])
    size = len(trie.order)
    states = [torch.randn(1, heads, size, 8, requires_grad=True) for heads in (4, 2, 2)]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, _ = trie_attention(nn.Module(), *states, None, trie=trie)
    assert out.requires_grad
    # Queries, keys, values, the output, and the logarithm of each head's weights.
    assert sum(kept.values()) == size * (4 + 2 + 2 + 4) * 8 + size * 4


def test_blocks_without_a_visible_key_are_left_out() -> None:
    """Two rows with nothing in common, 128 to a block: 2 triangles and not 4 squares."""
    mask = pack_trie([[1] * 256, [2] * 256])[2].block_mask(None)
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == 3 + 3


def test_a_cpu_goes_by_blocks() -> None:
    assert "gradients" in why_no_flex(model_of(FAMILIES["llama 3.1"]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_goes_by_flex_attention(dtype: torch.dtype) -> None:
    config = hf.LlamaConfig(**{**SMALL, "hidden_size": HEADS * DIM})
    assert why_no_flex(model_of(config).to("cuda", dtype)) == ""
