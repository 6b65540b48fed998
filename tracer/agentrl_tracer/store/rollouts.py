"""Queue rollouts, end their attempts, and say how they went.

A rollout goes ``queued → running → succeeded | failed | cancelled``; a retry queues it again. Every
attempt ends in ``_seal``, once: a runner that reports late finds its attempt sealed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import (
    POLICY_REWARD_KEY,
    Attempt,
    AttemptState,
    NewRollout,
    Outcomes,
    Policies,
    Purpose,
    Rollout,
    RolloutState,
    new_id,
)
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.rewards import RewardStore

_ROLLOUT_COLUMNS = [t.rollouts.c[name] for name in Rollout.__dataclass_fields__]
_ATTEMPT_COLUMNS = [t.attempts.c[name] for name in Attempt.__dataclass_fields__]
_STATE, _PURPOSE = map([*Rollout.__dataclass_fields__].index, ("state", "purpose"))
_ATTEMPT_STATE = [*Attempt.__dataclass_fields__].index("state")
_UNFINISHED = t.rollouts.c.state.in_([RolloutState.QUEUED, RolloutState.RUNNING])

# Statements of the hot path are built once: building one costs as much as executing it.
UPDATE_ROLLOUT = t.rollouts.update().where(t.rollouts.c.id == sa.bindparam("rollout"))
_SEAL_ATTEMPT = t.attempts.update().where(
    t.attempts.c.id == sa.bindparam("attempt"), t.attempts.c.state == AttemptState.RUNNING
)
_WITH_POLICIES = (
    sa.select(t.rollouts, t.runs.c.policies)
    .join(t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
    .join(t.runs, t.runs.c.id == t.rollouts.c.run_id)
    .where(t.attempts.c.id == sa.bindparam("attempt"))
)

_UNFINISHED_IDS = sa.select(t.rollouts.c.id).where(
    t.rollouts.c.run_id == sa.bindparam("run"),
    t.rollouts.c.step >= sa.bindparam("since"),
    t.rollouts.c.purpose == sa.bindparam("purpose"),
    _UNFINISHED,
)

_POLICY_OF = {
    AttemptState.ERROR: "on_error",
    AttemptState.TIMEOUT: "on_timeout",
    AttemptState.NO_REWARD: "on_missing_reward",
}


class RolloutStore(RewardStore):
    def enqueue(self, run_id: str, new: Sequence[NewRollout], *, first: bool = False) -> list[str]:
        """Queue rollouts in order, behind all others or (``first``) before them; return ids."""
        end = sa.func.min if first else sa.func.max
        rows = [
            {
                **asdict(rollout),
                "id": new_id(),
                "run_id": run_id,
                "state": RolloutState.QUEUED,
                "attempts": 0,
                "infrastructure_retries": 0,
                "created_at": time.time(),
            }
            for rollout in new
        ]

        def work(c: sa.Connection) -> None:
            if self.db.is_remote:  # runs that share the database number their rollouts in turn
                c.execute(sa.text("SELECT pg_advisory_xact_lock(727275)"))
            found = c.execute(sa.select(sa.func.coalesce(end(t.rollouts.c.ordinal), 0)))
            ordinal = found.scalar_one() + (-len(rows) if first else 1)
            numbered = [{**row, "ordinal": ordinal + i} for i, row in enumerate(rows)]
            c.execute(self.db.upsert(t.rollouts), numbered)

        if rows:
            self.db.transact(work)
        return [row["id"] for row in rows]

    def end_attempt(
        self,
        attempt_id: str,
        state: AttemptState,
        *,
        error: str | None = None,
        log: str | None = None,
    ) -> RolloutState | None:
        """Seal the attempt and decide, by the run's policies, what becomes of its rollout.

        Returns the rollout's new state; None when the attempt was already sealed.
        """
        if error is not None:  # an agent's exception may hold what a database refuses
            error = error.encode("utf-8", "backslashreplace").decode().replace("\0", "\ufffd")
        return self.db.transact(lambda c: self._seal(c, attempt_id, state, error, log))

    def _seal(
        self,
        c: sa.Connection,
        attempt_id: str,
        state: AttemptState,
        error: str | None,
        log: str | None = None,
    ) -> RolloutState | None:
        now = time.time()
        ended = {"state": state, "error": error, "log": log, "ended_at": now}
        if c.execute(_SEAL_ATTEMPT, {"attempt": attempt_id, **ended}).rowcount == 0:
            return None
        row = c.execute(_WITH_POLICIES, {"attempt": attempt_id}).mappings().one()
        infrastructure = state in (AttemptState.INFRASTRUCTURE, AttemptState.LOST)
        retries = row["infrastructure_retries"] + infrastructure
        policies = Policies(**row["policies"])
        # Rewards are stored before a runner reports success, so this check is final.
        unrewarded = (
            state is AttemptState.SUCCEEDED
            and policies.on_missing_reward != "drop"
            and not self._has_reward(c, attempt_id)
        )
        if unrewarded:
            state, error = AttemptState.NO_REWARD, "it ended without a reward"
        new, reward = _decide(state, policies, row["attempts"], retries)
        if unrewarded and new is RolloutState.QUEUED:
            attempt = t.attempts.update().where(t.attempts.c.id == attempt_id)
            c.execute(attempt.values(state=state, error=error))
        values: dict[str, Any] = {"state": new, "infrastructure_retries": retries}
        if new is RolloutState.SUCCEEDED:
            values |= {"winner": attempt_id, "ended_at": now}
        elif new is not RolloutState.QUEUED:
            values |= {"reason": f"{state}: {error}" if error else str(state), "ended_at": now}
        c.execute(UPDATE_ROLLOUT, {"rollout": row["id"], **values})
        if reward is not None:  # it stands instead of the emitted ones
            self._set_policy_reward(c, row["id"], attempt_id, _POLICY_OF[state], reward, error)
        return new

    def cancel(
        self, run_id: str, reason: str, *, after_step: int | None = None, evaluated: bool = True
    ) -> int:
        """Cancel the run's unfinished rollouts, seal their attempts, and return their number.

        Args:
            after_step: also cancel all rollouts of later steps, finished ones included.
            evaluated: False also cancels the evaluation at ``after_step`` itself.
        """
        canceled = _UNFINISHED
        if after_step is not None:
            canceled = sa.or_(canceled, t.rollouts.c.step > after_step)
            if not evaluated:
                evaluation = t.rollouts.c.purpose == Purpose.EVAL
                canceled = sa.or_(canceled, sa.and_(t.rollouts.c.step == after_step, evaluation))
        canceled = sa.and_(t.rollouts.c.run_id == run_id, canceled)
        now = time.time()

        def work(c: sa.Connection) -> int:
            # Locked first: a claim under way adds an attempt.
            unfinished = sa.select(t.rollouts.c.id).where(canceled).with_for_update()
            ids = c.execute(unfinished).scalars().all()
            of_canceled = self.db.among(t.attempts.c.rollout_id, ids)
            c.execute(
                t.attempts.update()
                .where(of_canceled, t.attempts.c.state == AttemptState.RUNNING)
                .values(state=AttemptState.CANCELLED, ended_at=now, error=reason)
            )
            return c.execute(
                t.rollouts.update()
                .where(self.db.among(t.rollouts.c.id, ids))
                .values(state=RolloutState.CANCELLED, reason=reason, ended_at=now)
            ).rowcount

        return self.db.transact(work)

    def rollouts(
        self,
        run_id: str,
        *,
        step: int | None = None,
        purpose: Purpose | None = None,
        ids: Collection[str] | None = None,
    ) -> list[Rollout]:
        """Return rollouts of a run in queue order."""
        query = sa.select(*_ROLLOUT_COLUMNS).where(*_of_run(run_id, step, purpose))
        if ids is not None:
            query = query.where(self.db.among(t.rollouts.c.id, ids))
        return [_rollout(row) for row in self.db.fetch_rows(query.order_by(t.rollouts.c.ordinal))]

    def rollout_ids_after(self, run_id: str, last: str, limit: int) -> list[str]:
        """Return the ids of the next ``limit`` rollouts that were queued after ``last``."""
        # In the order of ids: by the index of runs it would sort all of the run's rollouts.
        own = t.rollouts.c.run_id.concat("") == run_id, t.rollouts.c.id > last
        query = sa.select(t.rollouts.c.id).where(*own).order_by(t.rollouts.c.id).limit(limit)
        return [row.id for row in self.db.fetch_rows(query)]

    def canceled_ids(self, run_id: str) -> list[str]:
        own = t.rollouts.c.run_id == run_id, t.rollouts.c.state == RolloutState.CANCELLED
        return [row.id for row in self.db.fetch_rows(sa.select(t.rollouts.c.id).where(*own))]

    def count_rollouts(self, run_id: str) -> int:
        query = sa.select(sa.func.count()).where(t.rollouts.c.run_id == run_id)
        return self.db.fetch_rows(query.select_from(t.rollouts))[0][0]

    def attempts(self, rollout_ids: Collection[str]) -> list[Attempt]:
        """Return the attempts of these rollouts in order of their start."""
        mine = self.db.among(t.attempts.c.rollout_id, rollout_ids)
        query = sa.select(*_ATTEMPT_COLUMNS).where(mine)
        return [
            _attempt(row) for row in self.db.fetch_rows(query.order_by(t.attempts.c.started_at))
        ]

    def newest_attempts(
        self,
        run_id: str,
        states: Collection[AttemptState],
        since_step: int,
        limit: int | None = None,
    ) -> list[tuple[Rollout, Attempt]]:
        """Return attempts of some states and their rollouts, of ``since_step`` and later steps.

        The one that began last comes first.
        """
        query = (
            sa.select(*_ROLLOUT_COLUMNS, *_ATTEMPT_COLUMNS)
            .join_from(t.rollouts, t.attempts, t.attempts.c.rollout_id == t.rollouts.c.id)
            .where(t.rollouts.c.run_id == run_id, t.rollouts.c.step >= since_step)
            .where(t.attempts.c.state.in_(states))
            .order_by(t.attempts.c.started_at.desc())
        )
        found = self.db.fetch_rows(query.limit(limit))
        cut = len(_ROLLOUT_COLUMNS)
        return [(_rollout(row[:cut]), _attempt(row[cut:])) for row in found]

    def outcomes(
        self, run_id: str, *, step: int | None = None, purpose: Purpose | None = None
    ) -> Outcomes:
        """Count how the run's rollouts went, all or those of one step and purpose."""
        mine = _of_run(run_id, step, purpose)
        # A resumed run cancels what it repeats: those attempts are no longer counted.
        ids = sa.select(t.rollouts.c.id).where(*mine, t.rollouts.c.state != RolloutState.CANCELLED)

        by_policies = (t.rewards.c.rollout_id.in_(ids), t.rewards.c.key == POLICY_REWARD_KEY)

        def work(c: sa.Connection) -> Outcomes:
            def counts(column: sa.Column[str], *wanted: sa.ColumnElement[bool]) -> dict[str, int]:
                query = sa.select(column, sa.func.count()).where(*wanted).group_by(column)
                return {row[0]: row[1] for row in c.execute(query)}

            return Outcomes(
                rollouts=counts(t.rollouts.c.state, *mine),
                attempts=counts(t.attempts.c.state, t.attempts.c.rollout_id.in_(ids)),
                policy_rewards=counts(t.rewards.c.name, *by_policies),
            )

        return self.db.snapshot(work)

    def unfinished_ids(self, run_id: str, purpose: Purpose, *, since_step: int = 0) -> set[str]:
        """Return the rollouts of ``since_step`` and later that are queued or running."""
        rows = self.db.fetch(
            _UNFINISHED_IDS, {"run": run_id, "purpose": purpose, "since": since_step}
        )
        return {row["id"] for row in rows}

    def move_to_step(self, ids: Collection[str], step: int) -> None:
        """Assign rollouts to another step than they were queued for."""
        mine = self.db.among(t.rollouts.c.id, ids)
        self.db.execute(t.rollouts.update().where(mine).values(step=step))


