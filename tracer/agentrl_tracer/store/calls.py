"""Calls, spans and rewards: recording them, judging them, and the sum that must hold."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import (
    Accounting,
    AttemptState,
    Call,
    CallState,
    Json,
    PastCall,
    Reward,
    RolloutState,
    SkipReason,
    Span,
)
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.compiled_statements import Hot
from agentrl_tracer.store.database import Database, json_text
from agentrl_tracer.store.upsert import upsert

_CALL_COLUMNS = [t.calls.c[name] for name in Call.__dataclass_fields__]
_SPAN_COLUMNS = [t.spans.c[name] for name in Span.__dataclass_fields__]
_REWARD_COLUMNS = [t.rewards.c[name] for name in Reward.__dataclass_fields__]
# A verdict, once given, stands: a call judged while it was open keeps that reason when it finishes.
_KEPT_VERDICT = ("trained_step", "skip_reason")
_CALL_UPDATES = tuple(c.name for c in _CALL_COLUMNS if c.name not in ("id", *_KEPT_VERDICT))

_ROW = (*(c.name for c in _CALL_COLUMNS), "gateway")
_values = attrgetter(*Call.__dataclass_fields__)
_SKIP_REASON = _ROW.index("skip_reason")

# Statements of the hot path are built once: building one costs as much as executing it.
_SET_PROXIED = (
    t.gateways.update()
    .where(t.gateways.c.boot_id == sa.bindparam("boot"))
    .values(proxied=sa.bindparam("count"))
)
_LAST_SEQ = sa.select(sa.func.max(t.calls.c.seq)).where(
    t.calls.c.attempt_id == sa.bindparam("attempt_id")
)
# JSON is read in Python: PostgreSQL extracts nothing from a document that has a NUL anywhere.
_SIZES = sa.select(
    t.calls.c.seq,
    t.calls.c.params,
    sa.func.length(t.calls.c.prompt_ids),
    sa.func.length(t.calls.c.response_ids),
).where(t.calls.c.attempt_id == sa.bindparam("attempt_id"))
_TOKEN_BYTES = 4


def _goes_on_from(later: sa.FromClause) -> sa.ColumnElement[bool]:
    """Whether a call's prompt begins with the tokens of another: its prompt and its response, less
    the last token, as turns end in the template's way."""
    prompt, said, begins = t.calls.c.prompt_ids, t.calls.c.response_ids, later.c.prompt_ids
    asked, heard = sa.func.length(prompt), sa.func.length(said) - _TOKEN_BYTES
    return sa.and_(
        later.c.attempt_id == t.calls.c.attempt_id,
        later.c.seq > t.calls.c.seq,
        heard > 0,
        sa.func.substr(begins, 1, asked) == prompt,
        sa.func.substr(begins, asked + 1, heard) == sa.func.substr(said, 1, heard),
    )


