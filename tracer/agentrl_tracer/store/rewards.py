"""Store rewards: those that agents emit, those that a policy gives, and feedback of people."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

import sqlalchemy as sa

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Feedback, Reward
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.database import Database

_ANY_REWARD = (
    sa.select(t.rewards.c.key).where(t.rewards.c.attempt_id == sa.bindparam("attempt")).limit(1)
)


class RewardStore:
    db: Database

    def rewards(self, rollout_ids: Collection[str]) -> list[Reward]:
        """Return the rewards of these rollouts in order of creation."""
        query = sa.select(t.rewards).where(self.db.among(t.rewards.c.rollout_id, rollout_ids))
        return [Reward(**row) for row in self.db.fetch(query.order_by(t.rewards.c.created_at))]

    def add_feedback(self, given: Feedback) -> None:
        """Keep one person's feedback beside all that was given before."""
        self.db.execute(self.db.upsert(t.feedback), [asdict(given)])

    def feedback(
        self,
        run_id: str | None,
        *,
        rollout_ids: Collection[str] | None = None,
        call_id: str | None = None,
    ) -> list[Feedback]:
        """Return the feedback on a run (None: on calls without a run) in order of time.

        Args:
            rollout_ids: only on these rollouts and their calls.
            call_id: only on this call.
        """
        query = sa.select(t.feedback).where(t.feedback.c.run_id.is_not_distinct_from(run_id))
        if rollout_ids is not None:
            query = query.where(self.db.among(t.feedback.c.rollout_id, rollout_ids))
        if call_id is not None:
            query = query.where(t.feedback.c.call_id == call_id)
        return [Feedback(**row) for row in self.db.fetch(query.order_by(t.feedback.c.created_at))]

    def _has_reward(self, c: sa.Connection, attempt_id: str) -> bool:
        return c.execute(_ANY_REWARD, {"attempt": attempt_id}).first() is not None

    def _set_policy_reward(
        self, c: sa.Connection, rollout_id: str, attempt_id: str, policy: str, value: float,
        explanation: str | None,
    ) -> None:  # fmt: skip
        """Give an attempt the reward of a policy, which stands instead of the emitted ones."""
        reward = Reward(
            attempt_id, rollout_id, policy, value, POLICY_REWARD_KEY, explanation=explanation
        )
        c.execute(self.db.upsert(t.rewards, update=("value",)), [asdict(reward)])