def _rollout(row: Sequence[Any]) -> Rollout:
    values = list(row)
    values[_STATE], values[_PURPOSE] = RolloutState(values[_STATE]), Purpose(values[_PURPOSE])
    return Rollout(*values)


def _attempt(row: Sequence[Any]) -> Attempt:
    values = list(row)
    values[_ATTEMPT_STATE] = AttemptState(values[_ATTEMPT_STATE])
    return Attempt(*values)


def _of_run(run_id: str, step: int | None, purpose: Purpose | None) -> list[sa.ColumnElement[bool]]:
    wanted = ((t.rollouts.c.step, step), (t.rollouts.c.purpose, purpose))
    return [t.rollouts.c.run_id == run_id, *(column == x for column, x in wanted if x is not None)]


def _decide(
    state: AttemptState, policies: Policies, attempts: int, infrastructure_retries: int
) -> tuple[RolloutState, float | None]:
    """Return what an attempt's end makes of its rollout, and the reward that a policy gives."""
    match state:
        case AttemptState.SUCCEEDED:
            return RolloutState.SUCCEEDED, None
        case AttemptState.CANCELLED:
            return RolloutState.CANCELLED, None
        case AttemptState.INFRASTRUCTURE | AttemptState.LOST:
            retry = infrastructure_retries <= policies.max_infrastructure_retries
            return (RolloutState.QUEUED if retry else RolloutState.FAILED), None
        case _:
            policy: str | float = getattr(policies, _POLICY_OF[state])
            if policy == "retry" and attempts - infrastructure_retries < policies.max_attempts:
                return RolloutState.QUEUED, None
            if isinstance(policy, str):
                ended_well = state is AttemptState.NO_REWARD
                return RolloutState.SUCCEEDED if ended_well else RolloutState.FAILED, None
            return RolloutState.SUCCEEDED, float(policy)
