"""The call graph: every sampled token trains exactly once, in the row that sampled it.

Small token ids stand for text: 1 to 9 prompts, 10 and up answers.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from call_records import call_trees, check_invariants, make
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_tracer.schemas import Call
from agentrl_trainer.data.skip_reasons import SkipRules, token_versions
from agentrl_trainer.data.training_row import TrainingRow, to_training_row
from agentrl_trainer.data.trajectories import build_trajectories


def build(*calls: Call) -> list[TrainingRow]:
    return check_invariants(list(calls), build_trajectories(calls, SkipRules(max_length=64)))


def call_ids(*calls: Call) -> list[list[str]]:
    built = build_trajectories(calls, SkipRules(max_length=64))
    check_invariants(list(calls), built)
    return [trajectory.call_ids for trajectory in built.trajectories]


# Each call is its prompt and its answer, in the order of the calls; rows are of their indices.
HISTORIES: dict[str, tuple[list[tuple[list[int], list[int]]], list[list[int]]]] = {
    "append only": (
        [([1], [10, 11]), ([1, 10, 11, 2], [12]), ([1, 10, 11, 2, 12, 3], [13])],
        [[0, 1, 2]],
    ),
    "stripped thinking": ([([1], [10, 11, 12]), ([1, 11, 12, 2], [13, 14])], [[0], [1]]),
    "a re-split in the middle of an answer": (
        [([1, 2], [10, 11, 12]), ([1, 2, 10, 99, 3], [13])],
        [[0], [1]],
    ),
    "changed key order of tool arguments": (
        [([1], [20, 21, 22, 23]), ([1, 20, 23, 22, 21, 2], [24])],
        [[0], [1]],
    ),
    "interleaved sub-agents": (
        [([1], [10]), ([5], [20]), ([1, 10, 2], [11]), ([5, 20, 6], [21])],
        [[0, 2], [1, 3]],
    ),
    "a fan-out": (
        [([1], [10]), ([1, 10, 2], [11]), *(([1, 10, 2, 11, 3 + i], [20 + i]) for i in range(3))],
        [[0, 1, 2], [3], [4]],
    ),
    "a summary": (
        [([1], [10]), ([1, 10, 2], [11]), ([7, 8], [12]), ([1, 12, 3], [13])],
        [[0, 1], [2], [3]],
    ),
    "an assistant message that no model sampled": (
        [([1], [10]), ([1, 10, 2, 50, 51, 3], [11])],
        [[0, 1]],
    ),
    "the same request again": ([([1, 2], [17, 18])] * 3, [[0], [1], [2]]),
    "the longest parent": ([([1], [12]), ([1], [12, 13]), ([1, 12, 13, 4], [15])], [[0], [1, 2]]),
    "a prompt that ends inside an answer": ([([1, 2], [13, 14]), ([1, 2, 13], [15])], [[0], [1]]),
    # 256 is 00 01 00 00 in memory: its bytes contain those of other ids at odd offsets.
    "tokens that contain each other's bytes": (
        [([1], [256]), ([1, 256 + 65536, 5], [2])],
        [[0], [1]],
    ),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_what_agents_do_with_their_history_decides_the_rows(history: str) -> None:
    turns, rows = HISTORIES[history]
    calls = [make(str(i), *turn, seq=i) for i, turn in enumerate(turns)]
    assert call_ids(*calls) == [[str(i) for i in row] for row in rows]


def test_a_fork_trains_the_shared_part_once() -> None:
    forked = [make("a", [1], [2], 0), make("b", [1, 2, 3], [4], 1), make("c", [1, 2, 5], [6], 2)]
    assert call_ids(*forked) == [["a", "b"], ["c"]]
    first, second = build(*forked)
    assert (first.tokens, first.mask) == ([1, 2, 3, 4], [False, True, False, True])
    assert (second.tokens, second.mask) == ([1, 2, 5, 6], [False, False, False, True])


def test_other_adapters_are_context() -> None:
    x = make("x", [1], [2], seq=0, adapter="asker")
    y = make("y", [1, 2, 3], [4], seq=1, adapter="guesser")
    z = make("z", [1, 2, 3, 4, 5], [6], seq=2, adapter="asker")
    asker, guesser = build(x, y, z)
    assert (asker.adapter, asker.tokens) == ("asker", [1, 2, 3, 4, 5, 6])
    assert asker.mask == [False, True, False, False, False, True]
    assert (guesser.adapter, guesser.mask) == ("guesser", [False, False, False, True])


def test_calls_of_another_temperature_are_context_where_rows_have_one() -> None:
    x = make("x", [1], [2], seq=0)
    y = make("y", [1, 2, 3], [4], seq=1, params={"temperature": 0.7})
    z = make("z", [1, 2, 3, 4, 5], [6], seq=2, params={"temperature": 0.0})  # trains at 1
    assert call_ids(x, y, z) == [["x", "y", "z"]]
    apart = build_trajectories([x, y, z], SkipRules(max_length=64, one_temperature=True))
    check_invariants([x, y, z], apart)
    assert [each.call_ids for each in apart.trajectories] == [["y"], ["x", "z"]]


def test_calls_without_credit_stay_in_the_mask() -> None:
    calls = [make("a", [1], [2], 0), make("b", [1, 2, 3], [4, 5], 1)]
    [path] = build_trajectories(calls, SkipRules(max_length=64)).trajectories
    row = to_training_row(path, {"b": 2.0, "elsewhere": 9.0})
    assert (row.advantages, row.trained) == ([0, 0, 0, 2.0, 2.0], 3)


def test_n_choices_are_siblings() -> None:
    choices = [make(f"a#{i}", [1], [10 + i], seq=0, choice=i, response_id="a") for i in range(3)]
    following = make("b", [1, 11, 2], [20], seq=1)  # the agent went on with the second
    assert call_ids(*choices, following) == [["a#0"], ["a#1", "b"], ["a#2"]]


def test_versions_of_an_answer() -> None:
    assert token_versions(make("a", [1], [10, 11], adapter_version=3)) == [3, 3]
    mixed = make("b", [1], [11, 12], adapter_version=4, params={"mixed_versions": True})
    assert token_versions(mixed) == [4, 4]  # of a mixed answer, the oldest
    stretches = {"mixed_versions": True, "versions": [[0, 4], [1, 5]]}
    assert token_versions(replace(mixed, params=stretches)) == [4, 5]  # or each token's own
    assert token_versions(make("c", [1], [10], adapter_version=None)) == [-1]


# ---- properties


@settings(max_examples=60, deadline=None)
@given(calls=call_trees(), order=st.randoms(use_true_random=False))
def test_every_sampled_token_trains_exactly_once(calls: list[Call], order: random.Random) -> None:
    built = build_trajectories(calls, SkipRules(max_length=12))
    check_invariants(calls, built)
    shuffled = list(calls)
    order.shuffle(shuffled)
    assert build_trajectories(shuffled, SkipRules(max_length=12)) == built


@settings(max_examples=50, deadline=None)
@given(calls=call_trees())
def test_no_needless_trajectories(calls: list[Call]) -> None:
    """As many per adapter as there are leaves: calls that no kept call has as its parent.

    Parents are found here the slow way, by the definition.
    """
    built = build_trajectories(calls, SkipRules(max_length=1000))
    kept = [call for call in calls if call.id not in built.skipped]
    parents: set[str] = set()
    for call in kept:
        extended = {
            other.id: len(whole)
            for other in kept
            if other.adapter == call.adapter
            and (whole := other.prompt_ids + other.response_ids) == call.prompt_ids[: len(whole)]
        }
        parents |= {max(extended, key=extended.__getitem__)} if extended else set()
    assert len(built.trajectories) == len(kept) - len(parents)


def test_many_calls_with_long_prompts_stay_quick() -> None:
    calls = []
    history = list(range(100))
    for seq in range(300):
        response = [seq % 7, 8, 9]
        calls.append(make(f"c{seq}", list(history), response, seq=seq))
        history += [*response, 5] if seq % 3 else [seq]
    built = build_trajectories(calls, SkipRules(max_length=10_000))
    check_invariants(calls, built)
