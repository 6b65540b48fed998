"""Split one step's records among several adapters: which call trains which, with which rewards.

Knows the rule of each adapter: its agents and the rewards that count for it. Verdicts and
advantages are ``batch_assembly.assemble``'s, called once for each adapter with its own calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl_tracer.schemas import (
    HUMAN_REWARD_KEY,
    POLICY_REWARD_KEY,
    Call,
    Reward,
    Rollout,
    SkipReason,
)
from agentrl_trainer.data.batch_assembly import StepBatch, StepSettings, assemble
from agentrl_trainer.data.rewards import rollout_rewards, unclaimed_rewards


@dataclass(frozen=True, slots=True)
class AdapterRule:
    """What trains an adapter."""

    agents: Collection[str] | None = None
    """Train on calls of these agents (roles) only; None: on each call that the adapter answered."""
    rewards: Collection[str] | None = None
    """Sum the rewards of these names only; None: all of them."""

    def takes(self, call: Call) -> bool:
        return self.agents is None or call.agent in self.agents

    def counts(self, reward: Reward) -> bool:
        # The reward of on_error or on_timeout was emitted by no agent, so it counts for each.
        policy = reward.key == POLICY_REWARD_KEY
        if self.rewards is None:  # people's rewards count only where they are named
            return reward.key != HUMAN_REWARD_KEY
        return reward.name in self.rewards or policy


@dataclass(slots=True)
class AdapterBatches:
    """Invariant: each call of the step is judged in exactly one of the batches or in ``rest``."""

    by_adapter: dict[str, StepBatch]
    rest: StepBatch
    """Verdicts on calls of no adapter; ``rewards`` holds each rollout's sum of all rewards."""

    def whole(self) -> StepBatch:
        """Merge all batches into one, for the accounting and the step's metrics."""
        parts = [*self.by_adapter.values(), self.rest]
        of_agents: dict[str, dict[str, float | None]] = {}
        for part in parts:
            for agent, earned in part.of_agents.items():  # one may have called several adapters
                of_agents[agent] = of_agents.get(agent, {}) | earned
        return replace(
            self.rest,
            rows=[row for part in parts for row in part.rows],
            trained=set[str]().union(*(part.trained for part in parts)),
            skipped={call: reason for part in parts for call, reason in part.skipped.items()},
            groups={
                f"{name}/{group}": members
                for name, part in self.by_adapter.items()
                for group, members in part.groups.items()
            },
            off_policy=sum((part.off_policy for part in parts), Counter()),
            of_agents=of_agents,
        )


def assemble_adapters(
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    settings: StepSettings,
    rules: Mapping[str, AdapterRule],
) -> AdapterBatches:
    """Judge every call of a step's finished rollouts, for each adapter by itself.

    ``rules`` names the adapters; ``settings.adapters`` is ignored. An adapter's group are the
    rollouts of a group that called it. What the others earned says nothing of it: answered from a
    cache, for example, they repeat another rollout's reward.
    """
    by_adapter: dict[str, StepBatch] = {}
    judged: set[str] = set()
    for name, rule in rules.items():
        own = [call for call in calls if call.adapter == name and rule.takes(call)]
        called = {call.attempt_id for call in own}
        members = [r for r in rollouts if r.winner is None or r.winner in called]
        ids = {member.id for member in members}
        own = [call for call in own if call.rollout_id in ids]
        earned = [one for one in rewards if one.rollout_id in ids and rule.counts(one)]
        alone = replace(settings, adapters=frozenset([name]))
        by_adapter[name] = assemble(members, own, earned, alone, context=calls)
        judged |= {call.id for call in own}
    unassigned = [call for call in calls if call.id not in judged]
    rest = assemble(rollouts, unassigned, [], replace(settings, adapters=frozenset()))
    rest.groups = {}
    rest.rewards = rollout_rewards(rollouts, rewards)
    rest.unclaimed = unclaimed_rewards(rollouts, calls, rewards)
    asked = {call.attempt_id for call in calls if call.adapter in rules}
    earned = {name for name, reward in rest.rewards.items() if reward is not None}
    rest.unasked = {r.id for r in rollouts if r.id in earned and r.winner not in asked}
    for call in unassigned:  # the call's own adapter may train on other agents' calls
        if call.adapter in rules and rest.skipped[call.id] is SkipReason.NOT_TRAINABLE_MODEL:
            rest.skipped[call.id] = SkipReason.OTHER_AGENT
    return AdapterBatches(by_adapter, rest)
