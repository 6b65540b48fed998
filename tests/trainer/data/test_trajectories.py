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
from agentrl_trainer.data.trajectories import TrajectorySet, build_trajectories


def build(*calls: Call) -> TrajectorySet:
    built = build_trajectories(calls, SkipRules(max_length=64))
    check_invariants(list(calls), built)
    return built


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
    assert [[int(name) for name in row.call_ids] for row in build(*calls).trajectories] == rows


def test_a_fork_trains_the_shared_part_once() -> None:
    a = make("a", [1], [2], seq=0)
    b = make("b", [1, 2, 3], [4], seq=1)
    c = make("c", [1, 2, 5], [6], seq=2)
    first, second = build(a, b, c).trajectories
    assert (first.tokens, first.call_ids) == ([1, 2, 3, 4], ["a", "b"])
    assert (second.tokens, second.call_ids) == ([1, 2, 5, 6], ["c"])
    assert second.mask == [False, False, False, True]


def test_other_adapters_are_context() -> None:
    x = make("x", [1], [2], seq=0, adapter="asker")
    y = make("y", [1, 2, 3], [4], seq=1, adapter="guesser")
    z = make("z", [1, 2, 3, 4, 5], [6], seq=2, adapter="asker")
    built = build_trajectories([x, y, z], SkipRules(max_length=100))
    asker, guesser = built.trajectories
    assert (asker.adapter, asker.call_ids) == ("asker", ["x", "z"])
    assert asker.tokens == [1, 2, 3, 4, 5, 6]
    assert asker.mask == [False, True, False, False, False, True]
    assert (guesser.adapter, guesser.mask) == ("guesser", [False, False, False, True])


def test_n_choices_are_siblings() -> None:
    choices = [make(f"a#{i}", [1], [10 + i], seq=0, choice=i, response_id="a") for i in range(3)]
    following = make("b", [1, 11, 2], [20], seq=1)  # the agent went on with the second
    built = build(*choices, following)
    assert [row.call_ids for row in built.trajectories] == [["a#0"], ["a#1", "b"], ["a#2"]]


def test_versions_of_an_answer() -> None:
    assert token_versions(make("a", [1], [10, 11], adapter_version=3)) == [3, 3]
    mixed = make("b", [1], [11, 12], adapter_version=4, params={"mixed_versions": True})
    assert token_versions(mixed) == [4, 4]  # of a mixed answer, the oldest
    stretches = {"mixed_versions": True, "versions": [[0, 4], [1, 5]]}
    assert token_versions(replace(mixed, params=stretches)) == [4, 5]  # or each token's own
    assert token_versions(make("c", [1], [10], adapter_version=None)) == [-1]


@pytest.mark.parametrize(("given", "trained"), [(1, 1.0), (0.5, 0.5), (0, 1.0)])
def test_temperature(given: float, trained: float) -> None:
    first = make("a", [1], [2], seq=0)
    second = make("b", [1, 2, 3], [4], seq=1, params={"temperature": given})
    (row,) = build(first, second).trajectories
    assert row.temperatures == [1.0, 1.0, 1.0, trained]


def test_calls_of_two_attempts_or_with_one_id_are_refused() -> None:
    assert build_trajectories([], SkipRules(max_length=1)) == TrajectorySet([], {})
    with pytest.raises(ValueError, match="several attempts"):
        build_trajectories(
            [make("a", [1], [2]), make("b", [1], [2], attempt_id="c")], SkipRules(max_length=9)
        )
    with pytest.raises(ValueError, match="share an id"):
        build_trajectories([make("a", [1], [2]), make("a", [1], [2])], SkipRules(max_length=9))


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
    parents = set()
    for call in kept:
        extended = [
            other
            for other in kept
            if other.adapter == call.adapter
            and (whole := other.prompt_ids + other.response_ids) == call.prompt_ids[: len(whole)]
        ]
        if extended:
            longest = max(len(o.prompt_ids) + len(o.response_ids) for o in extended)
            parents.add(
                next(o.id for o in extended if len(o.prompt_ids) + len(o.response_ids) == longest)
            )
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
