"""The call graph: every sampled token trains exactly once, every call has one fate."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_tracer.schemas import Call, CallState, SkipReason
from agentrl_trainer.data.off_policy import token_versions
from agentrl_trainer.data.skip_reasons import CallLimits, call_reason
from agentrl_trainer.data.trajectories import TrajectorySet, build_trajectories


def make(name: str, prompt: list[int], response: list[int], seq: int = 0, **changes: Any) -> Call:
    call = Call(
        id=name,
        response_id=name,
        choice=0,
        run_id="run",
        rollout_id="rollout",
        attempt_id="attempt",
        seq=seq,
        agent=None,
        model="policy",
        adapter="default",
        adapter_version=3,
        state=CallState.COMPLETED,
        prompt_ids=prompt,
        response_ids=response,
        # Unmistakable: a log-prob says which call and which position it belongs to.
        response_logprobs=[-(seq + 1) - i / 1000 for i in range(len(response))],
        finish_reason="stop",
        params={},
        request=None,
        response=None,
        error=None,
        trace_id=None,
        span_id=None,
        started_at=0.0,
        ended_at=1.0,
    )
    return dataclasses.replace(call, **changes)


def check_invariants(calls: list[Call], built: TrajectorySet) -> None:
    trained: dict[str, int] = {}
    for trajectory in built.trajectories:
        size = len(trajectory.tokens)
        assert len(trajectory.mask) == len(trajectory.logprobs) == len(trajectory.versions) == size
        by_id = {call.id: call for call in calls}
        expected_mask = [False] * size
        for turn in trajectory.turns:
            call = by_id[turn.call_id]
            trained[call.id] = trained.get(call.id, 0) + 1
            assert call.adapter == trajectory.adapter
            assert trajectory.tokens[: turn.start] == call.prompt_ids
            assert trajectory.tokens[turn.start : turn.end] == call.response_ids
            assert trajectory.logprobs[turn.start : turn.end] == call.response_logprobs
            assert trajectory.versions[turn.start : turn.end] == token_versions(call)
            assert not any(expected_mask[turn.start : turn.end]), "turns overlap"
            expected_mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
        assert trajectory.mask == expected_mask
        for at in range(size):
            if not trajectory.mask[at]:
                assert trajectory.logprobs[at] == 0.0
                assert trajectory.versions[at] == -1
    assert set(trained.values()) <= {1}, "a call trains twice"
    assert trained.keys() | built.skipped.keys() == {call.id for call in calls}
    assert not trained.keys() & built.skipped.keys()


# ---- shapes


def test_a_conversation_is_one_trajectory() -> None:
    a = make("a", [1, 2], [3], seq=0)
    b = make("b", [1, 2, 3, 4], [5, 6], seq=1, adapter_version=4)
    built = build_trajectories([a, b], max_length=100)
    (trajectory,) = built.trajectories
    assert trajectory.tokens == [1, 2, 3, 4, 5, 6]
    assert trajectory.mask == [False, False, True, False, True, True]
    assert trajectory.logprobs == [0, 0, -1.0, 0, -2.0, -2.001]
    assert trajectory.versions == [-1, -1, 3, -1, 4, 4]
    assert trajectory.call_ids == ["a", "b"]
    assert built.skipped == {}


def test_a_fork_trains_the_shared_part_once() -> None:
    a = make("a", [1], [2], seq=0)
    b = make("b", [1, 2, 3], [4], seq=1)
    c = make("c", [1, 2, 5], [6], seq=2)
    built = build_trajectories([a, b, c], max_length=100)
    assert [t.tokens for t in built.trajectories] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [t.call_ids for t in built.trajectories] == [["a", "b"], ["c"]]
    assert built.trajectories[1].mask == [False, False, False, True]


def test_identical_requests_are_separate_samples() -> None:
    calls = [make(f"s{i}", [1, 2], [7, 8], seq=i) for i in range(3)]
    built = build_trajectories(calls, max_length=100)
    assert [t.call_ids for t in built.trajectories] == [["s0"], ["s1"], ["s2"]]
    assert all(t.mask == [False, False, True, True] for t in built.trajectories)


def test_the_longest_parent_wins() -> None:
    a = make("a", [1], [2], seq=0)
    b = make("b", [1], [2, 3], seq=1)
    c = make("c", [1, 2, 3, 4], [5], seq=2)
    built = build_trajectories([a, b, c], max_length=100)
    assert [t.call_ids for t in built.trajectories] == [["a"], ["b", "c"]]


def test_a_prompt_which_merely_begins_alike_starts_anew() -> None:
    a = make("a", [1, 2], [3, 4], seq=0)
    b = make("b", [1, 2, 3, 9], [5], seq=1)  # history was changed inside a's answer
    c = make("c", [1, 2, 3], [5], seq=2)  # ends inside a's answer
    built = build_trajectories([a, b, c], max_length=100)
    assert [t.call_ids for t in built.trajectories] == [["a"], ["b"], ["c"]]


def test_tokens_are_compared_whole_not_by_bytes() -> None:
    """256 is 00 01 00 00 in memory: its bytes contain those of other ids at odd offsets."""
    a = make("a", [1], [256], seq=0)
    b = make("b", [1, 256 + 65536, 5], [2], seq=1)
    built = build_trajectories([a, b], max_length=100)
    assert [t.call_ids for t in built.trajectories] == [["a"], ["b"]]


def test_other_adapters_are_context() -> None:
    x = make("x", [1], [2], seq=0, adapter="asker")
    y = make("y", [1, 2, 3], [4], seq=1, adapter="guesser")
    z = make("z", [1, 2, 3, 4, 5], [6], seq=2, adapter="asker")
    built = build_trajectories([x, y, z], max_length=100)
    asker, guesser = built.trajectories
    assert (asker.adapter, asker.call_ids) == ("asker", ["x", "z"])
    assert asker.tokens == [1, 2, 3, 4, 5, 6]
    assert asker.mask == [False, True, False, False, False, True]
    assert (guesser.adapter, guesser.mask) == ("guesser", [False, False, False, True])


def test_a_skipped_call_leaves_its_tokens_as_context() -> None:
    a = make("a", [1], [2], seq=0)
    b = make("b", [1, 2, 3], [4], seq=1, state=CallState.CANCELLED)
    c = make("c", [1, 2, 3, 4, 5], [6], seq=2)
    built = build_trajectories([a, b, c], max_length=100)
    (trajectory,) = built.trajectories
    assert trajectory.call_ids == ["a", "c"]
    assert built.skipped == {"b": SkipReason.CLIENT_DISCONNECTED}


def test_a_call_too_long_does_not_take_its_conversation_along() -> None:
    a = make("a", [1], [2], seq=0)
    b = make("b", [1, 2, 3], [4, 5], seq=1)
    built = build_trajectories([a, b], max_length=4)
    assert [t.call_ids for t in built.trajectories] == [["a"]]
    assert built.skipped == {"b": SkipReason.TOO_LONG}
    assert build_trajectories([a, b], max_length=5).skipped == {}


def test_temperature() -> None:
    a = make("a", [1], [2], seq=0)
    same = make("b", [1, 2, 3], [4], seq=1, params={"temperature": 1})
    other = make("b", [1, 2, 3], [4], seq=1, params={"temperature": 0.5})
    greedy = make("b", [1, 2, 3], [4], seq=1, params={"temperature": 0})
    assert build_trajectories([a, same], max_length=9).trajectories[0].temperatures == [1.0] * 4
    (row,) = build_trajectories([a, other], max_length=9).trajectories
    assert row.temperatures == [1.0, 1.0, 1.0, 0.5]
    assert build_trajectories([a, greedy], max_length=9).trajectories[0].temperatures == [1.0] * 4


def test_nothing() -> None:
    assert build_trajectories([], max_length=1) == TrajectorySet([], {})


def test_calls_of_two_attempts_are_refused() -> None:
    calls = [make("a", [1], [2]), make("b", [1], [2], attempt_id="other")]
    with pytest.raises(ValueError, match="several attempts"):
        build_trajectories(calls, max_length=9)


def test_two_calls_with_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="share an id"):
        build_trajectories([make("a", [1], [2]), make("a", [1], [2])], max_length=9)


# ---- screening


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"skip_reason": SkipReason.SUPERSEDED}, SkipReason.SUPERSEDED),
        ({"adapter": None}, SkipReason.NOT_TRAINABLE_MODEL),
        ({"adapter": "somebody-else"}, SkipReason.NOT_TRAINABLE_MODEL),
        ({"adapter": None, "state": CallState.ERROR}, SkipReason.NOT_TRAINABLE_MODEL),
        ({"state": CallState.OPEN}, SkipReason.LATE_CALL),
        ({"state": CallState.CANCELLED}, SkipReason.CLIENT_DISCONNECTED),
        ({"state": CallState.ERROR, "response_ids": []}, SkipReason.SAMPLER_ERROR),
        ({"response_ids": [], "response_logprobs": []}, SkipReason.EMPTY_RESPONSE),
        ({"response_logprobs": [-0.1]}, SkipReason.MALFORMED_RECORD),
        ({"response_logprobs": [-0.1, -0.1, -0.1]}, SkipReason.MALFORMED_RECORD),
        ({"response_logprobs": [-0.1, math.nan]}, SkipReason.MALFORMED_RECORD),
        ({"response_logprobs": [-0.1, -math.inf]}, SkipReason.MALFORMED_RECORD),
        ({"response_logprobs": [-0.1, 0.5]}, SkipReason.MALFORMED_RECORD),
        ({"response_logprobs": [-0.1, 1e-6]}, None),
        ({"prompt_ids": []}, SkipReason.MALFORMED_RECORD),
        ({"prompt_ids": [1, -1]}, SkipReason.MALFORMED_RECORD),
        ({"response_ids": [1, 2**31]}, SkipReason.MALFORMED_RECORD),
        ({"adapter_version": None}, SkipReason.MALFORMED_RECORD),
        ({"prompt_ids": [1] * 9}, SkipReason.TOO_LONG),
        ({"prompt_ids": [1] * 8}, None),
        ({"adapter_version": 1}, SkipReason.STALE),
        ({"adapter_version": 2}, None),
    ],
)
def test_judge(changes: dict[str, Any], reason: SkipReason | None) -> None:
    call = make("a", [1, 2], [3, 4], **changes)
    verdict = call_reason(call, CallLimits(10, ["default"], oldest_version=2))
    assert verdict is reason


def test_any_adapter_trains_unless_told_otherwise() -> None:
    assert call_reason(make("a", [1], [2], adapter="whoever"), CallLimits(10)) is None


# ---- properties


@st.composite
def call_trees(draw: st.DrawFn) -> list[Call]:
    """Random agents: continue a call, branch off it, resample it, or begin something new."""
    tokens = st.integers(0, 2)  # a small alphabet, so that prefixes coincide by accident too
    some = st.lists(tokens, min_size=1, max_size=3)
    calls: list[Call] = []
    for seq in range(draw(st.integers(1, 12))):
        prompt = draw(some)
        if calls and draw(st.integers(0, 3)):
            other = draw(st.sampled_from(calls))
            prompt = (
                draw(
                    st.sampled_from(
                        [
                            other.prompt_ids,
                            other.prompt_ids + other.response_ids,
                            other.prompt_ids + other.response_ids + prompt,
                        ]
                    )
                )
                or prompt
            )
        calls.append(
            make(
                f"c{seq}",
                prompt,
                draw(st.one_of(some, some, some, st.just([]))),
                seq=seq,
                adapter=draw(st.sampled_from(["x", "x", "y", None])),
                adapter_version=draw(st.integers(0, 3)),
                state=draw(st.sampled_from([*[CallState.COMPLETED] * 5, *CallState])),
            )
        )
    return calls


@settings(max_examples=150, deadline=None)
@given(calls=call_trees(), order=st.randoms(use_true_random=False))
def test_every_sampled_token_trains_exactly_once(calls: list[Call], order: random.Random) -> None:
    built = build_trajectories(calls, max_length=12)
    check_invariants(calls, built)
    shuffled = list(calls)
    order.shuffle(shuffled)
    assert build_trajectories(shuffled, max_length=12) == built


@settings(max_examples=100, deadline=None)
@given(calls=call_trees())
def test_no_needless_trajectories(calls: list[Call]) -> None:
    """As many per adapter as there are leaves: calls that no kept call has as its parent.

    Parents are found here the slow way, by the definition.
    """
    built = build_trajectories(calls, max_length=1000)
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
    built = build_trajectories(calls, max_length=10_000)
    check_invariants(calls, built)
