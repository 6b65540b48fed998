"""Store rewards: those that agents emit, and those that a policy gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import POLICY_REWARD_KEY, Reward
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.database import Database

_ANY_REWARD = (
    sa.select(t.rewards.c.key).where(t.rewards.c.attempt_id == sa.bindparam("attempt")).limit(1)
)


def insert_rewards(db: Database, cursor: Any, rewards: Sequence[Reward]) -> None:
    """Insert emitted rewards; one that is delivered twice is kept once."""
    dated = [r if r.created_at else replace(r, created_at=time.time()) for r in rewards]
    db.insert_records(cursor, t.rewards, dated)


def set_policy_reward(
    db: Database, connection: sa.Connection, rollout_id: str, attempt_id: str, policy: str,
    value: float, explanation: str | None,
) -> None:  # fmt: skip
    """Give an attempt the reward of a policy, which stands instead of the emitted ones."""
    reward = Reward(
        attempt_id, rollout_id, policy, value, POLICY_REWARD_KEY, explanation=explanation,
        created_at=time.time(),
    )  # fmt: skip
    connection.execute(db.upsert(t.rewards, update=("value",)), [asdict(reward)])


def has_reward(connection: sa.Connection, attempt_id: str) -> bool:
    return connection.execute(_ANY_REWARD, {"attempt": attempt_id}).first() is not None
