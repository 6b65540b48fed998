from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_trainer.data.packing import count_tokens, pack, split_rows
from agentrl_trainer.data.training_row import TrainingRow


def datum(length: int, trained: list[int], adapter: str = "default", base: int = 0) -> TrainingRow:
    """Token, q and advantage at position i are all made from ``base + i``."""
    ids = [base + i for i in range(length)]
    return TrainingRow(
        tokens=ids,
        mask=[i in trained for i in range(length)],
        logprobs=[-float(i) for i in ids],
        advantages=[i / 2 for i in ids],
        adapter=adapter,
    )


def test_alignment() -> None:
    """Padded rows, as they are fed to models that cannot do tries."""
    datums = [datum(5, [2, 4], base=10), datum(3, [1], base=20)]
    (batch,) = pack(datums, token_budget=100, share=False)
    assert batch.trie is None
    assert batch.indices == [0, 1]
    # The last token is never fed; nor is anything after the last trained one.
    assert batch.input_ids.tolist() == [[10, 11, 12, 13], [20, 0, 0, 0]]
    assert batch.places.tolist() == [1, 3, 4]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.columns.tolist() == [1, 3, 0]
    assert batch.targets.tolist() == [12, 14, 21]
    assert batch.logprobs.tolist() == [-12, -14, -21]
    assert batch.advantages.tolist() == [6, 7, 10.5]


def test_a_trie_holds_a_shared_prefix_once() -> None:
    """Two samples of a prompt, one of them with two turns, and another row."""
    prompt = [10, 11, 12]
    first = made([*prompt, 20, 21, 30, 22], [3, 4, 6])
    second = made([*prompt, 20, 25, 26], [3, 4, 5])
    other = made([40, 41], [1])
    (batch,) = pack([second, other, first], token_budget=100)
    assert batch.trie is not None
    assert batch.indices == [2, 0, 1]  # sorted by tokens
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 30, 25, 40]]
    assert batch.trie.depths.tolist() == [0, 1, 2, 3, 4, 5, 4, 0]
    # Token 20 is trained in both rows, from the same place.
    assert batch.targets.tolist() == [20, 21, 22, 20, 25, 26, 41]
    assert batch.places.tolist() == [2, 3, 5, 2, 3, 6, 7]
    assert batch.rows.tolist() == [0, 0, 0, 1, 1, 1, 2]
    counts = count_tokens([second, other, first], [batch])
    assert (counts.total, counts.unique, counts.fed, counts.saved) == (6 + 5 + 1, 8, 8, 4)


def test_a_group_over_the_budget_is_cut_evenly() -> None:
    prompt = list(range(100, 120))
    group = [made([*prompt, *[i] * 11], [20, 30]) for i in range(8)]
    batches = pack(group, token_budget=75)  # the prompt and five answers of ten
    assert [batch.input_ids.numel() for batch in batches] == [60, 60]
    counts = count_tokens(group, batches)
    assert (counts.total, counts.unique, counts.fed) == (240, 100, 120)


def test_groups_go_one_by_one_when_one_is_enough() -> None:
    """Three groups of 100 + 4 * 10 tokens that begin with the same two, as chat templates do."""
    groups = [
        made([1, 2, *range(100 * g, 100 * g + 98), *[g * 10 + i] * 11], [100, 110])
        for g in (1, 2, 3)
        for i in range(4)
    ]
    (whole,) = pack(groups, token_budget=1000)
    assert whole.input_ids.numel() == 3 * 140 - 2 * 2
    batches = pack(groups, token_budget=1000, enough=130)
    assert [batch.input_ids.numel() for batch in batches] == [140, 140, 140]
    assert [len(pack(groups, token_budget=1000, enough=n)) for n in (141, 281, 500)] == [2, 1, 1]
    # What is shared is not computed again.
    assert len(pack(groups[:4], token_budget=1000, enough=10)) == 1


