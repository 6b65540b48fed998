"""The sampler's pieces alone: picking tokens, stop strings, key/value storage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import byte_tokenizer

from agentrl_trainer.inference import SampleParams
from agentrl_trainer.inference.kv_cache import KVBudget, KVRows, KVShape, PrefixStore
from agentrl_trainer.inference.sampling import Uniforms, pick
from agentrl_trainer.inference.sequences import StopStrings, _chunk_size
from agentrl_trainer.models.common_prefix import common_prefix

SHAPE = KVShape(2, 1, 2, 3, torch.float32, torch.device("cpu"))


def draw(logits: list[float], count: int = 4000, **options) -> list[float]:
    """Frequencies of each token over ``count`` rows."""
    params = [SampleParams(max_tokens=1, **options)] * count
    picked = pick(torch.tensor([logits] * count), params, [Uniforms(i) for i in range(count)])
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
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.6, "temperature": 2}, None),
    ],
)
def test_distribution(options, expected) -> None:
    found = draw(LOGITS, **options)
    if expected is None:
        weights = [math.sqrt(p) for p in (0.1, 0.4, 0.2, 0.3)]
        kept = [w if i in (1, 3) else 0 for i, w in enumerate(weights)]
        expected = [w / sum(kept) for w in kept]
    assert found == pytest.approx(expected, abs=0.03)
    assert [f == 0 for f in found] == [e == 0 for e in expected]


def test_mixed_parameters_in_one_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    options = [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.7}, {}]
    params = [SampleParams(max_tokens=1, **o) for o in options]
    together = pick(logits, params, [Uniforms(i) for i in range(6)]).ids
    alone = [pick(logits[i : i + 1], [params[i]], [Uniforms(i)]).ids[0] for i in range(6)]
    assert together == alone


def test_impossible_tokens_are_never_picked() -> None:
    logits = torch.full((500, 7), float("-inf"))
    logits[:, 2] = 0.0
    picked = pick(logits, [SampleParams(max_tokens=1)] * 500, [Uniforms(i) for i in range(500)])
    assert set(picked.ids) == {2}


def test_uniforms_depend_on_the_key_only() -> None:
    a, b = Uniforms(0, 5, 1), Uniforms(0, 5, 1)
    assert [a.next() for _ in range(200)] == [b.next() for _ in range(200)]
    assert Uniforms(0, 5, 1).next() != Uniforms(0, 5, 2).next()
    assert 0 <= Uniforms(0, -3).next() < 1


@pytest.mark.parametrize("slow", [False, True])
def test_stop_strings(slow) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("aé€b. STOP it", add_special_tokens=False)
    for stop, expected in (
        (("STOP",), ("STOP", "aé€b. STOP")),
        (("€",), ("€", "aé€")),
        (("it", ". "), (". ", "aé€b. ")),
        (("STOPS", "x"), None),
    ):
        watch = StopStrings(tokenizer, stop)
        if slow:
            watch._backend = None
        hit = None
        fed: list[int] = []
        while hit is None and len(fed) < len(ids):
            fed.append(ids[len(fed)])
            hit = watch.push(fed[-1])
        assert (hit and (hit, tokenizer.decode(fed))) == expected


def test_a_special_token_can_be_a_stop_string() -> None:
    watch = StopStrings(byte_tokenizer(), ("<|end|>",))
    assert watch.push(10) is None
    assert watch.push(256) == "<|end|>"


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    assert common_prefix(a, b) == (min(len(a), len(b)) if slow is None else slow)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(16, 1024))
def test_chunk_size_bounds_the_work(left: list[int], most: int) -> None:
    size = _chunk_size(left, most)
    assert 1 <= size <= max(left)
    assert size * len(left) <= max(most, len(left))


def fill(rows: KVRows, row: int, length: int, value: float) -> None:
    for layer in range(SHAPE.layers):
        rows._keys[layer, row, :, :length] = value
        rows._values[layer, row, :, :length] = value


def test_rows_stay_dense_and_keep_their_content() -> None:
    rows = KVRows(SHAPE, KVBudget(100_000))
    for i in range(5):
        assert rows.reserve(i + 1, 10)
        fill(rows, rows.append(), 10, float(i + 1))
    rows.remove(1, 10)
    assert rows.reserve(30, 500)
    assert [float(rows.peek(r, 10).keys.mean()) for r in range(4)] == [1, 5, 3, 4]
    copy = rows.export(1, 6)
    rows.scrub(1)
    assert len(copy) == 6
    assert float(copy.values.mean()) == 5
    rows.load(0, copy, 6)
    assert rows.peek(0, 10).keys[0, 0, :, 0].tolist() == [5.0] * 6 + [1.0] * 4


def test_budget_is_kept_and_shrinks_a_rectangle() -> None:
    budget = KVBudget(1000)
    rows = KVRows(SHAPE, budget)
    assert rows.reserve(1, 500)
    assert budget.used == rows.rows * rows.time <= 1000
    rows.append()
    fill(rows, 0, 10, 1.0)
    assert not rows.reserve(3, 500)
    # The long sequence is gone: the same tokens as more, shorter rows.
    assert rows.reserve(20, 48)
    assert budget.used == 20 * 48
    assert float(rows.peek(0, 10).keys.mean()) == 1.0
    assert not rows.reserve(21, 48)
    assert rows.reserve(21, 64, force=True)
    rows.free()
    assert budget.used == 0


def test_prefixes_give_way_least_recently_used_first() -> None:
    budget = KVBudget(100)
    store = PrefixStore(budget, most=3)
    rows = KVRows(SHAPE, KVBudget(10**6))
    rows.reserve(1, 64)
    one, two = object(), object()
    store.add(one, list(range(20)), rows.export(0, 20))
    store.add(two, list(range(20)), rows.export(0, 20))
    assert not store.wants(one, list(range(19)))
    assert store.wants(one, list(range(21)))
    store.add(one, list(range(30)), rows.export(0, 30))
    assert [len(e.tokens) for e in store.of(one)] == [30], "the longer replaces the shorter"
    assert budget.used == 50
    store.touch(store.of(two)[0])
    assert budget.fits(60)
    assert (store.of(one), len(store.of(two))) == ([], 1)
    store.drop_owner(two)
    assert (budget.used, len(store)) == (0, 0)
