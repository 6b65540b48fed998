"""Several adapters from one step's records: which call trains which, and what it earned.

Knows the rule of each adapter: the agents that it is for and the rewards that count for it. Does
not know how a verdict or an advantage comes about: that is ``step.assemble``, which is asked once
for each adapter, with that adapter's calls and rewards and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Call, Reward, Rollout, SkipReason
from agentrl_trainer.data.batch_assembly import StepBatch, StepSettings, assemble
from agentrl_trainer.data.rewards import rollout_rewards


@dataclass(frozen=True, slots=True)
class AdapterRule:
    """What trains an adapter."""

    agents: frozenset[str] | None = None
    """Only calls of these agents (roles) do; None: every call that the adapter answered."""
    rewards: frozenset[str] | None = None
    """Only rewards of these names count, summed; None: all of them, one reward for everybody."""

    def takes(self, call: Call) -> bool:
        return self.agents is None or call.agent in self.agents

    def counts(self, reward: Reward) -> bool:
        # What on_error or on_timeout gives was emitted by no agent: it is everybody's.
        return self.rewards is None or reward.name in self.rewards or _is_policy(reward)


@dataclass(slots=True)
class AdapterBatches:
    """Invariant: each call of the step is judged in exactly one of the batches or in ``rest``."""

    by_adapter: dict[str, StepBatch]
    rest: StepBatch
    """Verdicts on what belongs to no adapter; ``rewards`` holds each rollout's sum of all."""

    def whole(self) -> StepBatch:
        """All of it as one batch: for the books, and for the step's own metrics."""
        parts = [*self.by_adapter.values(), self.rest]
        return replace(
            self.rest,
            datums=[datum for part in parts for datum in part.datums],
            trained=set[str]().union(*(part.trained for part in parts)),
            skipped={call: reason for part in parts for call, reason in part.skipped.items()},
            groups={
                f"{name}/{group}": advantages
                for name, part in self.by_adapter.items()
                for group, advantages in part.groups.items()
            },
            off_policy=sum((part.off_policy for part in parts), Counter()),
        )


def assemble_adapters(
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    settings: StepSettings,
    rules: Mapping[str, AdapterRule],
) -> AdapterBatches:
    """Judges every call of a step's finished rollouts, for each adapter by itself.

    Of several adapters, an adapter's group are the rollouts of a group in which it spoke: where it
    was not asked there is nothing of its to compare. ``settings.adapters`` is of no account:
    ``rules`` says it.
    """
    by_adapter: dict[str, StepBatch] = {}
    judged: set[str] = set()
    for name, rule in rules.items():
        own = [call for call in calls if call.adapter == name and rule.takes(call)]
        spoke = {call.attempt_id for call in own}
        # A sole adapter's silence is its own doing, and is compared; another's turn may not come.
        sole = len(rules) == 1 and rule.agents is None
        members = [r for r in rollouts if sole or r.winner is None or r.winner in spoke]
        ids = {member.id for member in members}
        own = [call for call in own if call.rollout_id in ids]
        by_adapter[name] = assemble(
            members,
            own,
            [reward for reward in rewards if reward.rollout_id in ids and rule.counts(reward)],
            replace(settings, adapters=frozenset([name])),
            context=calls,
        )
        judged |= {call.id for call in own}

    others = [call for call in calls if call.id not in judged]
    # Only for its verdicts: no estimator looks at the sum of everybody's rewards.
    nobodys = replace(settings, adapters=frozenset(), estimator="grpo")
    rest = assemble(rollouts, others, rewards, nobodys)
    rest.groups = {}
    rest.rewards = rollout_rewards(rollouts, rewards)
    for call in others:
        if call.adapter in rules and rest.skipped[call.id] is SkipReason.NOT_TRAINABLE_MODEL:
            rest.skipped[call.id] = SkipReason.OTHER_AGENT
    return AdapterBatches(by_adapter, rest)


def _is_policy(reward: Reward) -> bool:
    return reward.key == POLICY_REWARD_KEY
