"""Picking tokens: distributions, filters, seeds and raw log-probs."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch

from agentrl_trainer.inference import SampleParams
from agentrl_trainer.inference.sampling import pick, uniforms


def draw(logits: list[float], count: int = 3000, **options) -> list[float]:
    """Frequencies of each token over ``count`` rows."""
    params = [SampleParams(max_tokens=1, **options)] * count
    picked = pick(torch.tensor([logits] * count), params, [next(uniforms(i)) for i in range(count)])
    raw = torch.tensor(logits).log_softmax(-1).tolist()
    for token, logprob in zip(picked.ids, picked.logprobs, strict=True):
        assert logprob == pytest.approx(raw[token], abs=1e-6), "log-probs are of the raw logits"
    return [picked.ids.count(i) / count for i in range(len(logits))]


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e-40}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.6, "temperature": 2}, [0, 2 / (2 + 3**0.5), 0, 3**0.5 / (2 + 3**0.5)]),
    ],
)
def test_distribution(options, expected) -> None:
    found = draw(LOGITS, **options)
    assert found == pytest.approx(expected, abs=0.03)
    assert [f == 0 for f in found] == [e == 0 for e in expected]


def test_mixed_parameters_in_one_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    options = [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.7}, {}]
    params = [SampleParams(max_tokens=1, **o) for o in options]
    together = pick(logits, params, [next(uniforms(i)) for i in range(6)]).ids
    alone = [pick(logits[i : i + 1], [params[i]], [next(uniforms(i))]).ids[0] for i in range(6)]
    assert together == alone


def test_impossible_tokens_are_never_picked() -> None:
    logits = torch.full((500, 7), float("-inf"))
    logits[:, 2] = 0.0
    picked = pick(
        logits, [SampleParams(max_tokens=1)] * 500, [next(uniforms(i)) for i in range(500)]
    )
    assert set(picked.ids) == {2}


def test_uniforms_depend_on_the_key_only() -> None:
    a, b = uniforms(0, 5, 1), uniforms(0, 5, 1)
    assert [*islice(a, 200)] == [*islice(b, 200)]
    assert next(uniforms(0, 5, 1)) != next(uniforms(0, 5, 2))
    assert 0 <= next(uniforms(0, -3)) < 1