# The text of the request is compared, not a digest of it: an index or a column more would cost
# every call, and this is asked only when a client says that it repeats what nobody remembers.
_SAME_REQUESTS = (
    sa.select(*_CALL_COLUMNS)
    .where(
        t.calls.c.attempt_id == sa.bindparam("attempt_id"),
        sa.cast(t.calls.c.request, sa.Text) == sa.bindparam("request", type_=sa.Text),
    )
    .order_by(t.calls.c.seq, t.calls.c.choice)
)
_GONE_ON_FROM = sa.select(t.calls.c.id).where(
    t.calls.c.attempt_id == sa.bindparam("attempt_id"),
    t.calls.c.response_id.in_(sa.bindparam("responses", expanding=True)),
    sa.exists().where(_goes_on_from(t.calls.alias("later"))),
)
_LOOKED_AFTER = 16  # requests: each is compared with every later call of its attempt


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
        *,
        wait: bool = True,
    ) -> dict[str, AttemptState | None]:
        """One group commit: open and finished calls, the gateway's own count, spans and rewards.

        A call that finishes after its attempt was sealed is kept, as ``late_call``; spans and
        rewards that come after it are not. Returns the state of every attempt among finished
        calls and deliveries as of this transaction, by attempt id.

        Args:
            wait: see ``Database.write_hot``.
        """
        done = {call.id for call in finished}
        marks = [call for call in opened if call.id not in done] if opened else ()
        concerned = {item.attempt_id for item in (*finished, *deliveries)} - {None}
        with self.db.write_hot(wait=wait) as c:
            states = self._attempt_states(c, [i for i in concerned if i is not None])
            if marks:
                insert = self._insert(t.calls, _ROW)
                c.executemany(
                    insert.sql, [insert.parameters((*_values(m), boot_id)) for m in marks]
                )
            if finished:
                insert = self._insert(t.calls, _ROW, update=_CALL_UPDATES, keep=_KEPT_VERDICT)
                rows = []
                for call in finished:
                    row = [*_values(call), boot_id]
                    attempt_id = call.attempt_id
                    if attempt_id is not None and (
                        states.get(attempt_id) is not AttemptState.RUNNING
                    ):
                        row[_SKIP_REASON] = SkipReason.LATE_CALL
                    rows.append(insert.parameters(row))
                c.executemany(insert.sql, rows)
            if opened or finished:
                count = self.db.hot("proxied", lambda: _SET_PROXIED, ("boot", "count"))
                c.execute(count.sql, count.parameters((boot_id, proxied)))
            for delivery in deliveries:
                attempt_id = delivery.attempt_id
                if attempt_id is None or states.get(attempt_id) is AttemptState.RUNNING:
                    self._keep(c, delivery.spans, delivery.rewards)
        return states

    def record_spans(self, spans: Sequence[Span], rewards: Sequence[Reward] = ()) -> None:
        """Keeps spans, and the rewards among them; what is delivered twice is kept once."""
        with self.db.write_hot() as c:
            self._keep(c, spans, rewards)

    def next_seq(self, attempt_id: str) -> int:
        last = self.db.look_up(_LAST_SEQ, attempt_id=attempt_id)
        return 0 if last is None else last + 1

    def spent(self, attempt_id: str) -> tuple[int, int]:
        """How many calls an attempt has made, and how many tokens they used, prompts included."""
        with self.db.read() as c:
            rows = c.execute(_SIZES, {"attempt_id": attempt_id}).all()
        tokens = 0
        counted: set[int] = set()
        for seq, params, prompt, response in rows:
            tokens += response // _TOKEN_BYTES
            if seq not in counted:  # choices that were sampled together share the prompt
                counted.add(seq)
                usage = params.get("usage") or {}  # of other models, which tell no ids
                tokens += prompt // _TOKEN_BYTES + (usage.get("total_tokens") or 0)
        return len(rows), tokens

    def same_requests(self, attempt_id: str, request: Json) -> list[PastCall]:
        """Calls of an attempt that were asked with exactly this wire request, in order.

        Whether an agent went on from them is looked up for the newest few requests, and taken for
        granted of the others.
        """
        asked = {"attempt_id": attempt_id, "request": json_text(request)}
        with self.db.read() as c:
            calls = [_call(row) for row in c.execute(_SAME_REQUESTS, asked).mappings()]
            newest = list(dict.fromkeys(call.response_id for call in reversed(calls)))
            newest = newest[:_LOOKED_AFTER]
            which = {"attempt_id": attempt_id, "responses": newest}
            gone_on_from = set(c.execute(_GONE_ON_FROM, which).scalars()) if newest else set()
        return [
            PastCall(call, call.response_id not in newest or call.id in gone_on_from)
            for call in calls
        ]

    def _keep(self, c: Any, spans: Sequence[Span], rewards: Sequence[Reward]) -> None:
        dated = [r if r.created_at else replace(r, created_at=time.time()) for r in rewards]
        for table, records in ((t.spans, spans), (t.rewards, dated)):
            if records:
                names = tuple(records[0].__dataclass_fields__)
                insert = self._insert(table, names)
                values = attrgetter(*names)
                c.executemany(insert.sql, [insert.parameters(values(one)) for one in records])

    def _insert(
        self,
        table: sa.Table,
        names: tuple[str, ...],
        update: tuple[str, ...] = (),
        keep: tuple[str, ...] = (),
    ) -> Hot:
        make = partial(upsert, self.db, table, update, keep)
        return self.db.hot((table.name, update), make, names)

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

    def continuity(self, run_id: str) -> dict[str, dict[str, int]]:
        """How the prompts of each rollout began: counts by rollout id and by how.

        ``continued``: with the exact tokens of an earlier call. The other names say why one did
        not, or (beside ``continued``) why not with the last reply in it; see
        agentrl_proxy.rendering.continuity.Branch. Calls to other models have no prompt here.
        """
        query = sa.select(t.calls.c.rollout_id, t.calls.c.params).where(
            t.calls.c.run_id == run_id,
            t.calls.c.rollout_id.is_not(None),
            t.calls.c.choice == 0,
        )
        found: dict[str, dict[str, int]] = {}
        with self.db.read() as c:
            for rollout_id, params in c.execute(query):
                if params.get("continued") is None:
                    continue
                counts = found.setdefault(rollout_id, {})
                for name in ("continued" if params["continued"] else None, params.get("branched")):
                    if name is not None:
                        counts[name] = counts.get(name, 0) + 1
        return found

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

        Calls that those steps trained on, calls that nobody has judged, and whatever was said of
        the calls of cancelled rollouts: they are counted as repeated, and as nothing else.
        """
        unjudged = sa.and_(t.calls.c.trained_step.is_(None), t.calls.c.skip_reason.is_(None))
        cancelled = sa.select(t.rollouts.c.id).where(
            t.rollouts.c.run_id == run_id, t.rollouts.c.state == RolloutState.CANCELLED
        )
        with self.db.write() as c:
            changed = c.execute(
                t.calls.update()
                .where(
                    t.calls.c.run_id == run_id,
                    sa.or_(
                        unjudged,
                        t.calls.c.trained_step > after_step,
                        t.calls.c.rollout_id.in_(cancelled),
                    ),
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

    def _attempt_states(self, c: Any, ids: Sequence[str]) -> dict[str, AttemptState | None]:
        """The states of attempts; those that do not exist are not in it."""
        if not ids:
            return {}
        size = 1 << (len(ids) - 1).bit_length()  # a statement each for 1, 2, 4, 8, ...
        names = [f"id{i}" for i in range(size)]
        select = self.db.hot(("states", size), partial(_select_states, names), names)
        c.execute(select.sql, select.parameters((*ids, *[ids[0]] * (size - len(ids)))))
        return {attempt_id: AttemptState(state) for attempt_id, state in c.fetchall()}


def _select_states(names: Sequence[str]) -> sa.Select[Any, Any]:
    wanted = [sa.bindparam(name, type_=sa.Text) for name in names]
    return sa.select(t.attempts.c.id, t.attempts.c.state).where(t.attempts.c.id.in_(wanted))


def _call(row: Any) -> Call:
    reason = row["skip_reason"]
    return Call(
        **{
            **row,
            "state": CallState(row["state"]),
            "skip_reason": None if reason is None else SkipReason(reason),
        }
    )
