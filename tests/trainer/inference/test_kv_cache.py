"""Rows of keys and values, their budget and the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from agentrl_trainer.inference.kv_cache import KVPool, KVRows, KVShape

SHAPE = KVShape(2, 1, 2, 3, torch.float32, torch.device("cpu"))


def fill(rows: KVRows, row: int, length: int, value: float) -> None:
    for layer in range(SHAPE.layers):
        rows._keys[layer, row, :, :length] = value
        rows._values[layer, row, :, :length] = value


def test_rows_stay_dense_and_keep_their_content() -> None:
    rows, owner = KVRows(SHAPE, KVPool(100_000)), SimpleNamespace(held=10)
    for i in range(5):
        assert rows.reserve(i + 1, 10)
        fill(rows, rows.append(owner), 10, float(i + 1))
    rows.remove(1)
    assert rows.reserve(30, 500)
    assert [float(rows.peek(r, 10).keys.mean()) for r in range(4)] == [1, 5, 3, 4]
    copy = rows.peek(1, 6).copied()
    rows.scrub(1)
    assert copy.values.shape[2] == 6
    assert float(copy.values.mean()) == 5
    rows.load(0, copy, 6)
    assert rows.peek(0, 10).keys[0, 0, :, 0].tolist() == [5.0] * 6 + [1.0] * 4


def test_budget_is_kept_and_shrinks_a_rectangle() -> None:
    pool = KVPool(1000)
    rows = KVRows(SHAPE, pool)
    assert rows.reserve(1, 500)
    assert pool.used == rows.rows * rows.time <= 1000
    rows.append(None)
    fill(rows, 0, 10, 1.0)
    assert not rows.reserve(3, 500)
    # The long sequence is gone: the same tokens as more, shorter rows.
    assert rows.reserve(20, 48)
    assert pool.used == 20 * 48
    assert float(rows.peek(0, 10).keys.mean()) == 1.0
    assert not rows.reserve(21, 48)
    assert rows.reserve(21, 64, force=True)
    rows.free()
    assert pool.used == 0


def test_prefixes_give_way_least_recently_used_first() -> None:
    pool = KVPool(100)
    rows = KVRows(SHAPE, KVPool(10**6))
    rows.reserve(1, 64)
    one, two = object(), object()
    for owner, size in ((one, 20), (two, 20), (one, 19), (one, 30), (one, 7)):
        pool.keep(owner, list(range(size)), rows.peek(0, size))
    # The longer replaces the shorter, and what is stored or short is not stored again.
    assert [len(e.tokens) for e in pool.prefixes(one)] == [30]
    assert pool.used == 50
    pool.touch(pool.prefixes(two)[0])
    assert pool.fits(60)
    assert (pool.prefixes(one), len(pool.prefixes(two))) == ([], 1)
    pool.drop_owner(two)
    assert pool.used == 0
