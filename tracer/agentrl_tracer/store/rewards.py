"""Store rewards: those that agents emit, those that functions compute from finished rollouts, those
that a policy gives, and feedback of people.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict

import sqlalchemy as sa

from agentrl_tracer.conventions import ASIDE, SCORED
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

    def set_scores(
        self, attempt_ids: Collection[str], functions: Collection[str], scores: Sequence[Reward], *,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """Replace what ``functions`` gave some attempts by ``scores``.

        Args:
            alone: set all other rewards of these attempts aside; else they all count.
        """
        key, mine = t.rewards.c.key, self.db.among(t.rewards.c.attempt_id, attempt_ids)
        names = [f"{aside}{SCORED}{name}:" for name in functions for aside in ("", ASIDE)]
        earlier = sa.or_(*(key.startswith(name, autoescape=True) for name in names))
        is_aside = key.startswith(ASIDE)
        update = t.rewards.update().where(mine, ~is_aside if alone else is_aside)
        changed = sa.literal(ASIDE).concat(key) if alone else sa.func.substr(key, len(ASIDE) + 1)

        def work(c: sa.Connection) -> None:
            c.execute(t.rewards.delete().where(mine, earlier))
            c.execute(update.values(key=changed))
            now = time.time()  # of the transaction: ``scored_since`` misses none
            rows = [asdict(one) | {"created_at": now + at / 1e6} for at, one in enumerate(scores)]
            if rows:
                c.execute(self.db.upsert(t.rewards), rows)

        self.db.transact(work)

    def scored_since(self, run_id: str, since: float) -> dict[str, float]:
        """Return the run's rollouts with rewards that were computed after ``since``, and when."""
        r = t.rewards.c
        own = sa.select(t.rollouts.c.id).where(t.rollouts.c.run_id == run_id)
        query = sa.select(r.rollout_id, sa.func.max(r.created_at)).group_by(r.rollout_id)
        query = query.where(r.key.startswith(SCORED), r.created_at > since, r.rollout_id.in_(own))
        return {row[0]: row[1] for row in self.db.fetch_rows(query)}

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
