"""Calls, spans and rewards: recording them, judging them, and the sum that must hold."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import (
    Accounting,
    AttemptState,
    Call,
    CallState,
    Reward,
    SkipReason,
    Span,
)
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.engine import Database
from agentrl_tracer.store.upsert import upsert

_CALL_COLUMNS = [t.calls.c[name] for name in Call.__dataclass_fields__]
_SPAN_COLUMNS = [t.spans.c[name] for name in Span.__dataclass_fields__]
_REWARD_COLUMNS = [t.rewards.c[name] for name in Reward.__dataclass_fields__]
# A verdict, once given, stands: a call judged while it was open keeps that reason when it finishes.
_KEPT_VERDICT = ("trained_step", "skip_reason")
_CALL_UPDATES = tuple(c.name for c in _CALL_COLUMNS if c.name not in ("id", *_KEPT_VERDICT))

# Statements of the hot path are built once: building one costs as much as executing it.
_ATTEMPT_STATES = sa.select(t.attempts.c.id, t.attempts.c.state).where(
    t.attempts.c.id.in_(sa.bindparam("ids", expanding=True))
)
_SET_PROXIED = (
    t.gateways.update()
    .where(t.gateways.c.boot_id == sa.bindparam("boot"))
    .values(proxied=sa.bindparam("count"))
)
_LAST_SEQ = sa.select(sa.func.max(t.calls.c.seq)).where(
    t.calls.c.attempt_id == sa.bindparam("attempt_id")
)
# Token ids are blobs of four bytes each; the choices of a request share its prompt.
_SPENT = sa.select(
    sa.func.count(),
    sa.func.coalesce(
        sa.func.sum(
            sa.func.length(t.calls.c.response_ids)
            + sa.case((t.calls.c.choice == 0, sa.func.length(t.calls.c.prompt_ids)), else_=0)
        ),
        0,
    ),
).where(t.calls.c.attempt_id == sa.bindparam("attempt_id"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """Spans and rewards that arrived together; of an attempt, or (None) of nobody's."""

    attempt_id: str | None
    spans: Sequence[Span]
    rewards: Sequence[Reward] = ()