def test_what_rows_over_the_budget_share_becomes_a_stem() -> None:
    """Four rows of 100 + 10 tokens. The last of the 100 predicts the first that trains."""
    prompt = [*range(100)]
    group = [made([*prompt, *[i] * 11], [100, 110]) for i in range(4)]
    (batch,) = pack(group, token_budget=125)
    assert batch.stem is not None
    assert (batch.stem.tokens, batch.stem.parent) == (prompt[:99], None)
    assert batch.input_ids.numel() == 1 + 4 * 10
    assert batch.trie is not None
    assert batch.trie.depths[:3].tolist() == [99, 100, 101]
    assert batch.places[0] == 0
    counts = count_tokens(group, [batch])
    assert counts.fed == counts.unique == 140


def made(tokens: list[int], trained: list[int]) -> TrainingRow:
    mask = [at in trained for at in range(len(tokens))]
    return TrainingRow(tokens, mask, [0.0] * len(tokens), [1.0] * len(tokens))


def test_rows_that_train_nothing_are_left_out() -> None:
    assert pack([datum(5, []), datum(0, [])], token_budget=100) == []
    (batch,) = pack([datum(5, []), datum(4, [3])], token_budget=100)
    assert batch.indices == [1]


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_rows_are_split_by_unique_tokens(parts: int) -> None:
    group = [datum(60, [50, 59]) for _ in range(4)]  # copies: one of them has tokens of its own
    others = [datum(60, [59], base=100 * number) for number in range(1, 5)]
    silent = datum(60, [])
    rows = [*group, silent, *others]
    split = split_rows(rows, parts)
    assert sorted(index for part in split for index in part) == list(range(len(rows)))
    assert rows.index(silent) in split[0]
    sizes = [count_tokens([rows[index] for index in part]).unique for part in split]
    assert max(sizes) <= min(sizes) + 60


@pytest.mark.parametrize(
    ("mask", "said"), [([False], "one length"), ([True, False], "first token")]
)
def test_a_row_is_checked(mask: list[bool], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainingRow([1, 2], mask, [0.0, 0.0], [0.0, 0.0])


@st.composite
def data(draw: st.DrawFn) -> list[TrainingRow]:
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2**31), st.sampled_from("ab")))
    )
    result = []
    for at, (length, seed, adapter) in enumerate(shapes):
        rng = random.Random(seed)
        trained = [i for i in range(1, length) if rng.random() < 0.4]
        # Rows of one base are prefixes of each other.
        result.append(datum(length, trained, adapter, base=100 * rng.randrange(at + 1)))
    return result


@settings(deadline=None, max_examples=50)
@given(data(), st.integers(1, 80), st.none() | st.integers(1, 80), st.booleans())
def test_every_trained_token_is_in_one_place(
    datums: list[TrainingRow], budget: int, enough: int | None, share: bool
) -> None:
    batches = pack(datums, token_budget=budget, enough=enough, share=share)
    found: list[tuple[int, int]] = []
    for batch in batches:
        assert len(batch.indices) == 1 or batch.input_ids.numel() <= budget
        assert {datums[i].adapter for i in batch.indices} == {batch.adapter}
        fed = batch.input_ids.flatten()
        by_rows = torch.arange(batch.input_ids.shape[1]).repeat(len(batch.indices))
        depths = by_rows if batch.trie is None else batch.trie.depths
        for n, (row, column) in enumerate(
            zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)
        ):
            index = batch.indices[row]
            own = datums[index]
            found.append((index, column + 1))
            assert fed[batch.places[n]] == own.tokens[column]
            assert depths[batch.places[n]] == column
            assert batch.targets[n] == own.tokens[column + 1]
            assert batch.logprobs[n] == own.logprobs[column + 1]
            assert batch.advantages[n] == own.advantages[column + 1]
    expected = [(i, at) for i, d in enumerate(datums) for at, on in enumerate(d.mask) if on]
    assert sorted(found) == expected
    again = pack(datums, token_budget=budget, enough=enough, share=share)
    assert [b.input_ids.tolist() for b in again] == [b.input_ids.tolist() for b in batches]
    counts = count_tokens(datums, batches)
    assert counts.unique <= counts.total
    assert counts.fed >= counts.unique
