"""Every call of a step gets one verdict: trained, or skipped with a reason."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, compress
from statistics import fmean
from typing import Any

import pytest
from call_records import call_of, call_trees, reward, rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_tracer.schemas import Call, Reward, RolloutState, SkipReason
from agentrl_trainer.data.advantages import ESTIMATORS
from agentrl_trainer.data.batch_assembly import (
    BY_TOKEN,
    BY_TURN,
    StepBatch,
    StepSettings,
    assemble,
    normalize_lengths,
)
from agentrl_trainer.data.rewards import rollout_reward, turn_rewards
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.data.trajectories import build_trajectories

PAIR = [rollout("r1"), rollout("r2")]
WON = [reward("r1", 1.0), reward("r2", 0.0)]
SETTINGS = StepSettings(adapters=frozenset({"policy"}), max_length=64)
FORCED = {"constrained": "json_schema", "constrained_log_mass": -1.0}


def pair(
    *more: Call, earned: list[Reward] = WON, c1: dict[str, Any] | None = None, **options: Any
) -> StepBatch:
    """Assemble call c1 of r1, call c2 of r2, and more; ``c1`` are the params of c1."""
    calls = [replace(call_of("r1", "c1"), params=c1 or {}), call_of("r2", "c2"), *more]
    return assemble(PAIR, calls, earned, replace(SETTINGS, **options))


def test_advantages_reach_the_sampled_tokens() -> None:
    batch = pair()
    assert batch.trained == {"c1", "c2"}
    assert [row.advantages for row in batch.rows] == [[0, 0, 0, 0.5, 0.5], [0, 0, 0, -0.5, -0.5]]
    assert batch.metrics()["reward/mean"] == 0.5
    batch.refuse(SkipReason.NON_FINITE_STEP)
    assert batch.trained == set()
    assert batch.skipped == dict.fromkeys(("c1", "c2"), SkipReason.NON_FINITE_STEP)


def test_rows_can_be_left_out() -> None:
    batch = pair()
    batch.keep_rows([1], SkipReason.NON_FINITE)
    assert [row.advantages[-1] for row in batch.rows] == [-0.5]
    assert (batch.trained, batch.skipped) == ({"c2"}, {"c1": SkipReason.NON_FINITE})
    batch.keep_rows([], None)  # in a later epoch: it has trained
    assert (batch.rows, batch.trained) == ([], {"c2"})


@pytest.mark.parametrize("estimator", ["grpo", "reinforce", "turn", "gigpo", "gae"])
def test_the_reasons_of_skipped_groups_add_up(estimator: str) -> None:
    """Also a group without any reward, and one that has shrunk to a member."""
    earned = {"used": (1, 0), "alike": (0, 0), "shrunk": (1, None), "silent": (None, None)}
    rollouts = [rollout(f"{group}{i}", group) for group in earned for i in range(2)]
    calls = [call_of(one.id, f"c-{one.id}") for one in rollouts]
    rewards = [
        reward(f"{group}{i}", value)
        for group, values in earned.items()
        for i, value in enumerate(values)
        if value is not None
    ]
    found = assemble(rollouts, calls, rewards, replace(SETTINGS, estimator=estimator)).metrics()
    reasons = {name: found[f"groups/{name}"] for name in ("small_group", "zero_advantage")}
    assert found["groups/no_reward"] == 1
    assert found["groups/skipped"] == sum(reasons.values()) + 1
    if estimator in ("grpo", "turn", "gigpo"):
        assert reasons == {"small_group": 1, "zero_advantage": 1}


def test_only_the_winning_attempt_trains_and_earns() -> None:
    lost = call_of("r1", "lost", attempt="b")
    batch = pair(lost, earned=[reward("r1", 5, attempt="b"), *WON])
    assert batch.trained == {"c1", "c2"}
    assert batch.skipped == {"lost": SkipReason.FAILED_ATTEMPT}
    assert batch.rewards == {"r1": 1, "r2": 0}


def test_missing_is_not_zero() -> None:
    rollouts = [*PAIR, rollout("r3")]
    batch = assemble(rollouts, [call_of(r.id, f"c{r.id}") for r in rollouts], WON, SETTINGS)
    assert batch.skipped == {"cr3": SkipReason.NO_REWARD}
    assert [row.advantages[-1] for row in batch.rows] == [0.5, -0.5]


def test_answers_that_are_too_old_are_dropped_and_their_rollout_still_counts() -> None:
    """Its reward stays in the group's mean, and its newer answers train."""
    calls = [
        call_of("r1", "old"),
        replace(call_of("r1", "new", seq=1), adapter_version=4),
        replace(call_of("r2", "c2"), adapter_version=3),
    ]
    batch = assemble(PAIR, calls, WON, replace(SETTINGS, oldest_version=3))
    assert batch.skipped == {"old": SkipReason.STALE}
    assert batch.trained == {"new", "c2"}
    assert [row.advantages[-1] for row in batch.rows] == [0.5, -0.5]