class CallStore:
    db: Database

    def write_calls(
        self,
        boot_id: str,
        opened: Sequence[Call],
        finished: Sequence[Call],
        proxied: int,
        deliveries: Sequence[Delivery] = (),
    ) -> dict[str, AttemptState | None]:
        """One group commit: open and finished calls, the gateway's own count, spans and rewards.

        A call that finishes after its attempt was sealed is kept, as ``late_call``; spans and
        rewards that come after it are not. Returns the state of every attempt among finished
        calls and deliveries as of this transaction, by attempt id.
        """
        done = {call.id for call in finished}
        concerned = {item.attempt_id for item in (*finished, *deliveries)} - {None}
        with self.db.write() as c:
            states = self._attempt_states(c, concerned)
            rows = [_row(call, boot_id) for call in opened if call.id not in done]
            if rows:
                c.execute(upsert(self.db, t.calls, update=()), rows)
            rows = [_row(call, boot_id) for call in finished]
            for row in rows:
                state = states.get(row["attempt_id"])
                if row["attempt_id"] is not None and state is not AttemptState.RUNNING:
                    row["skip_reason"] = SkipReason.LATE_CALL
            if rows:
                statement = upsert(self.db, t.calls, update=_CALL_UPDATES, keep=_KEPT_VERDICT)
                c.execute(statement, rows)
            if opened or finished:
                c.execute(_SET_PROXIED, {"boot": boot_id, "count": proxied})
            for delivery in deliveries:
                attempt_id = delivery.attempt_id
                if attempt_id is None or states.get(attempt_id) is AttemptState.RUNNING:
                    self._keep(c, delivery.spans, delivery.rewards)
        return states

    def record_spans(self, spans: Sequence[Span], rewards: Sequence[Reward] = ()) -> None:
        """Keeps spans, and the rewards among them; what is delivered twice is kept once."""
        with self.db.write() as c:
            self._keep(c, spans, rewards)

    def next_seq(self, attempt_id: str) -> int:
        last = self.db.look_up(_LAST_SEQ, attempt_id=attempt_id)
        return 0 if last is None else last + 1

    def spent(self, attempt_id: str) -> tuple[int, int]:
        """How many calls an attempt has made, and how many tokens they used, prompts included."""
        with self.db.read() as c:
            calls, size = c.execute(_SPENT, {"attempt_id": attempt_id}).one()
        return calls, int(size) // 4

    def _keep(self, c: sa.Connection, spans: Sequence[Span], rewards: Sequence[Reward]) -> None:
        if spans:
            rows = [_fields(span) for span in spans]
            c.execute(upsert(self.db, t.spans, update=()), rows)
        if rewards:
            rows = [_fields(r) | {"created_at": r.created_at or time.time()} for r in rewards]
            c.execute(upsert(self.db, t.rewards, update=()), rows)

    def calls(
        self,
        *,
        rollout_ids: Collection[str] | None = None,
        attempt_ids: Collection[str] | None = None,
    ) -> list[Call]:
        """Calls of these rollouts or attempts, by attempt and order of acceptance."""
        query = sa.select(*_CALL_COLUMNS)
        if rollout_ids is not None:
            query = query.where(t.calls.c.rollout_id.in_(rollout_ids))
        if attempt_ids is not None:
            query = query.where(t.calls.c.attempt_id.in_(attempt_ids))
        query = query.order_by(t.calls.c.attempt_id, t.calls.c.seq, t.calls.c.choice)
        with self.db.read() as c:
            return [_call(row) for row in c.execute(query).mappings()]

    def spans(self, rollout_id: str) -> list[Span]:
        with self.db.read() as c:
            query = sa.select(*_SPAN_COLUMNS).where(t.spans.c.rollout_id == rollout_id)
            rows = c.execute(query.order_by(t.spans.c.start_ns)).mappings()
            return [Span(**row) for row in rows]

    def rewards(self, rollout_ids: Collection[str]) -> list[Reward]:
        with self.db.read() as c:
            query = sa.select(*_REWARD_COLUMNS).where(t.rewards.c.rollout_id.in_(rollout_ids))
            rows = c.execute(query.order_by(t.rewards.c.created_at)).mappings()
            return [Reward(**row) for row in rows]

    def settle(self, *, trained: Mapping[str, int], skipped: Mapping[str, SkipReason]) -> None:
        """Gives calls their verdict: the step that trained on them, or why none did.

        A call judged before keeps its first verdict.
        """
        unjudged = sa.and_(t.calls.c.trained_step.is_(None), t.calls.c.skip_reason.is_(None))
        with self.db.write() as c:
            if trained:
                c.execute(
                    t.calls.update()
                    .where(t.calls.c.id == sa.bindparam("call_id"), unjudged)
                    .values(trained_step=sa.bindparam("step")),
                    [{"call_id": i, "step": step} for i, step in trained.items()],
                )
            if skipped:
                c.execute(
                    t.calls.update()
                    .where(t.calls.c.id == sa.bindparam("call_id"), unjudged)
                    .values(skip_reason=sa.bindparam("reason")),
                    [{"call_id": i, "reason": reason} for i, reason in skipped.items()],
                )

    def supersede(self, run_id: str, after_step: int) -> int:
        """A resumed run repeats the steps after ``after_step``, and whatever was under way.

        Calls that those steps trained on, and calls that nobody has judged, train no more.
        """
        unjudged = sa.and_(t.calls.c.trained_step.is_(None), t.calls.c.skip_reason.is_(None))
        with self.db.write() as c:
            changed = c.execute(
                t.calls.update()
                .where(
                    t.calls.c.run_id == run_id,
                    sa.or_(unjudged, t.calls.c.trained_step > after_step),
                )
                .values(trained_step=None, skip_reason=SkipReason.SUPERSEDED)
            )
            return changed.rowcount

    def accounting(self, run_id: str) -> Accounting:
        """The run's sums, read in one transaction."""
        mine = t.calls.c.run_id == run_id
        with self.db.write() as c:
            proxied = c.execute(
                sa.select(sa.func.coalesce(sa.func.sum(t.gateways.c.proxied), 0)).where(
                    t.gateways.c.run_id == run_id
                )
            ).scalar_one()
            rows = c.execute(
                sa.select(
                    t.calls.c.skip_reason, t.calls.c.trained_step.is_not(None), sa.func.count()
                )
                .where(mine)
                .group_by(t.calls.c.skip_reason, t.calls.c.trained_step.is_not(None))
            ).all()
        trained = sum(n for reason, was_trained, n in rows if was_trained)
        skipped: dict[str, int] = {}
        pending = 0
        for reason, was_trained, n in rows:
            if was_trained:
                continue
            if reason is None:
                pending += n
            else:
                skipped[reason] = skipped.get(reason, 0) + n
        return Accounting(proxied, sum(row[2] for row in rows), trained, skipped, pending)

    @staticmethod
    def _attempt_states(c: sa.Connection, ids: Collection[Any]) -> dict[str, AttemptState | None]:
        if not ids:
            return {}
        rows = c.execute(_ATTEMPT_STATES, {"ids": list(ids)})
        return {row.id: AttemptState(row.state) for row in rows}


def _fields(record: Any) -> dict[str, Any]:
    """A slotted dataclass as a row, without ``asdict``'s deep copies."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _row(call: Call, boot_id: str) -> dict[str, Any]:
    return _fields(call) | {"gateway": boot_id}


def _call(row: Any) -> Call:
    reason = row["skip_reason"]
    return Call(
        **{
            **row,
            "state": CallState(row["state"]),
            "skip_reason": None if reason is None else SkipReason(reason),
        }
    )
