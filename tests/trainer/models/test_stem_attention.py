"""Attention to a whole stem, in one piece and in several, beside attention with all scores."""

from __future__ import annotations

import pytest
import torch

from agentrl_trainer.models.stem_attention import over_stem


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("length", [48, 4096])
def test_pieces_of_a_stem_add_up(monkeypatch, tokens: int, threads: int, length: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # decides the number of pieces
    heads, groups, size = 6, 3, 8
    query, keys, values = (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate([(tokens, heads, size), *[(groups, length, size)] * 2])
    )
    found, mass = over_stem(query, keys, values, scale=0.5)
    whole_keys, whole_values = (x.repeat_interleave(heads // groups, 0) for x in (keys, values))
    scores = torch.einsum("uhd,hpd->uhp", query, whole_keys) * 0.5
    assert torch.allclose(mass, scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(found, torch.einsum("uhp,hpd->uhd", scores.softmax(-1), whole_values))