@pytest.mark.parametrize("given", [1, 0.5, 0])
def test_a_temperature_reaches_the_tokens_it_was_asked_for(given: float) -> None:
    """Greedy answers train at temperature 1."""
    batch = pair(c1={"temperature": given})
    warm = {"temperature": [1, 1, 1, 0.5, 0.5]} if given == 0.5 else {}
    assert [dict(row.extra) for row in batch.rows] == [warm, {}]
    assert batch.off_policy == ({0.5: {"temperature": 1}, 0: {"greedy": 1}}.get(given) or {})


def test_a_reward_before_any_call_counts() -> None:
    early = replace(reward("r1", 1.0), created_at=-1.0)
    assert pair(earned=[early, reward("r2", 0.0)]).rewards == {"r1": 1.0, "r2": 0.0}
    assert turn_rewards([early], [call_of("r1", "c1")], ["c1"]) == [1.0]


def test_several_rewards_add_up() -> None:
    assert pair(earned=[reward("r1", 0.5), *WON]).rewards["r1"] == 1.5


def test_rewards_by_turn_go_to_the_turn_that_earned_them() -> None:
    calls = [call_of("r1", f"c{i}", seq=i) for i in range(4)]
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
    # A reward before the first turn belongs to the first turn, and to none in a branch.
    assert turn_rewards(given, calls, ["c2", "c3"]) == [7, 8]
    assert turn_rewards(given, calls, ["c2", "c3"], whole=False) == [2, 8]
    assert turn_rewards(given, calls, []) == []


@pytest.mark.parametrize("estimator", ["grpo", "turn", "gae"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e308])
def test_a_rollout_with_a_refused_reward_does_not_train(broken: float, estimator: str) -> None:
    """Whatever else it earned. Two rewards of 1e308 have no sum."""
    three = [*PAIR, rollout("r3")]
    calls = [call_of(one.id, f"c{one.id[1]}") for one in three]
    earned = [reward("r1", broken), *WON, reward("r3", broken)]
    batch = assemble(three, calls, earned, replace(SETTINGS, estimator=estimator, min_group=1))
    assert batch.rewards == {"r1": None, "r2": 0.0, "r3": None}
    refused = {name: why for name, why in batch.skipped.items() if name != "c2"}
    assert refused == dict.fromkeys(("c1", "c3"), SkipReason.REFUSED_REWARD)
    assert math.isfinite(batch.metrics()["reward/mean"])


def test_the_spread_over_groups_is_that_of_their_means() -> None:
    four = [*PAIR, rollout("r3", group="other"), rollout("r4", group="other")]
    calls = [call_of(one.id, f"c{one.id[1]}") for one in four]
    batch = assemble(four, calls, [*WON, reward("r3", 1.0), reward("r4", 1.0)], SETTINGS)
    assert batch.metrics()["reward/std_over_groups"] == pytest.approx(0.25)  # of 0.5 and 1
    assert math.isnan(StepBatch().metrics()["reward/std_over_groups"])


def test_a_bool_is_a_number() -> None:
    earned = rollout_reward(rollout("r1"), [reward("r1", True), reward("r1", False)])
    assert earned == 1.0
    assert isinstance(earned, float)


def test_a_group_that_shrank_to_one_is_skipped_and_counted() -> None:
    failed = rollout("r2", state=RolloutState.FAILED)
    calls = [call_of("r1", "c1"), call_of("r2", "c2")]
    batch = assemble([rollout("r1"), failed], calls, WON[:1], SETTINGS)
    assert batch.skipped == {"c1": SkipReason.SMALL_GROUP, "c2": SkipReason.FAILED_ROLLOUT}
    assert batch.metrics()["groups/skipped"] == 1
    assert batch.rows == []


def test_off_policy_calls_are_counted() -> None:
    mixed = replace(call_of("r2", "mixed", seq=1), params={"mixed_versions": True})
    metrics = pair(mixed, c1={"temperature": 1.3}).metrics()
    assert metrics["off_policy/temperature"] == metrics["off_policy/mixed_versions"] == 1


