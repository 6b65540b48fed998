"""Why a call does not train: by itself, by its attempt, and by how it was sampled."""

from __future__ import annotations

import math
from typing import Any

import pytest
from call_records import check_invariants, make

from agentrl_tracer.schemas import Call, CallState, SkipReason
from agentrl_trainer.data.skip_reasons import (
    SkipRules,
    call_reason,
    importance_weight,
    sampled_otherwise,
)
from agentrl_trainer.data.trajectories import TrajectorySet, build_trajectories


def build(*calls: Call, **options: Any) -> TrajectorySet:
    built = build_trajectories(calls, SkipRules(max_length=64, **options))
    check_invariants(list(calls), built)
    return built


def rows(built: TrajectorySet) -> list[list[str]]:
    return [trajectory.call_ids for trajectory in built.trajectories]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"skip_reason": SkipReason.SUPERSEDED}, SkipReason.SUPERSEDED),
        ({"adapter": None}, SkipReason.NOT_TRAINABLE_MODEL),
        ({"adapter": "unknown"}, SkipReason.NOT_TRAINABLE_MODEL),
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
def test_one_call_by_itself(changes: dict[str, Any], reason: SkipReason | None) -> None:
    call = make("a", [1, 2], [3, 4], **changes)
    verdict = call_reason(call, SkipRules(max_length=10, adapters=["default"], oldest_version=2))
    assert verdict is reason


def test_any_adapter_trains_unless_told_otherwise() -> None:
    assert call_reason(make("a", [1], [2], adapter="any"), SkipRules(max_length=10)) is None


def test_a_skipped_call_leaves_its_tokens_as_context() -> None:
    a = make("a", [1], [2], seq=0)
    b = make("b", [1, 2, 3], [4], seq=1, state=CallState.CANCELLED)
    c = make("c", [1, 2, 3, 4, 5], [6], seq=2)
    built = build(a, b, c)
    assert rows(built) == [["a", "c"]]
    assert built.skipped == {"b": SkipReason.CLIENT_DISCONNECTED}


# ---- what went wrong


def choices_of(response: str, seq: int, states: dict[int, CallState]) -> list[Call]:
    return [
        make(f"{response}#{i}@{seq}", [1], [10 + i] if state is CallState.COMPLETED else [],
             seq=seq, choice=i, response_id=response, state=state)
        for i, state in states.items()
    ]  # fmt: skip


DONE, FAILED = CallState.COMPLETED, CallState.ERROR


def test_choices_of_an_answer_that_was_never_given() -> None:
    """The agent did not ask again, or later, and was given another answer."""
    lost = choices_of("a", 0, {0: DONE, 1: FAILED, 2: DONE})
    anew = choices_of("b", 1, {0: DONE, 1: DONE, 2: DONE})
    built = build(*lost, *anew)
    assert rows(built) == [[call.id] for call in anew]
    assert built.skipped == dict.fromkeys((c.id for c in lost), SkipReason.SAMPLER_ERROR)


def test_choices_of_an_answer_that_a_retry_completed() -> None:
    calls = choices_of("a", 0, {0: DONE, 1: FAILED, 2: DONE})
    calls += [*choices_of("a", 1, {1: FAILED}), *choices_of("a", 2, {1: DONE})]
    built = build(*calls)
    assert rows(built) == [["a#0@0"], ["a#2@0"], ["a#1@2"]]
    assert len(built.skipped) == 2


@pytest.mark.parametrize("policy", ["train", "skip"])
def test_an_answer_cut_off_at_its_limit_follows_the_policy(policy: Any) -> None:
    cut = make("cut", [1], [10, 11], seq=0, finish_reason="length")
    following = make("following", [1, 10, 11, 2], [12], seq=1)
    built = build(cut, following, truncated=policy)
    trains = policy == "train"
    assert rows(built) == ([["cut", "following"]] if trains else [["following"]])
    assert built.skipped == ({} if trains else {"cut": SkipReason.TRUNCATED})


# ---- who answered, and how


def test_auxiliary_calls_are_left_out_by_their_agent() -> None:
    a = make("a", [1], [10], seq=0, agent="writer")
    title = make("title", [1, 10, 7], [11], seq=1, agent="title")
    summary = make("summary", [1, 10, 8], [12], seq=2, agent="summarizer")
    nameless = make("nameless", [1, 10, 2], [13], seq=3)
    built = build(a, title, summary, nameless, skip_agents=("title", "summar*"))
    assert rows(built) == [["a", "nameless"]]
    assert built.skipped == dict.fromkeys(("title", "summary"), SkipReason.OTHER_AGENT)


@pytest.mark.parametrize(
    ("params", "kind", "weight"),
    [
        ({}, None, 1.0),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1}, None, 1.0),
        ({"temperature": 0.7}, None, 1.0),  # the policy at 0.7 is what trains
        ({"temperature": 0}, "greedy", None),
        ({"top_p": 0.9}, "filtered", None),
        ({"top_k": 40}, "filtered", None),
        ({"logit_bias": {"5": 1.0}}, "biased", None),
        ({"constrained": "json_schema", "constrained_log_mass": -2.0}, "constrained", math.exp(-2)),
        ({"constrained": "json_schema", "constrained_log_mass": 0.0}, None, 1.0),
        ({"constrained": "json_schema"}, "constrained", None),
        (
            {"constrained": "json_schema", "constrained_log_mass": -2.0, "temperature": 0.5},
            "constrained",
            None,
        ),
    ],
)
def test_sampling_other_than_from_the_policy(
    params: dict[str, Any], kind: str | None, weight: float | None
) -> None:
    one = make("a", [1], [10], params=params)
    assert sampled_otherwise(one) == kind
    assert importance_weight(one) == (None if weight is None else pytest.approx(weight))
    assert rows(build(one)) == [["a"]]
    for off_policy, trains in (("skip", kind is None), ("weight", weight is not None)):
        skipped = build(one, off_policy=off_policy).skipped
        assert skipped == ({} if trains else {"a": SkipReason.OFF_POLICY})
