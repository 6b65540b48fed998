"""Which call trains which adapter, on which reward; and that none is judged twice or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from call_records import call_of, reward, rollout
from hypothesis import given
from hypothesis import strategies as st

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Call, Reward, RolloutState, SkipReason
from agentrl_trainer.data.adapter_split import AdapterBatches, AdapterRule, assemble_adapters
from agentrl_trainer.data.batch_assembly import StepSettings, assemble

PAIR = [rollout("r1"), rollout("r2")]
WON = [reward("r1", 1), reward("r2", 0)]
SETTINGS = StepSettings(adapters=frozenset(), max_length=64)
BOTH = {"asker": AdapterRule(), "answerer": AdapterRule()}


def call(of: str, name: str, adapter: str | None, agent: str | None = None, seq: int = 0) -> Call:
    return replace(call_of(of, name, seq=seq), model=adapter, adapter=adapter, agent=agent)


def named(of: str, name: str, value: float) -> Reward:
    return replace(reward(of, value), name=name, key=f"{of}{name}")


def split(
    calls: list[Call], rewards: list[Reward] = WON, rules: Any = BOTH, rollouts: Any = PAIR
) -> AdapterBatches:
    return assemble_adapters(rollouts, calls, rewards, SETTINGS, rules)


def calls_of_both(rollouts: Any) -> list[Call]:
    return [call(r.id, f"{r.id}-{a}", a, seq=i) for r in rollouts for i, a in enumerate(BOTH)]


def advantages(batches: AdapterBatches, adapter: str) -> list[float]:
    return [max(datum.advantages, key=abs) for datum in batches.by_adapter[adapter].rows]


def test_one_reward_reaches_both_adapters_each_on_its_own_calls() -> None:
    batches = split(calls_of_both(PAIR))
    for adapter in BOTH:
        batch = batches.by_adapter[adapter]
        assert batch.trained == {f"r1-{adapter}", f"r2-{adapter}"}
        assert {row.adapter for row in batch.rows} == {adapter}
        assert advantages(batches, adapter) == [0.5, -0.5]
    whole = batches.whole()
    assert (len(whole.trained), whole.skipped) == (4, {})
    assert whole.metrics()["reward/mean"] == 0.5
    assert whole.metrics()["groups/used"] == 2


def test_a_group_that_did_not_ask_an_adapter_has_not_shrunk() -> None:
    """Told apart: one rollout asked the answerer, and a rollout that earned nothing was lost."""
    rollouts = [*PAIR, rollout("s1", "h"), rollout("s2", "h")]
    calls = [call(r.id, f"{r.id}-asker", "asker") for r in rollouts]
    calls.append(call("r1", "r1-answerer", "answerer", seq=1))
    rewards = [*WON, reward("s1", 1), reward("s2", 0)]
    whole = split(calls, rewards, rollouts=rollouts).whole()
    assert whole.skipped == {"r1-answerer": SkipReason.SMALL_GROUP}
    assert whole.shrunk() == 0
    assert split(calls, rewards[:3], rollouts=rollouts).by_adapter["asker"].shrunk() == 1


def test_rewards_by_name() -> None:
    """A policy's reward has no adapter's name, and counts for each."""
    named_by = {"asker": ["question"], "answerer": ["answer", "style"]}
    rules = {adapter: AdapterRule(rewards=names) for adapter, names in named_by.items()}
    rollouts = [*PAIR, rollout("r3")]
    rewards = [
        named("r1", "question", 1.0), named("r2", "question", 0.0), named("r1", "answer", 0.0),
        named("r1", "style", 0.5), named("r2", "answer", 2.0),
        replace(reward("r3", -1.0), key=POLICY_REWARD_KEY, name="on_error"),
    ]  # fmt: skip
    batches = split(calls_of_both(rollouts), rewards, rules, rollouts)
    assert batches.by_adapter["asker"].rewards == {"r1": 1.0, "r2": 0.0, "r3": -1.0}
    assert batches.by_adapter["answerer"].rewards == {"r1": 0.5, "r2": 2.0, "r3": -1.0}
    assert advantages(batches, "asker") == [1.0, 0.0, -1.0]
    assert batches.whole().rewards == {"r1": 1.5, "r2": 2.0, "r3": -1.0}


def test_a_reward_for_the_other_role_alone_is_no_reward() -> None:
    rules = {"asker": AdapterRule(rewards=["question"]), "answerer": AdapterRule()}
    rewards = [named("r1", "answer", 1.0), named("r2", "answer", 0.0)]
    batches = split(calls_of_both(PAIR), rewards, rules)
    assert set(batches.by_adapter["asker"].skipped.values()) == {SkipReason.NO_REWARD}
    assert advantages(batches, "answerer") == [0.5, -0.5]


def test_calls_of_other_agents_and_other_models_are_left_out_with_their_reasons() -> None:
    rules = {"asker": AdapterRule(agents=["Asker"]), "answerer": AdapterRule()}
    calls = [
        call("r1", "a1", "asker", "Asker"),
        call("r2", "a2", "asker", "Asker"),
        call("r1", "title", "asker", "Title writer", seq=1),
        call("r1", "nameless", "asker", None, seq=2),
        call("r1", "base", None, "Asker", seq=3),
        call("r1", "late", "frozen", "Asker", seq=4),
        replace(call("r1", "lost", "asker", "Title writer"), attempt_id="r1-b"),
    ]
    whole = split(calls, rules=rules).whole()
    assert whole.trained == {"a1", "a2"}
    assert whole.skipped == {
        "title": SkipReason.OTHER_AGENT,
        "nameless": SkipReason.OTHER_AGENT,
        "base": SkipReason.NOT_TRAINABLE_MODEL,
        "late": SkipReason.NOT_TRAINABLE_MODEL,
        "lost": SkipReason.FAILED_ATTEMPT,
    }


def test_an_adapter_is_compared_where_it_spoke() -> None:
    """The helper was asked in r1 and r2 only: what r3 earned without it says nothing of it."""
    rollouts = [*PAIR, rollout("r3")]
    calls = [*calls_of_both(PAIR), call("r3", "r3-asker", "asker")]
    batches = split(calls, [*WON, reward("r3", 5)], rollouts=rollouts)
    assert advantages(batches, "answerer") == [0.5, -0.5]
    assert advantages(batches, "asker") == [-1.0, -2.0, 3.0]


def test_what_was_earned_without_asking_is_not_compared() -> None:
    """r3 was answered from a cache; r4 asked another model; r5 failed; r6 earned nothing."""
    rollouts = [*PAIR, *(rollout(f"r{i}") for i in (3, 4, 6))]
    rollouts.append(rollout("r5", state=RolloutState.FAILED))
    calls = [*(call(r.id, f"{r.id}-a", "asker") for r in PAIR), call("r4", "r4-judge", None)]
    rewards = [*WON, reward("r3", 7), reward("r4", 7)]
    batches = split(calls, rewards, {"asker": AdapterRule()}, rollouts)
    assert advantages(batches, "asker") == [0.5, -0.5]
    whole = batches.whole()
    assert whole.unasked == {"r3", "r4"}
    metrics = whole.metrics()
    assert (metrics["reward/mean"], metrics["reward/without_call"]) == (0.5, 2)
    assert metrics["reward/missing"] == 2


_STATES = st.sampled_from([RolloutState.SUCCEEDED, RolloutState.FAILED])
_CALLS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["asker", "answerer", "other", None]),
        st.sampled_from(["Asker", "Title writer", None]),
        st.sampled_from(["a", "b"]),
    ),
    max_size=12,
)


@given(
    states=st.lists(_STATES, min_size=4, max_size=4),
    drawn=_CALLS,
    scores=st.lists(st.none() | st.sampled_from([0.0, 1.0]), min_size=4, max_size=4),
    picky=st.booleans(),
)
def test_every_call_is_judged_once(
    states: list[RolloutState],
    drawn: list[tuple[int, str | None, str | None, str]],
    scores: list[float | None],
    picky: bool,
) -> None:
    rollouts = [rollout(f"r{i}", f"g{i // 2}", state) for i, state in enumerate(states)]
    calls = [
        replace(call(f"r{of}", f"c{i}", adapter, agent, seq=i), attempt_id=f"r{of}-{attempt}")
        for i, (of, adapter, agent, attempt) in enumerate(drawn)
    ]
    rewards = [reward(f"r{i}", score) for i, score in enumerate(scores) if score is not None]
    rules = BOTH | ({"asker": AdapterRule(agents=["Asker"])} if picky else {})
    batches = split(calls, rewards, rules, rollouts)
    parts = [*batches.by_adapter.values(), batches.rest]
    judged = [c for part in parts for c in (*part.trained, *part.skipped)]
    assert sorted(judged) == sorted(c.id for c in calls)
    assert not batches.rest.rows
    trained = {c.id: c for c in calls if c.id in batches.whole().trained}
    assert all(c.adapter in rules and rules[c.adapter].takes(c) for c in trained.values())


def test_of_one_adapter_it_is_what_assemble_says() -> None:
    rollouts = [*PAIR, rollout("r3", "h", RolloutState.FAILED)]
    calls = [call(f"r{i}", f"c{i}", "policy") for i in (1, 2, 3)]
    calls.append(call("r1", "base", None, seq=1))
    alone = assemble(rollouts, calls, WON, replace(SETTINGS, adapters=frozenset({"policy"})))
    whole = split(calls, rules={"policy": AdapterRule()}, rollouts=rollouts).whole()
    assert whole.rows == alone.rows
    assert whole.trained == alone.trained
    assert whole.skipped == alone.skipped
    assert whole.metrics() == alone.metrics()