@pytest.mark.parametrize("how", ["token", "sequence", "rollout", "constant"])
def test_a_constrained_answer_is_weighted_by_the_mass_it_was_left(how: Any) -> None:
    def weights(off_policy: Any) -> list[float]:
        batch = pair(c1=FORCED, off_policy=off_policy, length_normalization=how)
        return [row.extra["weights"][-1] if row.extra else 1.0 for row in batch.rows]

    forced, plain = weights("train")
    assert weights("weight") == pytest.approx([forced * math.exp(-1), plain])
    if how == "token":
        assert forced == plain == 1.0


# ---- credit by turn and by token


def conversation(of: str, turns: int) -> list[Call]:
    calls, history = [], [1]
    for i in range(turns):
        calls.append(replace(call_of(of, f"{of}{i}", seq=i), prompt_ids=list(history)))
        history += [7, 8, 2 + i]
    return calls


def test_credit_by_turn_reaches_the_turns_tokens() -> None:
    calls = [*conversation("r1", 2), *conversation("r2", 2)]
    rewards = [replace(reward(one[:2], 1.0), response_id=one) for one in ("r10", "r21")]
    batch = assemble(PAIR, calls, rewards, replace(SETTINGS, estimator="turn", discount=0.5))
    # Returns: r1 1 and 0, r2 0.5 and 1.
    assert [row.advantages for row in batch.rows] == [
        [0, 0.25, 0.25, 0, -0.5, -0.5],
        [0, -0.25, -0.25, 0, 0.5, 0.5],
    ]
    assert batch.metrics()["groups/used"] == 1


def test_gigpo_finds_the_state_in_the_last_messages() -> None:
    calls = [*conversation("r1", 2), *conversation("r2", 2)]
    for at, said in enumerate(["start", "door", "start", "wall"]):
        earlier = {"role": "assistant", "content": calls[at].id}
        messages = [earlier, {"role": "user", "content": said}]
        calls[at] = replace(calls[at], request={"messages": messages})
    batch = assemble(PAIR, calls, WON, replace(SETTINGS, estimator="gigpo"))
    assert [row.advantages for row in batch.rows] == [
        [0, 1.0, 1.0, 0, 0.5, 0.5],  # both met "start"; the second states were each met once
        [0, -1.0, -1.0, 0, -0.5, -0.5],
    ]


def test_gae_puts_rewards_where_they_were_earned() -> None:
    calls = conversation("r1", 3)
    branch = replace(call_of("r1", "branch", seq=3), prompt_ids=[1, 7, 8, 9])
    rewards = [replace(reward("r1", 1.0), response_id="r11"), reward("r1", 4.0)]
    gae = replace(SETTINGS, estimator="gae")
    batch = assemble([rollout("r1")], [*calls, branch], rewards, gae)
    assert batch.skipped == {}  # a single rollout is enough, for nothing is compared
    whole, fork = batch.rows
    assert whole.extra["rewards"] == [0, 0, 0, 0, 0, 1, 0, 0, 4]
    assert fork.extra["rewards"] == [0, 0, 0, 0, 0, 4]  # it began after the 1 was earned


# ---- length normalisation


