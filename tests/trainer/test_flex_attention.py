"""A trie's block mask for flex_attention, which a GPU uses: what a CPU can check of it.

flex_attention has no gradients on a CPU: they are checked through the mask it is given.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from agentrl_trainer.models.prefix_attention import (
    PackedTrie,
    pack_trie,
    trie_attention,
    why_no_flex,
)

HEADS, GROUPS, DIM = 4, 2, 16
ROWS = sorted(
    [
        [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 9], [1, 2, 5],
        [1, 2], [6, 6, 6, 6, 6, 6, 6], [7],
    ]
)  # fmt: skip


def states(size: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, h, size, DIM, requires_grad=True) for h in (HEADS, GROUPS, GROUPS)]


def attention(packed: PackedTrie, states: list[Tensor], *, flex: bool, **options: object) -> Tensor:
    trie = replace(packed.trie, flex=flex)
    out, _ = trie_attention(nn.Module(), *states, None, trie=trie, **options)
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7),
    st.sampled_from([None, 1, 3]),
)
def test_a_query_sees_its_own_path_and_nothing_else(
    rows: list[list[int]], window: int | None
) -> None:
    packed = pack_trie(sorted(rows))
    size = len(packed.tokens)
    expected = torch.zeros(size, size, dtype=torch.bool)
    for path in packed.paths:
        for depth, place in enumerate(path):
            first = 0 if window is None else max(0, depth - window + 1)
            expected[place, path[first : depth + 1]] = True
    found = create_mask(packed.trie.sees(window), 1, 1, size, size, device="cpu")
    assert torch.equal(found[0, 0], expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"scaling": 0.1}], ids=str
)
def test_flex_attention_over_a_trie_is_attention_over_its_blocks(
    options: dict[str, object],
) -> None:
    packed = pack_trie(ROWS)
    with torch.no_grad():
        own = [x.detach() for x in states(len(packed.tokens))]
        by_blocks = attention(packed, own, flex=False, **options)
        by_flex = attention(packed, own, flex=True, **options)
    torch.testing.assert_close(by_flex, by_blocks, rtol=1e-5, atol=1e-5)


def test_gradients_through_the_mask_are_those_through_the_blocks() -> None:
    packed = pack_trie(ROWS)
    own = states(len(packed.tokens))
    weights = torch.randn(1, len(packed.tokens), HEADS, DIM)
    by_blocks = torch.autograd.grad((attention(packed, own, flex=False) * weights).sum(), own)
    size = len(packed.tokens)
    mask = create_mask(packed.trie.sees(None), 1, 1, size, size, device="cpu")
    out = F.scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    by_mask = torch.autograd.grad((out * weights).sum(), own)
    torch.testing.assert_close(by_mask, by_blocks, rtol=1e-5, atol=1e-5)


def test_blocks_that_nobody_sees_are_left_out() -> None:
    """Two rows with nothing in common, 128 to a block: 2 triangles and not 4 squares."""
    packed = pack_trie([[1] * 256, [2] * 256])
    mask = packed.trie.block_mask(None)
    assert mask.kv_num_blocks.sum() + (mask.full_kv_num_blocks.sum()) == 3 + 3
    assert packed.trie.knows_window(None)


def test_a_cpu_goes_by_blocks() -> None:
    assert "gradients" in why_no_flex(torch.device("cpu"), torch.float32, HEADS, GROUPS, DIM)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_goes_by_flex_attention(dtype: torch.dtype) -> None:
    assert why_no_flex(torch.device("cuda"), dtype, HEADS, GROUPS, DIM) == ""
