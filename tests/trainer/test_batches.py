from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_trainer.batches import Datum, MicroBatch, pack, to_datum
from agentrl_trainer.trajectories import Trajectory, Turn


def datum(length: int, trained: list[int], adapter: str = "default", base: int = 0) -> Datum:
    """Token, q and advantage at position i are all made from ``base + i``."""
    ids = [base + i for i in range(length)]
    return Datum(
        tokens=ids,
        mask=[i in trained for i in range(length)],
        logprobs=[-float(i) for i in ids],
        advantages=[i / 2 for i in ids],
        adapter=adapter,
    )


def test_alignment() -> None:
    (batch,) = pack([datum(5, [2, 4], base=10), datum(3, [1], base=20)], token_budget=100, pad_id=9)
    assert batch.indices == [0, 1]
    # The last token is never fed; nor is anything after the last trained one.
    assert batch.input_ids.tolist() == [[10, 11, 12, 13], [20, 9, 9, 9]]
    assert batch.lengths == [4, 1]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.columns.tolist() == [1, 3, 0]
    assert batch.targets.tolist() == [12, 14, 21]
    assert batch.logprobs.tolist() == [-12, -14, -21]
    assert batch.advantages.tolist() == [6, 7, 10.5]


def test_rows_that_train_nothing_are_left_out() -> None:
    assert pack([datum(5, []), datum(0, [])], token_budget=100) == []
    (batch,) = pack([datum(5, []), datum(4, [3])], token_budget=100)
    assert batch.indices == [1]


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    batches = pack([datum(50, [49]), datum(3, [2]), datum(3, [2])], token_budget=10)
    assert [b.indices for b in batches] == [[0], [1, 2]]


def test_adapters_are_not_mixed() -> None:
    data = [datum(4, [3], name) for name in ("b", "a", "b", "a")]
    batches = pack(data, token_budget=100)
    assert [(b.adapter, b.indices) for b in batches] == [("a", [1, 3]), ("b", [0, 2])]


def test_a_datum_is_checked() -> None:
    with pytest.raises(ValueError, match="one length"):
        Datum([1, 2], [False], [0.0, 0.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="first token"):
        Datum([1, 2], [True, False], [0.0, 0.0], [0.0, 0.0])


def test_to_datum() -> None:
    trajectory = Trajectory(
        adapter="asker",
        tokens=[1, 2, 3, 4],
        mask=[False, True, False, True],
        logprobs=[0.0, -1.0, 0.0, -2.0],
        versions=[-1, 0, -1, 0],
        turns=[Turn("a", 1, 2), Turn("b", 3, 4)],
        temperature=1.0,
    )
    assert to_datum(trajectory, 0.5).advantages == [0, 0.5, 0, 0.5]
    assert to_datum(trajectory, {"b": 2.0, "elsewhere": 9.0}).advantages == [0, 0, 0, 2.0]
    assert to_datum(trajectory, 0.5).adapter == "asker"
    assert to_datum(trajectory, 0.5).trained == 2


@st.composite
def data(draw: st.DrawFn) -> list[Datum]:
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2**31), st.sampled_from("ab")))
    )
    result = []
    for at, (length, seed, adapter) in enumerate(shapes):
        rng = random.Random(seed)
        trained = [i for i in range(1, length) if rng.random() < 0.4]
        result.append(datum(length, trained, adapter, base=100 * at))
    return result


@settings(deadline=None)
@given(data(), st.integers(1, 80))
def test_every_trained_token_is_in_one_place(datums: list[Datum], budget: int) -> None:
    batches = pack(datums, token_budget=budget)
    found: list[tuple[int, int]] = []
    for batch in batches:
        assert len(batch.indices) == 1 or batch.input_ids.numel() <= budget
        assert {datums[i].adapter for i in batch.indices} == {batch.adapter}
        for n, (row, column) in enumerate(
            zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)
        ):
            index = batch.indices[row]
            own = datums[index]
            found.append((index, column + 1))
            fed = batch.input_ids[row, : column + 1].tolist()
            assert fed == own.tokens[: column + 1]
            assert batch.targets[n] == own.tokens[column + 1]
            assert batch.logprobs[n] == own.logprobs[column + 1]
            assert batch.advantages[n] == own.advantages[column + 1]
    expected = [(i, at) for i, d in enumerate(datums) for at, on in enumerate(d.mask) if on]
    assert sorted(found) == expected
    assert same(pack(datums, token_budget=budget), batches)


def same(left: list[MicroBatch], right: list[MicroBatch]) -> bool:
    return [(b.indices, b.input_ids.tolist()) for b in left] == [
        (b.indices, b.input_ids.tolist()) for b in right
    ]
