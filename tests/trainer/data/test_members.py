"""Credit inside a rollout: rewards for one agent (role), compared with the same agent elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from call_records import call_of, reward, rollout

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Call, Reward, RolloutState, SkipReason
from agentrl_trainer.data.adapter_split import AdapterRule, assemble_adapters
from agentrl_trainer.data.advantages import BY_TURN, ESTIMATORS
from agentrl_trainer.data.batch_assembly import StepBatch, StepSettings, assemble

GAMES = [rollout("r1"), rollout("r2"), rollout("r3")]
WON_BY = {"r1": "white", "r2": "black", "r3": "white"}
SIDES = ("white", "black")
SETTINGS = StepSettings(adapters=frozenset({"policy"}), max_length=64)


def move(of: str, side: str | None, seq: int) -> Call:
    return replace(call_of(of, f"{of}-{seq}", seq=seq), agent=side)


def moves(of: str) -> list[Call]:
    """Both sides move twice, in turn."""
    return [move(of, SIDES[seq % 2], seq) for seq in range(4)]


def earned(of: str, value: float, agent: str | None, **more: Any) -> Reward:
    return replace(reward(of, value), key=f"{of}{agent}{value}", agent=agent, **more)


def results() -> list[Reward]:
    return [
        earned(game, 1.0 if side == winner else -1.0, side)
        for game, winner in WON_BY.items()
        for side in SIDES
    ]


def played(rewards: list[Reward] | None = None, **options: Any) -> StepBatch:
    calls = [call for game in GAMES for call in moves(game.id)]
    given = results() if rewards is None else rewards
    return assemble(GAMES, calls, given, replace(SETTINGS, **options))


def advantages(batch: StepBatch) -> dict[str, float]:
    """The advantage of each call that trains: all its tokens have the same."""
    found: dict[str, float] = {}
    for row, names in zip(batch.rows, batch.calls_of_rows, strict=True):
        values = {a for a, on in zip(row.advantages, row.mask, strict=True) if on}
        assert len(values) == 1
        found |= dict.fromkeys(names, values.pop())
    return found


# maxrl takes no negative rewards
@pytest.mark.parametrize("estimator", [*(e for e in ESTIMATORS if e != "maxrl"), *BY_TURN])
def test_white_is_compared_with_white(estimator: str) -> None:
    """The sums of the rollouts are all 0, and yet the winners' moves gain, the losers' lose."""
    batch = played(estimator=estimator)
    assert set(batch.rewards.values()) == {0.0}
    found = advantages(batch)
    assert found.keys() == batch.trained == {call.id for game in GAMES for call in moves(game.id)}
    for game in GAMES:
        for call in moves(game.id):
            assert (found[call.id] > 0) == (call.agent == WON_BY[game.id]), call.id
    metrics = batch.metrics()
    assert metrics["reward/mean/white"] == -metrics["reward/mean/black"] == pytest.approx(1 / 3)
    assert metrics["groups/used"] == 2
    if estimator == "rloo":
        assert (found["r1-0"], found["r2-0"]) == (1.0, -2.0)  # white against white alone


def test_a_value_function_learns_each_sides_own_reward() -> None:
    batch = played(estimator="gae")
    for row, names in zip(batch.rows, batch.calls_of_rows, strict=True):
        game, seq = names[-1].split("-")
        assert row.extra["rewards"][-1] == (1.0 if SIDES[int(seq) % 2] == WON_BY[game] else -1.0)
        assert not any(row.extra["rewards"][:-1])


def test_a_reward_without_an_agent_counts_for_all() -> None:
    batch = played([*results(), earned("r1", 3.0, None)])
    assert batch.of_agents["white"] == {"r1": 4.0, "r2": -1.0, "r3": 1.0}
    assert batch.of_agents["black"] == {"r1": 2.0, "r2": 1.0, "r3": -1.0}


def test_only_groups_with_a_named_reward_are_split() -> None:
    """In the other group the rollout is the member, whatever agents called."""
    others = [rollout("s1", "h"), rollout("s2", "h")]
    calls = [call for game in (*GAMES, *others) for call in moves(game.id)]
    given = [*results(), reward("s1", 1.0), reward("s2", 0.0)]
    batch = assemble([*GAMES, *others], calls, given, SETTINGS)
    assert set(batch.groups) == {"g/white", "g/black", "h"}
    assert {advantages(batch)[f"s1-{seq}"] for seq in range(4)} == {0.5}


def test_calls_of_other_agents_have_a_reason() -> None:
    calls = [call for game in GAMES for call in (*moves(game.id), move(game.id, None, 9))]
    batch = assemble(GAMES, calls, results(), SETTINGS)
    assert batch.skipped == {f"{game.id}-9": SkipReason.NO_REWARD for game in GAMES}
    assert len(batch.trained) == 12


def test_a_refused_reward_of_one_side_leaves_the_other_alone() -> None:
    batch = played([*results(), earned("r1", float("inf"), "black")])
    refused = {"r1-1": SkipReason.REFUSED_REWARD, "r1-3": SkipReason.REFUSED_REWARD}
    assert batch.skipped == refused
    assert {"r1-0", "r1-2"} <= batch.trained


def test_a_rollout_that_failed_is_missed_in_each_group_and_a_policys_reward_counts() -> None:
    lost = rollout("r3", state=RolloutState.FAILED)
    calls = [call for game in GAMES for call in moves(game.id)]
    batch = assemble([*GAMES[:2], lost], calls, results(), SETTINGS)
    assert {why for name, why in batch.skipped.items()} == {SkipReason.FAILED_ROLLOUT}
    assert batch.groups["g/white"] == [None, None, SkipReason.NO_REWARD]
    on_error = replace(reward("r3", -5.0), key=POLICY_REWARD_KEY)
    batch = played([*results(), on_error])
    assert batch.of_agents["white"]["r3"] == batch.of_agents["black"]["r3"] == -5.0


def test_a_conversation_of_both_sides_is_cut_by_side() -> None:
    """Black's prompt holds white's move: it is context there, and each move trains once."""
    calls: list[Call] = []
    for game in GAMES:
        prompt = [1, 2]
        for seq, call in enumerate(moves(game.id)):
            calls.append(replace(call, prompt_ids=prompt, response_ids=[10 + seq, 20]))
            prompt = [*prompt, 10 + seq, 20]
    batch = assemble(GAMES, calls, results(), SETTINGS)
    assert sorted(name for names in batch.calls_of_rows for name in names) == sorted(batch.trained)
    assert batch.calls_of_rows[:2] == [["r1-1", "r1-3"], ["r1-0", "r1-2"]]
    assert [round(a) for a in batch.rows[0].advantages] == [0, 0, 0, 0, -1, -1, 0, 0, -1, -1]


def test_an_agent_of_two_adapters_keeps_what_it_earned_with_each() -> None:
    calls = [
        replace(call, adapter="x" if game.id == "r1" else "y", model="x", agent="white")
        for game in GAMES
        for call in moves(game.id)
    ]
    rules = {name: AdapterRule() for name in ("x", "y")}
    found = assemble_adapters(GAMES, calls, results(), SETTINGS, rules).whole()
    assert found.of_agents["white"].keys() == {game.id for game in GAMES}


def test_two_adapters_learn_opposite_rewards() -> None:
    calls = [
        replace(call, adapter=call.agent, model=call.agent or "")
        for game in GAMES
        for call in moves(game.id)
    ]
    rules = {side: AdapterRule(agents=[side]) for side in SIDES}
    given = [*results(), earned("r2", 9.0, "balck")]
    found = assemble_adapters(GAMES, calls, given, SETTINGS, rules)
    white, black = (advantages(found.by_adapter[side]) for side in SIDES)
    assert white["r1-0"] == -black["r1-1"] == pytest.approx(2 / 3)
    whole = found.whole()
    assert whole.of_agents.keys() == set(SIDES)
    assert whole.unclaimed == {"balck": 1}
    assert whole.metrics()["reward/unclaimed"] == 1
