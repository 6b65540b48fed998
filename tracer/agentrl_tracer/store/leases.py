"""Lease queued rollouts to runners, renew leases and end those of lost runners.

A lease belongs to an attempt. Its key lets the agent call the gateway. Runners of several machines
share a PostgreSQL server, and its clock says when their leases end: theirs may differ.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import AttemptRef, AttemptState, Claim, Purpose, RolloutState, new_id
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.rollouts import UPDATE_ROLLOUT, RolloutStore

_INSERT_ATTEMPT = t.attempts.insert()
_SERVER_TIME: sa.ColumnElement[Any] = sa.cast(
    sa.extract("epoch", sa.func.clock_timestamp()), sa.Float
)
_READ_SERVER_TIME = sa.select(_SERVER_TIME)
_STATE = sa.select(t.attempts.c.state).where(t.attempts.c.id == sa.bindparam("attempt_id"))
_BY_KEY = (
    sa.select(t.attempts.c.rollout_id, t.attempts.c.id.label("attempt_id"), t.attempts.c.state)
    .add_columns(t.attempts.c.key_hash)
    .add_columns(*(t.rollouts.c[name] for name in ("run_id", "purpose", "seed", "sampling")))
    .join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
)

# A range of one state, and its order, leave PostgreSQL no index but ``rollouts_queue``. Else it may
# read all finished rollouts before the first queued one, or sort the whole queue.
_QUEUED = sa.and_(
    t.rollouts.c.state.between(RolloutState.QUEUED, RolloutState.QUEUED),
    t.rollouts.c.run_id == sa.bindparam("run"),
)
_IN_TURN = t.rollouts.c.state, t.rollouts.c.ordinal
_ANY_QUEUED = sa.select(t.rollouts.c.id).where(_QUEUED).order_by(*_IN_TURN).limit(1)
_FIRST_QUEUED = (
    sa.select(t.rollouts, t.tasks.c.data.label("task"))
    .join(t.tasks, t.tasks.c.id == t.rollouts.c.task_id)
    .where(_QUEUED)
    .order_by(*_IN_TURN)
    .limit(1)
    .with_for_update(skip_locked=True, of=t.rollouts)
)


class LeaseStore(RolloutStore):
    def claim(self, runner: str, lease_s: float, run_id: str) -> Claim | None:
        """Lease the run's first queued rollout to ``runner``; None when nothing is queued."""
        run = {"run": run_id}
        if not self.db.fetch(_ANY_QUEUED, run):  # idle runners poll without the write lock
            return None
        attempt_id, key = new_id(), f"sk-agentrl-{secrets.token_urlsafe(24)}"

        def work(c: sa.Connection) -> Claim | None:
            row = c.execute(_FIRST_QUEUED, run).mappings().first()
            if row is None:
                return None
            here = time.time()
            now = c.execute(_READ_SERVER_TIME).scalar_one() if self.db.is_remote else here
            claim = Claim(
                rollout_id=row["id"],
                attempt_id=attempt_id,
                attempt_number=row["attempts"] + 1,
                run_id=row["run_id"],
                purpose=Purpose(row["purpose"]),
                step=row["step"],
                task_id=row["task_id"],
                task=row["task"],
                key=key,
                lease_expires_at=now + lease_s,
            )
            number, started = claim.attempt_number, row["started_at"] or here
            running = {"state": RolloutState.RUNNING, "attempts": number, "started_at": started}
            c.execute(UPDATE_ROLLOUT, {"rollout": claim.rollout_id, **running})
            attempt = {
                "id": claim.attempt_id, "rollout_id": claim.rollout_id, "number": number,
                "state": AttemptState.RUNNING, "runner": runner, "started_at": here,
                "lease_expires_at": claim.lease_expires_at, "heartbeat_at": now,
                "key_hash": _hash(claim.key),
            }  # fmt: skip
            c.execute(_INSERT_ATTEMPT, attempt)
            return claim

        return self.db.transact(work)

    def heartbeat(self, attempt_id: str, lease_s: float) -> bool:
        """Renew the lease. False: the attempt is sealed (lease lost, or canceled); stop it."""
        now = self._now()
        renewed = self.db.execute(
            t.attempts.update()
            .where(t.attempts.c.id == attempt_id, t.attempts.c.state == AttemptState.RUNNING)
            .values(heartbeat_at=now, lease_expires_at=now + lease_s)
        )
        return renewed == 1

    def busy_runners(self, run_id: str) -> dict[str, float]:
        """Return when each runner that has an attempt of the run was last heard of."""
        heard = sa.func.max(t.attempts.c.heartbeat_at)
        query = sa.select(t.attempts.c.runner, heard).group_by(t.attempts.c.runner)
        query = query.join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
        mine = t.attempts.c.state == AttemptState.RUNNING, t.rollouts.c.run_id == run_id
        return {row[0]: row[1] for row in self.db.fetch_rows(query.where(*mine))}

    def expire_leases(self, now: float | None = None) -> list[str]:
        """Seal the attempts whose runner stopped heartbeating; return their ids."""
        overdue = t.attempts.c.lease_expires_at < (self._now() if now is None else now)
        return self._seal_lost(overdue, "its runner stopped heartbeating")

    def end_leases(self, pool: str) -> list[str]:
        """Seal the attempts of a pool's runners, which have all died; return their ids."""
        return self._seal_lost(t.attempts.c.runner.startswith(f"{pool}-"), "its runner died")

    def _now(self) -> float | sa.ColumnElement[Any]:
        return _SERVER_TIME if self.db.is_remote else time.time()

    def _seal_lost(self, which: sa.ColumnElement[bool], why: str) -> list[str]:
        lost = sa.select(t.attempts.c.id).where(t.attempts.c.state == AttemptState.RUNNING, which)
        if not self.db.fetch(lost.limit(1)):
            return []

        def work(c: sa.Connection) -> list[str]:
            ids = list(c.execute(lost).scalars())
            for attempt_id in ids:
                self._seal(c, attempt_id, AttemptState.LOST, why)
            return ids

        return self.db.transact(work)

    def authenticate(self, key: str) -> AttemptRef | None:
        """Return the attempt that a key belongs to, sealed or not; None for an unknown key."""
        return self.authenticate_all([key]).get(key)

    def authenticate_all(self, keys: Collection[str]) -> dict[str, AttemptRef]:
        """Return the attempts that keys belong to, sealed or not; unknown keys are missing."""
        by_hash = {_hash(key): key for key in keys}
        rows = self.db.fetch(_BY_KEY.where(self.db.among(t.attempts.c.key_hash, by_hash)))
        found: dict[str, AttemptRef] = {}
        for row in rows:
            values = dict(row)
            key = by_hash[values.pop("key_hash")]
            types = {"state": AttemptState(row["state"]), "purpose": Purpose(row["purpose"])}
            found[key] = AttemptRef(**{**values, **types})
        return found

    def attempt_state(self, attempt_id: str) -> AttemptState | None:
        state = self.db.look_up(_STATE, attempt_id=attempt_id)
        return None if state is None else AttemptState(state)

    def attempt_states(self, attempt_ids: Collection[str]) -> dict[str, AttemptState]:
        """Return the states of the attempts that exist."""
        query = sa.select(t.attempts.c.id, t.attempts.c.state)
        rows = self.db.fetch_rows(query.where(self.db.among(t.attempts.c.id, attempt_ids)))
        return {attempt_id: AttemptState(state) for attempt_id, state in rows}


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
