"""Rows of keys and values, their budget and the prefix cache."""

from __future__ import annotations

import torch

from agentrl_trainer.inference.kv_cache import KVBudget, KVRows, KVShape, PrefixStore

SHAPE = KVShape(2, 1, 2, 3, torch.float32, torch.device("cpu"))


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
    copy = rows.peek(1, 6).copied()
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
    store.add(one, list(range(20)), rows.peek(0, 20).copied())
    store.add(two, list(range(20)), rows.peek(0, 20).copied())
    assert not store.wants(one, list(range(19)))
    assert store.wants(one, list(range(21)))
    store.add(one, list(range(30)), rows.peek(0, 30).copied())
    assert [len(e.tokens) for e in store.of(one)] == [30], "the longer replaces the shorter"
    assert budget.used == 50
    store.touch(store.of(two)[0])
    assert budget.fits(60)
    assert (store.of(one), len(store.of(two))) == ([], 1)
    store.drop_owner(two)
    assert (budget.used, len(store)) == (0, 0)