@pytest.mark.parametrize("how", ["token", "sequence", "rollout", "constant"])
def test_length_normalisation_is_the_mean_it_says(how: Any) -> None:
    owners, lengths = ["r1", "r2", "r2"], [3, 1, 4]  # trained tokens of each sequence
    rows = [
        TrainingRow([0] * (n + 1), [False, *[True] * n], [0.0] * (n + 1), [1.0] * (n + 1))
        for n in lengths
    ]
    terms = [[1.0 + 10 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    expected = {
        "token": sum(map(sum, terms)) / 8,
        "sequence": sum(sum(t) / len(t) for t in terms) / 3,
        "rollout": (sum(terms[0]) / 3 + sum(terms[1] + terms[2]) / 5) / 2,
        "constant": sum(map(sum, terms)) / 100 / 2,
    }[how]
    done = normalize_lengths(rows, owners, how, 100)
    weights = [w for row in done for w in row.extra.get("weights", [1.0] * len(row.mask))[1:]]
    found = fmean([term for own in terms for term in own], weights)
    assert found * sum(weights) / sum(lengths) == pytest.approx(expected)


@pytest.mark.parametrize("how", ["token", "sequence", "rollout", "constant"])
def test_rows_that_stay_are_normalized_without_those_left_out(how: Any) -> None:
    owners, lengths = ["r1", "r2", "r2", "r3"], [3, 1, 4, 80]
    rows = [
        TrainingRow([0] * (n + 1), [False, *[True] * n], [0.0] * (n + 1), [1.0] * (n + 1))
        for n in lengths
    ]
    rows[0] = replace(rows[0], extra={"weights": [0.5] * 4})  # of importance sampling
    batch = StepBatch(normalize_lengths(rows, owners, how, 100), [[o] for o in owners])
    batch.owners, batch.normalization = owners, (how, 100)
    batch.keep_rows([0, 2], None)
    alone = normalize_lengths([rows[0], rows[2]], ["r1", "r2"], how, 100)
    for found, wanted in zip(batch.rows, alone, strict=True):
        none = [1.0] * len(found.tokens)
        assert found.extra.get("weights", none) == pytest.approx(wanted.extra.get("weights", none))


# ---- whatever agents do


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Any], list[Call], list[Reward], StepSettings]:
    """Several rollouts of random call trees with random rewards, under random settings."""
    rollouts, calls, rewards = [], [], []
    for i in range(draw(st.integers(1, 4))):
        name = f"r{i}"
        rollouts.append(rollout(name, group=f"g{i % 2}"))
        calls += [
            replace(
                call, id=f"{name}{call.id}", response_id=f"{name}{call.id}", rollout_id=name,
                attempt_id=f"{name}-a", finish_reason=draw(st.sampled_from(["stop", "length"])),
                agent=draw(st.sampled_from([None, "title"])),
                params=draw(st.sampled_from([{}, {"temperature": 0.5}, {"top_p": 0.5}])),
            )
            for call in draw(call_trees())
        ]  # fmt: skip
        for value in draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), max_size=3)):
            named = draw(st.sampled_from([None, f"{name}c0", f"{name}c1"]))
            agent = draw(st.sampled_from([None, None, "title", "absent"]))
            rewards.append(replace(reward(name, value), response_id=named, agent=agent))
    options = StepSettings(
        adapters=frozenset({"x", "y"}),
        max_length=12,
        estimator=draw(st.sampled_from([*ESTIMATORS, *BY_TURN, *BY_TOKEN])),
        min_group=draw(st.integers(1, 3)),
        discount=draw(st.sampled_from([1.0, 0.9])),
        length_normalization=draw(st.sampled_from(["token", "sequence", "rollout", "constant"])),
        skip_agents=draw(st.sampled_from([(), ("title",)])),
        truncated=draw(st.sampled_from(["train", "skip"])),
        off_policy=draw(st.sampled_from(["train", "weight", "skip"])),
    )
    return rollouts, calls, rewards, options


@settings(max_examples=60, deadline=None)
@given(steps())
def test_every_call_has_one_fate_and_every_token_trains_once(drawn: Any) -> None:
    rollouts, calls, rewards, options = drawn
    batch = assemble(rollouts, calls, rewards, options)
    assert not batch.trained & batch.skipped.keys()
    assert batch.trained | batch.skipped.keys() == {call.id for call in calls}
    by_id = {call.id: call for call in calls}
    assert sum(row.trained for row in batch.rows) == sum(
        len(by_id[name].response_ids) for name in batch.trained
    )
    for row in batch.rows:
        for column in (row.advantages, *row.extra.values()):
            assert len(column) == len(row.tokens)
            assert all(map(math.isfinite, column))
    assert sum(batch.off_policy.values()) <= len(batch.trained)
    if options.off_policy != "train":
        assert batch.off_policy.keys() <= {"temperature"}  # which is what trains, then
    for metric in batch.metrics().values():
        assert math.isfinite(metric) or not any(r is not None for r in batch.rewards.values())
    if options.length_normalization in ("sequence", "rollout") and batch.rows:
        # Relative weights: they only move emphasis around. Where all are 1 there is no column.
        ones = [[1.0] * len(row.tokens) for row in batch.rows]
        columns = [row.extra.get("weights", one) for row, one in zip(batch.rows, ones, strict=True)]
        masks = [row.mask for row in batch.rows]
        weights = [*compress(chain.from_iterable(columns), chain.from_iterable(masks))]
        assert sum(weights) == pytest.approx(len(weights))


@settings(max_examples=40, deadline=None)
@given(call_trees(), st.lists(st.tuples(st.integers(0, 14), st.floats(-5, 5)), max_size=5))
def test_rewards_by_turn_add_up_to_the_rollouts(calls: list[Call], earned: list[Any]) -> None:
    rewards = [replace(reward("r1", value), response_id=f"c{at}") for at, value in earned]
    built = build_trajectories(calls, SkipRules(max_length=100))
    turns = [call.id for call in calls if call.id not in built.skipped]
    if turns:
        found = turn_rewards(rewards, calls, turns)
        assert sum(found) == pytest.approx(sum(value for _, value in earned))
