"""What a step learns from: its calls and rewards, read from the store, as each adapter's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.config.commands import TrainConfig
from agentrl.training.queue.staleness import StalenessLimit
from agentrl.training.setup.algorithm import step_settings
from agentrl_tracer.schemas import Call, Rollout, SkipReason
from agentrl_tracer.store import Store
from agentrl_trainer.data.adapter_split import AdapterBatches, AdapterRule, assemble_adapters
from agentrl_trainer.data.members import Cut
from agentrl_trainer.data.own_estimator import OwnEstimator
from agentrl_trainer.data.rewards import human_rewards


class StepRecords:
    """Reads a step's calls and rewards, and assembles what each adapter learns from them.

    Args:
        max_length: tokens of the longest trajectory to train on.
    """

    def __init__(self, config: TrainConfig, store: Store, max_length: int) -> None:
        how = config.rollouts
        self.staleness = StalenessLimit(how.max_staleness, how.stale or "wait")
        self._store = store
        self._rules = {
            name: AdapterRule(one.agents, one.rewards or None)
            for name, one in config.trained.items()
        }
        self._human = {
            name
            for one in config.trained.values()
            for name in one.rewards or ()
            if name.startswith("human:")
        }
        self._settings = step_settings(config, adapters=frozenset(), max_length=max_length)
        self._reads_bodies = config.algorithm.estimator == "gigpo"  # states are in the requests

    def use(self, own: OwnEstimator | None, trajectories: Cut) -> None:
        """Take these in the place of the estimator and of ``build_trajectories``."""
        self._settings = replace(self._settings, own=own, trajectories=trajectories)
        self._reads_bodies |= own is not None

    def assemble(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Call], AdapterBatches]:
        """Return the rollouts' calls, and the batch of each adapter."""
        ids = [rollout.id for rollout in rollouts]
        calls = self._store.calls(rollout_ids=ids, bodies=self._reads_bodies)
        rewards = self._store.rewards(ids)
        if self._human:  # only people give these, whatever an agent emits under their names
            feedback = self._store.feedback(rollouts[0].run_id, rollout_ids=ids) if ids else []
            rewards = [one for one in rewards if one.name not in self._human]
            rewards += human_rewards(feedback, rollouts, calls, self._human)
        settings = replace(self._settings, oldest_version=self.staleness.oldest_version(step))
        return calls, assemble_adapters(rollouts, calls, rewards, settings, self._rules)

    def teaches(self, step: int, group: Sequence[Rollout]) -> bool:
        """Tell whether a finished group fills a step.

        Only a group without variance of rewards does not: one that fails for another reason would
        fail with another task, too.
        """
        batch = self.assemble(step, group)[1].whole()
        return bool(batch.trained) or SkipReason.ZERO_ADVANTAGE not in batch.skipped.values()
