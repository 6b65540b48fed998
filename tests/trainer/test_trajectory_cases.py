"""The cases that agents make of a call graph, one test each: what trains, why the rest does not.

Small token ids stand for text: 1 to 9 prompts, 10 and up answers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step import call as step_call
from test_step import reward, rollout
from test_trajectories import call_trees, check_invariants, make

from agentrl_tracer.schemas import Call, CallState, Reward, RolloutState, SkipReason
from agentrl_trainer.data.advantages import ESTIMATORS
from agentrl_trainer.data.batch_assembly import (
    BY_TOKEN,
    BY_TURN,
    StepBatch,
    StepSettings,
    assemble,
    normalize_lengths,
)
from agentrl_trainer.data.off_policy import importance_weight, sampled_otherwise
from agentrl_trainer.data.rewards import rollout_reward, turn_rewards
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.training_row import to_training_row
from agentrl_trainer.data.trajectories import TrajectorySet, build_trajectories

LIMIT = 64


def build(*calls: Call, **options: Any) -> TrajectorySet:
    built = build_trajectories(calls, max_length=LIMIT, **options)
    check_invariants(list(calls), built)
    return built


def rows(built: TrajectorySet) -> list[list[str]]:
    return [trajectory.call_ids for trajectory in built.trajectories]


def sampled(built: TrajectorySet) -> int:
    return sum(sum(trajectory.mask) for trajectory in built.trajectories)


# ---- what agents do with their history


def test_append_only_turns_are_one_row() -> None:
    a = make("a", [1], [10, 11], seq=0)
    b = make("b", [1, 10, 11, 2], [12], seq=1)
    c = make("c", [1, 10, 11, 2, 12, 3], [13], seq=2)
    assert rows(build(a, b, c)) == [["a", "b", "c"]]


def test_stripped_thinking_makes_two_rows_and_loses_no_token() -> None:
    a = make("a", [1], [10, 11, 12], seq=0)  # 10 is the thought
    b = make("b", [1, 11, 12, 2], [13, 14], seq=1)  # the template left it out
    built = build(a, b)
    assert rows(built) == [["a"], ["b"]]
    assert sampled(built) == 5


def test_a_bpe_resplit_in_mid_answer_forks_at_that_token() -> None:
    a = make("a", [1, 2], [10, 11, 12], seq=0)
    b = make("b", [1, 2, 10, 99, 3], [13], seq=1)  # 11 12 came back as 99
    built = build(a, b)
    assert rows(built) == [["a"], ["b"]]
    first, second = built.trajectories
    shared = next(
        i for i, (x, y) in enumerate(zip(first.tokens, second.tokens, strict=False)) if x != y
    )
    assert shared == 3
    # What is the same up to the fork trains in the row that sampled it, and there alone.
    assert first.mask == [False, False, True, True, True]
    assert second.mask == [False] * 5 + [True]


def test_changed_key_order_of_tool_arguments_forks() -> None:
    """The gateway gives such prompts their own tokens back; a sampler without it forks here."""
    a = make("a", [1], [20, 21, 22, 23], seq=0)  # {"a": 1, "b": 2}
    b = make("b", [1, 20, 23, 22, 21, 2], [24], seq=1)  # {"b": 2, "a": 1}
    built = build(a, b)
    assert rows(built) == [["a"], ["b"]]
    assert sampled(built) == 5


def test_two_interleaved_sub_agents_are_two_rows() -> None:
    a1 = make("a1", [1], [10], seq=0, agent="asker")
    b1 = make("b1", [5], [20], seq=1, agent="guesser")
    a2 = make("a2", [1, 10, 2], [11], seq=2, agent="asker")
    b2 = make("b2", [5, 20, 6], [21], seq=3, agent="guesser")
    assert rows(build(a1, b1, a2, b2)) == [["a1", "a2"], ["b1", "b2"]]


def test_a_fan_out_trains_the_shared_turns_once() -> None:
    root = make("root", [1], [10], seq=0)
    more = make("more", [1, 10, 2], [11], seq=1)
    branches = [make(f"b{i}", [1, 10, 2, 11, 3 + i], [20 + i], seq=2 + i) for i in range(3)]
    built = build(root, more, *branches)
    assert rows(built) == [["root", "more", "b0"], ["b1"], ["b2"]]
    assert sampled(built) == 5


def test_a_summary_resets_the_context() -> None:
    a = make("a", [1], [10], seq=0)
    b = make("b", [1, 10, 2], [11], seq=1)
    summary = make("summary", [7, 8], [12], seq=2)
    after = make("after", [1, 12, 3], [13], seq=3)
    assert rows(build(a, b, summary, after)) == [["a", "b"], ["summary"], ["after"]]


def test_an_assistant_message_that_nobody_sampled_is_context_only() -> None:
    a = make("a", [1], [10], seq=0)
    b = make("b", [1, 10, 2, 50, 51, 3], [11], seq=1)  # 50 51: written by the agent's author
    (row,) = build(a, b).trajectories
    assert row.tokens == [1, 10, 2, 50, 51, 3, 11]
    assert [i for i, on in enumerate(row.mask) if on] == [1, 6]


def test_a_malformed_tool_call_trains_as_the_text_it_is() -> None:
    said = {"choices": [{"message": {"content": "{oops"}}]}
    a = replace(make("a", [1], [10, 11], seq=0), response=said)
    b = make("b", [1, 10, 11, 2], [12], seq=1)
    assert rows(build(a, b)) == [["a", "b"]]


# ---- the same again


def test_the_same_request_twice_unmarked_is_two_samples() -> None:
    a = make("a", [1], [10], seq=0)
    b = make("b", [1], [11], seq=1)
    assert rows(build(a, b)) == [["a"], ["b"]]


# A client's marked retry leaves no record of its own: tests/proxy/test_retries.py has the rows of
# real gateways, test_a_retry_of_a_completed_request_trains_once and its neighbours.


def test_n_choices_are_siblings() -> None:
    choices = [make(f"a#{i}", [1], [10 + i], seq=0, choice=i, response_id="a") for i in range(3)]
    following = make("b", [1, 11, 2], [20], seq=1)  # the agent went on with the second
    assert rows(build(*choices, following)) == [["a#0"], ["a#1", "b"], ["a#2"]]


# ---- what went wrong


def choices_of(response: str, seq: int, states: dict[int, CallState]) -> list[Call]:
    return [
        make(f"{response}#{i}@{seq}", [1], [10 + i] if state is CallState.COMPLETED else [],
             seq=seq, choice=i, response_id=response, state=state)
        for i, state in states.items()
    ]  # fmt: skip


def test_choices_of_an_answer_that_was_never_given() -> None:
    """The agent did not ask again, or later, and was given another answer."""
    done, failed = CallState.COMPLETED, CallState.ERROR
    lost = choices_of("a", 0, {0: done, 1: failed, 2: done})
    anew = choices_of("b", 1, {0: done, 1: done, 2: done})
    built = build(*lost, *anew)
    assert rows(built) == [[call.id] for call in anew]
    assert built.skipped == dict.fromkeys((c.id for c in lost), SkipReason.SAMPLER_ERROR)


def test_choices_of_an_answer_that_a_retry_completed() -> None:
    done, failed = CallState.COMPLETED, CallState.ERROR
    calls = choices_of("a", 0, {0: done, 1: failed, 2: done})
    calls += choices_of("a", 1, {1: failed})
    calls += choices_of("a", 2, {1: done})
    built = build(*calls)
    assert rows(built) == [["a#0@0"], ["a#2@0"], ["a#1@2"]]
    assert len(built.skipped) == 2


def test_a_client_that_left_in_mid_stream() -> None:
    a = make("a", [1], [10, 11], seq=0, state=CallState.CANCELLED)
    again = make("again", [1], [12], seq=1)
    built = build(a, again)
    assert rows(built) == [["again"]]
    assert built.skipped == {"a": SkipReason.CLIENT_DISCONNECTED}


def test_errors_and_then_success() -> None:
    lost = [
        make(f"e{i}", [1], [], seq=i, state=CallState.ERROR, error=error)
        for i, error in enumerate(("429", "500"))
    ]
    built = build(*lost, make("a", [1], [10], seq=2))
    assert rows(built) == [["a"]]
    assert built.skipped == dict.fromkeys(("e0", "e1"), SkipReason.SAMPLER_ERROR)


def test_an_empty_completion() -> None:
    built = build(make("a", [1], [], seq=0), make("b", [1, 2], [10], seq=1))
    assert rows(built) == [["b"]]
    assert built.skipped == {"a": SkipReason.EMPTY_RESPONSE}


@pytest.mark.parametrize("policy", ["train", "skip"])
def test_an_answer_cut_off_at_its_limit_follows_the_policy(policy: Any) -> None:
    cut = make("cut", [1], [10, 11], seq=0, finish_reason="length")
    following = make("following", [1, 10, 11, 2], [12], seq=1)
    built = build(cut, following, rules=SkipRules(truncated=policy))
    if policy == "train":
        assert rows(built) == [["cut", "following"]]
    else:
        assert rows(built) == [["following"]]
        assert built.skipped == {"cut": SkipReason.TRUNCATED}


def test_an_overlong_prompt() -> None:
    a = make("a", [1], [10], seq=0)
    b = make("b", [1, 10, *[2] * LIMIT], [11], seq=1)
    built = build(a, b)
    assert rows(built) == [["a"]]
    assert built.skipped == {"b": SkipReason.TOO_LONG}


def test_lengths_that_disagree_reject_the_call_and_the_batch_lives() -> None:
    bad = make("bad", [1], [10, 11], seq=0, response_logprobs=[-0.5])
    built = build(bad, make("good", [1, 10, 11, 2], [12], seq=1))
    assert rows(built) == [["good"]]
    assert built.skipped == {"bad": SkipReason.MALFORMED_RECORD}


def test_late_calls() -> None:
    """Open when the attempt was sealed, or finished after it: the gateway marks the latter."""
    still = make("still", [1], [], seq=0, state=CallState.OPEN)
    after = make("after", [1], [10], seq=1, skip_reason=SkipReason.LATE_CALL)
    built = build(still, after, make("good", [1], [11], seq=2))
    assert rows(built) == [["good"]]
    assert built.skipped == dict.fromkeys(("still", "after"), SkipReason.LATE_CALL)


# ---- who answered, and how


def test_auxiliary_calls_are_left_out_by_their_agent() -> None:
    a = make("a", [1], [10], seq=0, agent="writer")
    title = make("title", [1, 10, 7], [11], seq=1, agent="title")
    summary = make("summary", [1, 10, 8], [12], seq=2, agent="summarizer")
    nameless = make("nameless", [1, 10, 2], [13], seq=3)
    built = build(a, title, summary, nameless, rules=SkipRules(skip_agents=("title", "summar*")))
    assert rows(built) == [["a", "nameless"]]
    assert built.skipped == dict.fromkeys(("title", "summary"), SkipReason.OTHER_AGENT)


def test_two_models_in_one_rollout() -> None:
    a = make("a", [1], [10], seq=0)
    judge = make("judge", [1, 10, 2], [30, 31], seq=1, adapter=None, adapter_version=None)
    b = make("b", [1, 10, 2, 30, 31, 3], [11], seq=2)
    built = build(a, judge, b)
    assert rows(built) == [["a", "b"]]
    assert built.skipped == {"judge": SkipReason.NOT_TRAINABLE_MODEL}
    assert sampled(built) == 2  # the judge's words are context


def test_versions_that_change_between_and_within_turns() -> None:
    a = make("a", [1], [10], seq=0, adapter_version=3)
    b = make("b", [1, 10, 2], [11, 12], seq=1, adapter_version=4, params={"mixed_versions": True})
    built = build(a, b)
    (row,) = built.trajectories
    assert row.versions == [-1, 3, -1, 4, 4]  # of a mixed answer, the oldest
    stretches = {"mixed_versions": True, "versions": [[0, 4], [1, 5]]}
    (row,) = build(a, replace(b, params=stretches)).trajectories
    assert row.versions == [-1, 3, -1, 4, 5]  # or each token's own, where it is recorded
    built = build(a, b, oldest_version=4)
    assert built.skipped == {"a": SkipReason.STALE}


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
    skipping = build(one, rules=SkipRules(off_policy="skip"))
    assert skipping.skipped == ({} if kind is None else {"a": SkipReason.OFF_POLICY})
    weighing = build(one, rules=SkipRules(off_policy="weight"))
    assert weighing.skipped == ({} if weight is not None else {"a": SkipReason.OFF_POLICY})


# ---- rewards, attempts, groups

SETTINGS = StepSettings(adapters=frozenset({"policy"}), max_length=LIMIT)


def pair(first: list[Reward], second: list[Reward], *more: Call, **options: Any) -> StepBatch:
    calls = [step_call("r1", "c1"), step_call("r2", "c2"), *more]
    settings = replace(SETTINGS, **options)
    return assemble([rollout("r1"), rollout("r2")], calls, [*first, *second], settings)


def test_a_reward_before_any_call_counts() -> None:
    early = replace(reward("r1", 1.0), created_at=-1.0)
    batch = pair([early], [reward("r2", 0.0)])
    assert batch.rewards == {"r1": 1.0, "r2": 0.0}
    assert turn_rewards([early], [step_call("r1", "c1")], ["c1"]) == [1.0]


def test_several_rewards_add_up() -> None:
    batch = pair([reward("r1", 1.0), reward("r1", 0.5)], [reward("r2", 0.0)])
    assert batch.rewards["r1"] == 1.5


def test_rewards_by_turn_go_to_the_turn_that_earned_them() -> None:
    calls = [step_call("r1", f"c{i}", seq=i) for i in range(4)]
    calls[2] = replace(calls[2], span_id="s2")
    given = [
        replace(reward("r1", 1.0), response_id="c0"),
        replace(reward("r1", 2.0), span_id="s2"),
        replace(reward("r1", 4.0), response_id="c1"),
        reward("r1", 8.0),
    ]
    assert turn_rewards(given, calls, ["c0", "c1", "c2", "c3"]) == [1, 4, 2, 8]
    # c1 and c2 do not train: what they earned is credited to what came before it.
    assert turn_rewards(given, calls, ["c0", "c3"]) == [7, 8]
    # Before the first turn: to the first of a whole attempt, to nobody's in a branch of it.
    assert turn_rewards(given, calls, ["c2", "c3"]) == [7, 8]
    assert turn_rewards(given, calls, ["c2", "c3"], whole=False) == [2, 8]
    assert turn_rewards(given, calls, []) == []


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_missing(broken: float) -> None:
    batch = pair([reward("r1", broken), reward("r1", 1.0)], [reward("r2", 0.0)])
    assert batch.rewards == {"r1": None, "r2": 0.0}
    assert batch.skipped == {"c1": SkipReason.NO_REWARD, "c2": SkipReason.SMALL_GROUP}
    assert math.isfinite(batch.metrics()["reward/mean"])


def test_a_bool_is_a_number() -> None:
    earned = rollout_reward(rollout("r1"), [reward("r1", True), reward("r1", False)])
    assert earned == 1.0
    assert isinstance(earned, float)


def test_a_missing_reward_is_not_zero() -> None:
    batch = pair([], [reward("r2", 0.0)])
    assert batch.rewards == {"r1": None, "r2": 0.0}
    assert batch.skipped["c1"] is SkipReason.NO_REWARD


def test_of_two_attempts_only_the_winner_trains() -> None:
    lost = step_call("r1", "lost", attempt="b")
    batch = pair([reward("r1", 1.0), reward("r1", 9.0, attempt="b")], [reward("r2", 0.0)], lost)
    assert batch.skipped == {"lost": SkipReason.FAILED_ATTEMPT}
    assert batch.rewards["r1"] == 1.0


def test_a_group_that_shrank_to_one_is_skipped_and_counted() -> None:
    failed = rollout("r2", state=RolloutState.FAILED)
    batch = assemble(
        [rollout("r1"), failed],
        [step_call("r1", "c1"), step_call("r2", "c2")],
        [reward("r1", 1.0)],
        SETTINGS,
    )
    assert batch.skipped == {"c1": SkipReason.SMALL_GROUP, "c2": SkipReason.FAILED_ROLLOUT}
    assert batch.metrics()["groups/skipped"] == 1
    assert batch.rows == []


def test_off_policy_calls_are_counted() -> None:
    hot = replace(step_call("r1", "hot", seq=1), params={"temperature": 1.3})
    mixed = replace(step_call("r2", "mixed", seq=1), params={"mixed_versions": True})
    batch = pair([reward("r1", 1.0)], [reward("r2", 0.0)], hot, mixed)
    metrics = batch.metrics()
    assert metrics["off_policy/temperature"] == 1
    assert metrics["off_policy/mixed_versions"] == 1


def test_a_constrained_answer_is_weighted_by_the_mass_it_was_left() -> None:
    params = {"constrained": "json_schema", "constrained_log_mass": -1.0}
    forced = replace(step_call("r1", "forced", seq=1), params=params)
    batch = pair(
        [reward("r1", 1.0)], [reward("r2", 0.0)], forced, rules=SkipRules(off_policy="weight")
    )
    found = [datum.extra["weights"][-1] for datum in batch.rows]
    assert sorted(found) == pytest.approx([math.exp(-1), 1.0, 1.0])


@pytest.mark.parametrize("how", ["sequence", "rollout", "constant"])
def test_length_normalisation_keeps_the_weights_of_constrained_answers(how: Any) -> None:
    params = {"constrained": "json_schema", "constrained_log_mass": -1.0}
    forced = replace(step_call("r1", "forced", seq=1), params=params)

    def weights(rules: SkipRules) -> list[float]:
        settings = replace(SETTINGS, rules=rules, length_normalization=how)
        calls = [step_call("r1", "c1"), step_call("r2", "c2"), forced]
        earned = [reward("r1", 1.0), reward("r2", 0.0)]
        batch = assemble([rollout("r1"), rollout("r2")], calls, earned, settings)
        return sorted(datum.extra["weights"][-1] for datum in batch.rows)

    plain, weighted = weights(SkipRules()), weights(SkipRules(off_policy="weight"))
    assert min(weighted) == pytest.approx(min(plain) * math.exp(-1))
    assert weighted[1:] == pytest.approx(sorted(plain)[1:])


# ---- credit by turn and by token


def conversation(of: str, turns: int) -> list[Call]:
    calls, history = [], [1]
    for i in range(turns):
        calls.append(replace(step_call(of, f"{of}{i}", seq=i), prompt_ids=list(history)))
        history += [7, 8, 2 + i]
    return calls


def test_credit_by_turn_reaches_the_turns_tokens() -> None:
    calls = [*conversation("r1", 2), *conversation("r2", 2)]
    rewards = [
        replace(reward("r1", 1.0), response_id="r10"),
        replace(reward("r2", 1.0), response_id="r21"),
    ]
    settings = replace(SETTINGS, estimator="turn", discount=0.5)
    batch = assemble([rollout("r1"), rollout("r2")], calls, rewards, settings)
    # Returns: r1 1 and 0, r2 0.5 and 1.
    assert [datum.advantages for datum in batch.rows] == [
        [0, 0.25, 0.25, 0, -0.5, -0.5],
        [0, -0.25, -0.25, 0, 0.5, 0.5],
    ]
    assert batch.metrics()["groups/used"] == 1


def test_gigpo_finds_the_state_in_the_last_messages() -> None:
    def seen(call: Call, *texts: str) -> Call:
        history = [{"role": "assistant", "content": call.id}]
        return replace(
            call,
            request={"messages": history + [{"role": "user", "content": text} for text in texts]},
        )

    one, two = conversation("r1", 2), conversation("r2", 2)
    calls = [
        seen(one[0], "start"),
        seen(one[1], "door"),
        seen(two[0], "start"),
        seen(two[1], "wall"),
    ]
    settings = replace(SETTINGS, estimator="gigpo")
    batch = assemble(
        [rollout("r1"), rollout("r2")], calls, [reward("r1", 1.0), reward("r2", 0.0)], settings
    )
    assert [datum.advantages for datum in batch.rows] == [
        [0, 1.0, 1.0, 0, 0.5, 0.5],  # both met "start"; the second states were each met once
        [0, -1.0, -1.0, 0, -0.5, -0.5],
    ]


def test_gae_puts_rewards_where_they_were_earned() -> None:
    calls = conversation("r1", 3)
    branch = replace(step_call("r1", "branch", seq=3), prompt_ids=[1, 7, 8, 9])
    rewards = [replace(reward("r1", 1.0), response_id="r11"), reward("r1", 4.0)]
    settings = replace(SETTINGS, estimator="gae")
    batch = assemble([rollout("r1")], [*calls, branch], rewards, settings)
    assert batch.skipped == {}  # a single rollout is enough, for nothing is compared
    whole, fork = batch.rows
    assert whole.extra["rewards"] == [0, 0, 0, 0, 0, 1, 0, 0, 4]
    assert fork.extra["rewards"] == [0, 0, 0, 0, 0, 4]  # it began after the 1 was earned


# ---- length normalisation


@pytest.mark.parametrize("how", ["token", "sequence", "rollout", "constant"])
def test_length_normalisation_is_the_mean_it_says(how: Any) -> None:
    lengths = {"r1": [3], "r2": [1, 4]}  # trained tokens of each rollout's sequences
    datums, owners = [], []
    for owner, sizes in lengths.items():
        for size in sizes:
            (built,) = build(make("c", [1], list(range(10, 10 + size)))).trajectories
            datums.append(to_training_row(built, 1.0))
            owners.append(owner)
    terms = [[1.0 + 10 * i + t for t in range(d.trained)] for i, d in enumerate(datums)]
    expected = {
        "token": sum(map(sum, terms)) / 8,
        "sequence": sum(sum(t) / len(t) for t in terms) / 3,
        "rollout": (sum(terms[0]) / 3 + sum(terms[1] + terms[2]) / 5) / 2,
        "constant": sum(map(sum, terms)) / 100 / 2,
    }[how]
    done = normalize_lengths(datums, owners, how, 100)
    tokens = sum(d.trained for d in done)
    found = sum(
        term * weight
        for d, row in zip(done, terms, strict=True)
        for term, weight in zip(
            row,
            [
                w
                for w, on in zip(d.extra.get("weights", [1.0] * len(d.mask)), d.mask, strict=True)
                if on
            ],
            strict=True,
        )
    )
    assert found / tokens == pytest.approx(expected)


# ---- whatever agents do


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Any], list[Call], list[Reward], StepSettings]:
    """Several rollouts of random call trees with random rewards, under random settings."""
    rollouts, calls, rewards = [], [], []
    for i in range(draw(st.integers(1, 4))):
        name = f"r{i}"
        rollouts.append(rollout(name, group=f"g{i % 2}"))
        own = draw(call_trees())
        calls += [
            replace(
                call,
                id=f"{name}{call.id}",
                response_id=f"{name}{call.id}",
                rollout_id=name,
                attempt_id=f"{name}-a",
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                agent=draw(st.sampled_from([None, "title"])),
                params=draw(st.sampled_from([{}, {"temperature": 0.5}, {"top_p": 0.5}])),
            )
            for call in own
        ]
        for value in draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), max_size=3)):
            named = draw(st.sampled_from([None, f"{name}c0", f"{name}c1"]))
            rewards.append(replace(reward(name, value), response_id=named))
    options = StepSettings(
        adapters=frozenset({"x", "y"}),
        max_length=12,
        estimator=draw(st.sampled_from([*ESTIMATORS, *BY_TURN, *BY_TOKEN])),
        min_group=draw(st.integers(1, 3)),
        discount=draw(st.sampled_from([1.0, 0.9])),
        length_normalization=draw(st.sampled_from(["token", "sequence", "rollout", "constant"])),
        rules=SkipRules(
            skip_agents=draw(st.sampled_from([(), ("title",)])),
            truncated=draw(st.sampled_from(["train", "skip"])),
            off_policy=draw(st.sampled_from(["train", "weight", "skip"])),
        ),
    )
    return rollouts, calls, rewards, options


@settings(max_examples=150, deadline=None)
@given(steps())
def test_every_call_has_one_fate_and_every_token_trains_once(drawn: Any) -> None:
    rollouts, calls, rewards, options = drawn
    batch = assemble(rollouts, calls, rewards, options)
    assert not batch.trained & batch.skipped.keys()
    assert batch.trained | batch.skipped.keys() == {call.id for call in calls}
    by_id = {call.id: call for call in calls}
    assert sum(d.trained for d in batch.rows) == sum(
        len(by_id[name].response_ids) for name in batch.trained
    )
    for datum in batch.rows:
        for column in (datum.advantages, *datum.extra.values()):
            assert len(column) == len(datum.tokens)
            assert all(map(math.isfinite, column))
    assert sum(batch.off_policy.values()) <= len(batch.trained)
    if options.rules.off_policy != "train":
        assert batch.off_policy.keys() <= {"temperature"}  # which is what trains, then
    for metric in batch.metrics().values():
        assert math.isfinite(metric) or not any(r is not None for r in batch.rewards.values())
    if options.length_normalization in ("sequence", "rollout") and batch.rows:
        # Relative weights: they only move emphasis around.
        weights = [
            w for d in batch.rows for w, on in zip(d.extra["weights"], d.mask, strict=True) if on
        ]
        assert sum(weights) == pytest.approx(len(weights))


@settings(max_examples=80, deadline=None)
@given(call_trees(), st.lists(st.tuples(st.integers(0, 14), st.floats(-5, 5)), max_size=5))
def test_rewards_by_turn_add_up_to_the_rollouts(calls: list[Call], earned: list[Any]) -> None:
    rewards = [replace(reward("r1", value), response_id=f"c{at}") for at, value in earned]
    built = build_trajectories(calls, max_length=100)
    turns = [call.id for call in calls if call.id not in built.skipped]
    if turns:
        found = turn_rewards(rewards, calls, turns)
        assert sum(found) == pytest.approx(sum(value for _, value in earned))
