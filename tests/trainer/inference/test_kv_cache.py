"""Rows of keys and values, their budget and the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from agentrl_trainer.inference.kv_cache import KVRows, KVShape
from agentrl_trainer.inference.prefix_cache import KVPool

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
    fill(rows, 3, 14, 4.0)  # more than it holds, as padding may
    assert rows.reserve(30, 500)
    assert not rows._keys[:, 3, :, 10:].any()  # memory that is not touched is not taken
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
    rows.append(SimpleNamespace(held=10))
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


def test_rows_grow_in_place_as_far_as_twice_the_budget() -> None:
    rows = KVRows(SHAPE, KVPool(2048))
    rows.reserve(1, 20)
    fill(rows, rows.append(SimpleNamespace(held=20)), 20, 1.0)
    where = rows._keys.data_ptr()
    assert rows.reserve(8, 250)
    assert rows._keys.data_ptr() == where
    assert rows._pool.used == rows.rows * rows.time <= 2048
    assert rows.reserve(2, 1000)
    assert rows._keys.shape[1] * rows._keys.shape[3] <= 2 * 2048
    assert float(rows.peek(0, 20).keys.mean()) == 1.0


def test_a_small_empty_rectangle_is_kept_and_a_large_one_freed() -> None:
    pool = KVPool(100_000)
    rows = KVRows(SHAPE, pool)
    for tokens, kept in (60, 4 * 64), (400, 0):
        rows.reserve(1, tokens)
        rows.append(SimpleNamespace(held=10))
        rows.remove(0)
        assert pool.used == rows.rows * rows.time == kept
        rows.free()


def test_prefixes_give_way_least_recently_used_first() -> None:
    pool = KVPool(100)
    rows = KVRows(SHAPE, KVPool(10**6))
    rows.reserve(1, 64)
    one, two = object(), object()
    for owner, size in ((one, 20), (two, 20), (one, 19), (one, 30), (one, 7)):
        pool.keep(owner, list(range(size)), rows.peek(0, size))
    # What is stored or short is not stored again.
    assert [(e.held, e.cost) for e in pool.prefixes(one)] == [(30, 10), (20, 20)]
    assert pool.used == 50
    pool.touch(pool.prefixes(two)[0])
    assert pool.fits(60)
    assert ([e.held for e in pool.prefixes(one)], len(pool.prefixes(two))) == ([20], 1)
    pool.drop_owner(two)
    assert pool.used == 20


def test_what_sequences_share_is_kept_once_and_goes_last() -> None:
    """A conversation of three turns, and a sibling of its second one that differs from token 25."""
    pool, rows, owner = KVPool(1000), KVRows(SHAPE, KVPool(10**6)), SimpleNamespace(held=50)
    rows.reserve(2, 64)
    rows.append(owner)
    rows.append(owner)
    told = list(range(50))
    other = [*told[:25], *range(100, 115)]
    for length in (20, 30, 50):
        fill(rows, 0, length, float(length))  # of each turn, other numbers: which are copied?
        pool.keep(owner, told[:length], rows.peek(0, length))
    fill(rows, 0, 40, 7.0)
    pool.keep(owner, other, rows.peek(0, 40))
    assert pool.used == 20 + 10 + 20 + 15

    [of_other] = [e for e in pool.prefixes(owner) if e.tokens == other]
    rows.load(1, of_other.kv, 38)
    assert rows.peek(1, 38).keys[1, 0, :, 0].tolist() == [20.0] * 20 + [30.0] * 5 + [7.0] * 13
    rows.load(1, of_other.kv, 18)
    assert rows.peek(1, 19).values[0, 0, :, 2].tolist() == [20.0] * 19
    for left in ([40, 30, 20], [30, 20], [20], []):
        assert pool.fits(pool.limit - pool.used + 1)
        assert [e.held for e in pool.prefixes(owner)] == left
    assert pool.used == 0
