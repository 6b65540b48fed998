"""A step's records as the trainer takes them: which settings and rules hold for them, in this run.

Knows the store and the configuration; the judging is ``agentrl_trainer.data.adapters``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.config.algorithm import step_settings
from agentrl.config.commands import TrainConfig
from agentrl.training.session import RunError
from agentrl_tracer.schemas import Call, Rollout, SkipReason
from agentrl_tracer.store import Store
from agentrl_trainer.data.adapters import AdapterBatches, AdapterRule, assemble_adapters


def adapter_rules(config: TrainConfig) -> dict[str, AdapterRule]:
    """What trains each adapter."""
    return {
        name: AdapterRule(
            frozenset(one.agents) if one.agents else None,
            frozenset(one.rewards) if one.rewards else None,
        )
        for name, one in config.trained.items()
    }


class StepRecords:
    """``max_length``: tokens of the longest trajectory to train on."""

    def __init__(
        self,
        config: TrainConfig,
        store: Store,
        rules: Mapping[str, AdapterRule],
        max_length: int,
    ) -> None:
        self._config = config
        self._store = store
        self._rules = rules
        self._settings = step_settings(
            config,
            adapters=frozenset(rules),
            max_length=max_length,
        )

    def assemble(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Call], AdapterBatches]:
        """The rollouts' calls, and what each adapter learns from them.

        Raises:
            RunError: they cannot be learned from.
        """
        ids = [rollout.id for rollout in rollouts]
        calls = self._store.calls(rollout_ids=ids)
        settings = self._settings
        if self._config.rollouts.stale == "drop":
            settings = replace(
                settings, oldest_version=step - 1 - self._config.rollouts.max_staleness
            )
        rewards = self._store.rewards(ids)
        try:
            return calls, assemble_adapters(rollouts, calls, rewards, settings, self._rules)
        except ValueError as error:  # rewards that the estimator cannot take
            raise RunError(f"the step's records cannot be learned from: {error}") from error

    def teach(self, step: int, group: Sequence[Rollout]) -> bool:
        """Whether the rewards of a finished group differ, for one adapter at least. What fails for
        other reasons is not replaced: another task would not mend it."""
        batch = self.assemble(step, group)[1].whole()
        return bool(batch.trained) or SkipReason.ZERO_ADVANTAGE not in batch.skipped.values()
