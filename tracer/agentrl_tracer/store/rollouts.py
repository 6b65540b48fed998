"""The queue of rollouts: enqueue, claim under a lease, heartbeat, end, expire.

A rollout goes ``queued → running → succeeded | failed | cancelled``; a retry queues it again.
Whoever ends an attempt does it through ``_seal``, so its policy is decided in one place and an
attempt ends once: a runner that comes late finds it sealed.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.ids import new_id
from agentrl_tracer.schemas import (
    POLICY_REWARD_KEY,
    Attempt,
    AttemptRef,
    AttemptState,
    Claim,
    NewRollout,
    Outcomes,
    Policies,
    Purpose,
    Rollout,
    RolloutState,
)
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.database import Database
from agentrl_tracer.store.upsert import upsert

_ROLLOUT_COLUMNS = [t.rollouts.c[name] for name in Rollout.__dataclass_fields__]
_ATTEMPT_COLUMNS = [t.attempts.c[name] for name in Attempt.__dataclass_fields__]
_UNREWARDED = "it ended without a reward"

# Statements of the hot path are built once: building one costs as much as executing it.
_NEXT_QUEUED = (
    sa.select(t.rollouts, t.tasks.c.data.label("task"))
    .join(t.tasks, t.tasks.c.id == t.rollouts.c.task_id)
    .where(t.rollouts.c.state == RolloutState.QUEUED)
    .order_by(t.rollouts.c.ordinal)
    .limit(1)
)
_OF_RUN = t.rollouts.c.run_id == sa.bindparam("run")
_CLAIMABLE = {
    any_run: query.with_for_update(skip_locked=True, of=t.rollouts)
    for any_run, query in ((True, _NEXT_QUEUED), (False, _NEXT_QUEUED.where(_OF_RUN)))
}
_SOMETHING_QUEUED = {
    any_run: query.with_only_columns(t.rollouts.c.id, maintain_column_froms=True)
    for any_run, query in ((True, _NEXT_QUEUED), (False, _NEXT_QUEUED.where(_OF_RUN)))
}
_UPDATE_ROLLOUT = t.rollouts.update().where(t.rollouts.c.id == sa.bindparam("rollout"))
_NEW_ATTEMPT = t.attempts.insert()
_SEAL_ATTEMPT = t.attempts.update().where(
    t.attempts.c.id == sa.bindparam("attempt"), t.attempts.c.state == AttemptState.RUNNING
)
_WITH_POLICIES = (
    sa.select(t.rollouts, t.runs.c.policies)
    .join(t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
    .join(t.runs, t.runs.c.id == t.rollouts.c.run_id)
    .where(t.attempts.c.id == sa.bindparam("attempt"))
)
_ANY_REWARD = (
    sa.select(t.rewards.c.key).where(t.rewards.c.attempt_id == sa.bindparam("attempt")).limit(1)
)
_STATE = sa.select(t.attempts.c.state).where(t.attempts.c.id == sa.bindparam("attempt_id"))
_BY_KEY = (
    sa.select(
        t.rollouts.c.run_id,
        t.attempts.c.rollout_id,
        t.attempts.c.id.label("attempt_id"),
        t.attempts.c.state,
        t.rollouts.c.purpose,
        t.rollouts.c.seed,
        t.rollouts.c.sampling,
    )
    .join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
    .where(t.attempts.c.key_hash == sa.bindparam("key_hash"))
)


_POLICY_OF = {
    AttemptState.ERROR: "on_error",
    AttemptState.TIMEOUT: "on_timeout",
    AttemptState.NO_REWARD: "on_missing_reward",
}


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class RolloutStore:
    db: Database

    def enqueue(self, run_id: str, new: Sequence[NewRollout], *, first: bool = False) -> list[str]:
        """Queues rollouts in order, behind all others or (``first``) before them; returns their
        ids."""
        now = time.time()
        end = sa.func.min if first else sa.func.max
        with self.db.write() as c:
            found = c.execute(sa.select(sa.func.coalesce(end(t.rollouts.c.ordinal), 0)))
            ordinal = found.scalar_one() + (-len(new) if first else 1)
            rows = [
                {
                    **asdict(rollout),
                    "id": new_id(),
                    "ordinal": ordinal + i,
                    "run_id": run_id,
                    "state": RolloutState.QUEUED,
                    "attempts": 0,
                    "infrastructure_retries": 0,
                    "created_at": now,
                }
                for i, rollout in enumerate(new)
            ]
            if rows:
                c.execute(t.rollouts.insert(), rows)
        return [row["id"] for row in rows]

    def claim(self, runner: str, lease_s: float, run_id: str | None = None) -> Claim | None:
        """Leases the oldest queued rollout to ``runner``; None when nothing is queued."""
        any_run, run = run_id is None, {"run": run_id}
        with self.db.read() as c:  # idle runners poll: look before taking the write lock
            if c.execute(_SOMETHING_QUEUED[any_run], run).first() is None:
                return None
        now = time.time()
        with self.db.write() as c:
            row = c.execute(_CLAIMABLE[any_run], run).mappings().first()
            if row is None:
                return None
            attempt_id = new_id()
            claim = Claim(
                rollout_id=row["id"],
                attempt_id=attempt_id,
                attempt_number=row["attempts"] + 1,
                run_id=row["run_id"],
                purpose=Purpose(row["purpose"]),
                step=row["step"],
                task_id=row["task_id"],
                task=row["task"],
                key=f"sk-agentrl-{secrets.token_urlsafe(24)}",
                lease_expires_at=now + lease_s,
            )
            started = {
                "rollout": claim.rollout_id,
                "state": RolloutState.RUNNING,
                "attempts": claim.attempt_number,
                "started_at": row["started_at"] or now,
            }
            c.execute(_UPDATE_ROLLOUT, started)
            attempt = {
                "id": attempt_id,
                "rollout_id": claim.rollout_id,
                "number": claim.attempt_number,
                "state": AttemptState.RUNNING,
                "key_hash": hash_key(claim.key),
                "runner": runner,
                "lease_expires_at": claim.lease_expires_at,
                "heartbeat_at": now,
                "started_at": now,
            }
            c.execute(_NEW_ATTEMPT, attempt)
        return claim

    def heartbeat(self, attempt_id: str, lease_s: float) -> bool:
        """Renews the lease. False: the attempt is sealed (lease lost, or cancelled); stop it."""
        now = time.time()
        with self.db.write() as c:
            renewed = c.execute(
                t.attempts.update()
                .where(t.attempts.c.id == attempt_id, t.attempts.c.state == AttemptState.RUNNING)
                .values(heartbeat_at=now, lease_expires_at=now + lease_s)
            )
            return renewed.rowcount == 1

    def end_attempt(
        self,
        attempt_id: str,
        state: AttemptState,
        *,
        error: str | None = None,
        log: str | None = None,
    ) -> RolloutState | None:
        """Seals the attempt and decides, by the run's policies, what becomes of its rollout.

        Returns the rollout's new state; None when the attempt had been sealed before.
        """
        with self.db.write() as c:
            return self._seal(c, attempt_id, state, error, log)

    def expire_leases(self, now: float | None = None) -> list[str]:
        """Seals attempts whose runner stopped heartbeating; returns their ids."""
        now = time.time() if now is None else now
        overdue = sa.select(t.attempts.c.id).where(
            t.attempts.c.state == AttemptState.RUNNING, t.attempts.c.lease_expires_at < now
        )
        with self.db.read() as c:
            if c.execute(overdue.limit(1)).first() is None:
                return []
        with self.db.write() as c:
            ids = list(c.execute(overdue).scalars())
            for attempt_id in ids:
                self._seal(
                    c, attempt_id, AttemptState.LOST, "its runner stopped heartbeating", None
                )
        return ids

    def cancel(
        self, run_id: str, reason: str, *, after_step: int | None = None, evaluated: bool = True
    ) -> int:
        """Cancels the run's unfinished rollouts (those after ``after_step``: finished ones too; and
        those of its evaluation, unless that was ``evaluated`` to the end).

        Their attempts are sealed; says how many rollouts were cancelled.
        """
        doomed = sa.and_(
            t.rollouts.c.run_id == run_id,
            t.rollouts.c.state.in_([RolloutState.QUEUED, RolloutState.RUNNING]),
        )
        if after_step is not None:
            repeated = t.rollouts.c.step > after_step
            if not evaluated:
                evaluation = t.rollouts.c.purpose == Purpose.EVAL
                repeated = sa.or_(repeated, sa.and_(t.rollouts.c.step == after_step, evaluation))
            doomed = sa.or_(doomed, sa.and_(t.rollouts.c.run_id == run_id, repeated))
        now = time.time()
        with self.db.write() as c:
            ids = sa.select(t.rollouts.c.id).where(doomed)
            c.execute(
                t.attempts.update()
                .where(
                    t.attempts.c.rollout_id.in_(ids),
                    t.attempts.c.state == AttemptState.RUNNING,
                )
                .values(state=AttemptState.CANCELLED, ended_at=now, error=reason)
            )
            cancelled = c.execute(
                t.rollouts.update()
                .where(doomed)
                .values(state=RolloutState.CANCELLED, reason=reason, ended_at=now)
            )
            return cancelled.rowcount

    def rollouts(
        self,
        run_id: str,
        *,
        step: int | None = None,
        purpose: Purpose | None = None,
        ids: Collection[str] | None = None,
    ) -> list[Rollout]:
        """Rollouts of a run in queue order."""
        query = sa.select(*_ROLLOUT_COLUMNS).where(t.rollouts.c.run_id == run_id)
        if step is not None:
            query = query.where(t.rollouts.c.step == step)
        if purpose is not None:
            query = query.where(t.rollouts.c.purpose == purpose)
        if ids is not None:
            query = query.where(t.rollouts.c.id.in_(ids))
        with self.db.read() as c:
            rows = c.execute(query.order_by(t.rollouts.c.ordinal)).mappings()
            return [_rollout(row) for row in rows]

    def attempts(self, rollout_ids: Collection[str]) -> list[Attempt]:
        with self.db.read() as c:
            query = sa.select(*_ATTEMPT_COLUMNS).where(t.attempts.c.rollout_id.in_(rollout_ids))
            rows = c.execute(query.order_by(t.attempts.c.started_at)).mappings()
            return [Attempt(**{**row, "state": AttemptState(row["state"])}) for row in rows]

    def outcomes(
        self, run_id: str, *, step: int | None = None, purpose: Purpose | None = None
    ) -> Outcomes:
        """How the run's rollouts went (those of one step, of one purpose), in counts."""
        mine = [t.rollouts.c.run_id == run_id]
        if step is not None:
            mine.append(t.rollouts.c.step == step)
        if purpose is not None:
            mine.append(t.rollouts.c.purpose == purpose)
        # What a resumed run repeats was cancelled: its attempts are not this run's any more.
        ids = sa.select(t.rollouts.c.id).where(*mine, t.rollouts.c.state != RolloutState.CANCELLED)

        def counts(column: sa.Column[str], *conditions: sa.ColumnElement[bool]) -> dict[str, int]:
            query = sa.select(column, sa.func.count()).where(*conditions).group_by(column)
            return {row[0]: row[1] for row in c.execute(query)}

        with self.db.write() as c:
            return Outcomes(
                rollouts=counts(t.rollouts.c.state, *mine),
                attempts=counts(t.attempts.c.state, t.attempts.c.rollout_id.in_(ids)),
                policy_rewards=counts(
                    t.rewards.c.name,
                    t.rewards.c.rollout_id.in_(ids),
                    t.rewards.c.key == POLICY_REWARD_KEY,
                ),
            )

    def unfinished(self, ids: Collection[str]) -> int:
        """How many of these rollouts are still queued or running."""
        waiting = [RolloutState.QUEUED, RolloutState.RUNNING]
        query = sa.select(sa.func.count()).where(
            t.rollouts.c.id.in_(ids), t.rollouts.c.state.in_(waiting)
        )
        with self.db.read() as c:
            return c.execute(query).scalar_one()

    def unfinished_ids(self, ids: Collection[str]) -> set[str]:
        """Which of these rollouts are still queued or running."""
        waiting = [RolloutState.QUEUED, RolloutState.RUNNING]
        query = sa.select(t.rollouts.c.id).where(
            t.rollouts.c.id.in_(ids), t.rollouts.c.state.in_(waiting)
        )
        with self.db.read() as c:
            return set(c.execute(query).scalars())

    def move_to_step(self, ids: Collection[str], step: int) -> None:
        """These rollouts belong to another step than they were planned for."""
        with self.db.write() as c:
            c.execute(t.rollouts.update().where(t.rollouts.c.id.in_(ids)).values(step=step))

    def authenticate(self, key: str) -> AttemptRef | None:
        """Whose attempt a key opens; None for an unknown key. The attempt may be sealed."""
        with self.db.read() as c:
            row = c.execute(_BY_KEY, {"key_hash": hash_key(key)}).mappings().first()
        if row is None:
            return None
        return AttemptRef(
            **{**row, "state": AttemptState(row["state"]), "purpose": Purpose(row["purpose"])}
        )

    def attempt_state(self, attempt_id: str) -> AttemptState | None:
        state = self.db.look_up(_STATE, attempt_id=attempt_id)
        return None if state is None else AttemptState(state)

    def _seal(
        self,
        c: sa.Connection,
        attempt_id: str,
        state: AttemptState,
        error: str | None,
        log: str | None,
    ) -> RolloutState | None:
        now = time.time()
        ended = {"state": state, "error": error, "log": log, "ended_at": now}
        if c.execute(_SEAL_ATTEMPT, {"attempt": attempt_id, **ended}).rowcount == 0:
            return None
        row = c.execute(_WITH_POLICIES, {"attempt": attempt_id}).mappings().one()
        infrastructure = state in (AttemptState.INFRASTRUCTURE, AttemptState.LOST)
        retries = row["infrastructure_retries"] + infrastructure
        policies = Policies(**row["policies"])
        # Rewards are in the store before a runner reports success, so this look is final.
        unrewarded = (
            state is AttemptState.SUCCEEDED
            and policies.on_missing_reward != "drop"
            and c.execute(_ANY_REWARD, {"attempt": attempt_id}).first() is None
        )
        if unrewarded:
            state, error = AttemptState.NO_REWARD, _UNREWARDED
        new, reward = _verdict(state, policies, row["attempts"], retries)
        if unrewarded and new is RolloutState.QUEUED:
            again = {"state": state, "error": error}
            c.execute(t.attempts.update().where(t.attempts.c.id == attempt_id).values(again))
        values: dict[str, Any] = {"state": new, "infrastructure_retries": retries}
        if new is RolloutState.SUCCEEDED:
            values |= {"winner": attempt_id, "ended_at": now}
        elif new is not RolloutState.QUEUED:
            values |= {"reason": f"{state}: {error}" if error else str(state), "ended_at": now}
        c.execute(_UPDATE_ROLLOUT, {"rollout": row["id"], **values})
        if reward is not None:
            policy_reward = {
                "attempt_id": attempt_id,
                "rollout_id": row["id"],
                "key": POLICY_REWARD_KEY,
                "name": _POLICY_OF[state],
                "value": reward,
                "explanation": error,
                "created_at": now,
            }
            c.execute(upsert(self.db, t.rewards, update=("value",)), [policy_reward])
        return new


def _verdict(
    state: AttemptState, policies: Policies, attempts: int, infrastructure_retries: int
) -> tuple[RolloutState, float | None]:
    """What an attempt's end makes of its rollout, and the reward a policy gives for it."""
    match state:
        case AttemptState.SUCCEEDED:
            return RolloutState.SUCCEEDED, None
        case AttemptState.CANCELLED:
            return RolloutState.CANCELLED, None
        case AttemptState.INFRASTRUCTURE | AttemptState.LOST:
            again = infrastructure_retries <= policies.max_infrastructure_retries
            return (RolloutState.QUEUED if again else RolloutState.FAILED), None
        case _:
            policy: str | float = getattr(policies, _POLICY_OF[state])
            if policy == "retry" and attempts - infrastructure_retries < policies.max_attempts:
                return RolloutState.QUEUED, None
            if isinstance(policy, str):
                ended_well = state is AttemptState.NO_REWARD
                return RolloutState.SUCCEEDED if ended_well else RolloutState.FAILED, None
            return RolloutState.SUCCEEDED, float(policy)


def _rollout(row: Any) -> Rollout:
    return Rollout(
        **{**row, "state": RolloutState(row["state"]), "purpose": Purpose(row["purpose"])}
    )
