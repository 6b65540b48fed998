"""Judge calls, count the verdicts, and keep the sum that must hold.

Every call gets one verdict: the step that trained on it, or why none did. The transaction that
gives a verdict also counts it in ``verdicts``; counting a million calls takes seconds.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import (
    Accounting,
    Call,
    Json,
    PromptKinds,
    RolloutState,
    SkipReason,
    Verified,
)
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.database import Database

_TRAINED = "trained"
_COUNTED = ("run_id", "verdict", "calls")
UNJUDGED = sa.and_(t.calls.c.trained_step.is_(None), t.calls.c.skip_reason.is_(None))
# Locked, all of them: a transaction under way may be judging one.
_VERDICTS_NOW = (
    sa.select(t.calls.c.id, t.calls.c.trained_step, t.calls.c.skip_reason)
    .order_by(t.calls.c.id)
    .with_for_update()
)
_WAS_TRAINED = t.calls.c.trained_step.is_not(None)


class VerdictStore:
    db: Database

    def settle(
        self,
        *,
        trained: Mapping[str, int],
        skipped: Mapping[str, SkipReason],
        calls: Sequence[Call] = (),
    ) -> None:
        """Give calls their verdict: the step that trained on them, or why none did.

        A call judged before keeps its first verdict.

        Args:
            calls: all calls of the rollouts that are over, to keep how their prompts began.
        """
        verdicts = defaultdict[tuple[str, Any], list[str]](list)
        for call_id, step in trained.items():
            verdicts["trained_step", step].append(call_id)
        for call_id, reason in skipped.items():
            verdicts["skip_reason", reason].append(call_id)
        began = _prompt_kinds((call.rollout_id, call.choice, call.params) for call in calls)

        def work(c: sa.Connection) -> None:
            for (column, verdict), ids in verdicts.items():
                judged = t.calls.update().where(self.db.among(t.calls.c.id, ids), UNJUDGED)
                rows = c.execute(judged.values({column: verdict}).returning(t.calls.c.run_id))
                name = _TRAINED if column == "trained_step" else verdict
                self.count_verdicts(c, Counter((run_id, name) for run_id in rows.scalars()))
            if began:
                update = t.rollouts.update().where(t.rollouts.c.id == sa.bindparam("rollout"))
                c.execute(
                    update.values(continuity=sa.bindparam("began")),
                    [
                        {"rollout": i, "began": json.dumps(kinds, sort_keys=True)}
                        for i, kinds in began.items()
                    ],
                )

        self.db.transact(work)

    def supersede(self, run_id: str, after_step: int) -> int:
        """Mark calls that a resumed run repeats as superseded; return their number.

        These are the calls that later steps trained on, calls without a verdict, and all calls of
        canceled rollouts.
        """
        canceled = sa.select(t.rollouts.c.id).where(
            t.rollouts.c.run_id == run_id, t.rollouts.c.state == RolloutState.CANCELLED
        )
        mine = t.calls.c.run_id == run_id
        stands = sa.or_(
            t.calls.c.skip_reason.is_(None), t.calls.c.skip_reason != SkipReason.SUPERSEDED
        )
        repeated = (  # one by one: each has an index
            sa.and_(mine, UNJUDGED),
            sa.and_(mine, t.calls.c.trained_step > after_step),
            sa.and_(t.calls.c.rollout_id.in_(canceled), stands),
        )
        columns = (t.calls.c.id, t.calls.c.trained_step, t.calls.c.skip_reason)

        def work(c: sa.Connection) -> int:
            found = {
                row.id: row
                for which in repeated
                for row in c.execute(sa.select(*columns).where(which).with_for_update())
            }
            change = t.calls.update().where(self.db.among(t.calls.c.id, found))
            c.execute(change.values(trained_step=None, skip_reason=SkipReason.SUPERSEDED))
            verdicts = [_TRAINED if row[1] is not None else row[2] for row in found.values()]
            before = Counter[str](verdict for verdict in verdicts if verdict is not None)
            changes = Counter[str]({SkipReason.SUPERSEDED: len(found)})
            changes.subtract(before)
            self.count_verdicts(c, {(run_id, verdict): count for verdict, count in changes.items()})
            return len(found)

        return self.db.transact(work)

    def accounting(self, run_id: str) -> Accounting:
        """Return the run's sums, as its transactions kept them; see ``verify``."""
        return self.db.snapshot(lambda c: _kept(c, run_id))

    def verify(self, run_id: str) -> Verified:
        """Count the run's calls one by one, which takes seconds at a million."""
        calls = sa.select(t.calls.c.skip_reason, _WAS_TRAINED, sa.func.count())
        calls = calls.where(t.calls.c.run_id == run_id).group_by(
            t.calls.c.skip_reason, _WAS_TRAINED
        )

        def work(c: sa.Connection) -> Verified:
            counts = Counter[str | None]()
            for reason, was_trained, count in c.execute(calls):
                counts[_TRAINED if was_trained else reason] += count
            pending = counts.pop(None, 0)
            counted = _accounting(c, run_id, {str(name): n for name, n in counts.items()}, pending)
            return Verified(kept=_kept(c, run_id), counted=counted)

        return self.db.snapshot(work)

    def judged(self, run_id: str, verdict: str, before: str = "", limit: int = 50) -> list[Json]:
        """Return calls of one verdict by the index ``calls_accounting``, the newest first.

        They come without tokens and texts; ``prompt`` and ``sampled`` count tokens.

        Args:
            verdict: ``trained``, ``pending`` or a skip reason.
            before: ``place`` of the last call of the page before.

        Raises:
            ValueError: ``before`` is no place.
        """
        c = t.calls.c
        # SQLite's index ends with the row's number; PostgreSQL knows how rare a verdict is.
        row = c.id if self.db.is_remote else sa.literal_column("calls.rowid", sa.Integer)
        step, _, last = before.partition(".")
        number: Any = last if self.db.is_remote else int(last or 0)
        query = sa.select(
            row.label("row"), c.id, c.rollout_id, c.agent, c.model, c.adapter, c.adapter_version,
            c.state, c.finish_reason, c.error, c.started_at, c.ended_at, c.trained_step,
            sa.func.length(c.prompt_ids).label("prompt"),
            sa.func.length(c.response_ids).label("sampled"),
        ).where(c.run_id == run_id)  # fmt: skip
        if verdict == _TRAINED:
            order = c.trained_step.desc(), c.skip_reason.desc(), row.desc()  # as the index has them
            query = query.where(_WAS_TRAINED).order_by(*order)
            if before:
                query = query.where(sa.tuple_(c.trained_step, row) < sa.tuple_(int(step), number))
        else:
            reason = None if verdict == "pending" else verdict
            query = query.where(
                c.trained_step.is_(None), c.skip_reason.is_not_distinct_from(reason)
            )
            query = query.order_by(row.desc())
            if before:
                query = query.where(row < number)
        found = self.db.fetch(query.limit(limit))
        return [
            {**call, "prompt": call["prompt"] // 4, "sampled": call["sampled"] // 4,
             "place": f"{call['trained_step'] or ''}.{call['row']}"}
            for call in found
        ]  # fmt: skip

    def continuity(self, run_id: str) -> list[PromptKinds]:
        """Count how the prompts of a run's rollouts began, those of canceled ones left out.

        Judged rollouts with equal counts are one item. Those under way are counted from their
        calls.
        """
        mine = sa.and_(t.rollouts.c.run_id == run_id, t.rollouts.c.state != RolloutState.CANCELLED)
        kept = t.rollouts.c.continuity
        groups = sa.select(kept, sa.func.count(), sa.func.min(t.rollouts.c.id)).where(mine)
        under_way = sa.select(t.calls.c.rollout_id, t.calls.c.choice, t.calls.c.params).where(
            t.calls.c.rollout_id == t.rollouts.c.id, mine, kept.is_(None), t.rollouts.c.attempts > 0
        )

        def work(c: sa.Connection) -> list[PromptKinds]:
            judged = c.execute(groups.where(kept.is_not(None)).group_by(kept)).all()
            live = _prompt_kinds((row[0], row[1], row[2]) for row in c.execute(under_way))
            return [
                *(PromptKinds(Counter(json.loads(row[0])), row[1], row[2]) for row in judged),
                *(PromptKinds(kinds, 1, rollout_id) for rollout_id, kinds in live.items()),
            ]

        return self.db.snapshot(work)

    def count_verdicts(
        self, c: sa.Connection, counts: Mapping[tuple[str | None, str], int]
    ) -> None:
        """Add to the counts of verdicts, in the transaction that gives them."""
        if rows := _rows(counts):
            c.execute(
                self.db.upsert(t.verdicts, add=("calls",)),
                [dict(zip(_COUNTED, row, strict=True)) for row in rows],
            )

    def _count_written(self, c: Any, calls: Mapping[str, tuple[str | None, str]]) -> None:
        """Count calls that are about to be written with a verdict, except those that have one.

        Args:
            c: the cursor of ``write_hot``.
            calls: run and verdict of each, by id.
        """
        rows = self.db.select_among(c, _VERDICTS_NOW, t.calls.c.id, calls)
        known = {row[0] for row in rows if (row[1], row[2]) != (None, None)}
        counts = Counter(verdict for call_id, verdict in calls.items() if call_id not in known)
        if added := _rows(counts):
            self.db.insert_rows(c, t.verdicts, _COUNTED, added, add=("calls",))


def _kept(c: sa.Connection, run_id: str) -> Accounting:
    verdicts = sa.select(t.verdicts.c.verdict, t.verdicts.c.calls)
    verdicts = verdicts.where(t.verdicts.c.run_id == run_id, t.verdicts.c.calls != 0)
    # The index ``calls_accounting`` leads to the few that have no verdict.
    pending = sa.select(sa.func.count()).where(t.calls.c.run_id == run_id, UNJUDGED)
    counts = {row[0]: row[1] for row in c.execute(verdicts)}
    return _accounting(c, run_id, counts, c.execute(pending).scalar_one())


def _accounting(
    c: sa.Connection, run_id: str, counts: Mapping[str, int], pending: int
) -> Accounting:
    proxied = sa.select(sa.func.sum(t.gateways.c.proxied)).where(t.gateways.c.run_id == run_id)
    skipped = {name: count for name, count in counts.items() if name != _TRAINED}
    return Accounting(
        proxied=c.execute(proxied).scalar() or 0,
        recorded=sum(counts.values()) + pending,
        trained=counts.get(_TRAINED, 0),
        skipped=skipped,
        pending=pending,
    )


def _prompt_kinds(calls: Iterable[tuple[str | None, int, Json]]) -> dict[str, Counter[str]]:
    """Count how prompts began, by rollout and kind, from rollout, choice and parameters of calls.

    ``continued``: with the exact tokens of an earlier call. The other kinds say why not, or
    (beside ``continued``) why not with the last reply; see
    ``agentrl_proxy.rendering.continuity.Branch``. Provider models' calls have no prompt here.
    """
    found: dict[str, Counter[str]] = {}
    for rollout_id, choice, params in calls:
        if rollout_id is not None and choice == 0 and params.get("continued") is not None:
            kinds = ("continued" if params["continued"] else None, params.get("branched"))
            counts = found.setdefault(rollout_id, Counter())
            counts.update(kind for kind in kinds if kind is not None)
    return found


def _rows(counts: Mapping[tuple[str | None, str], int]) -> list[tuple[str, str, int]]:
    """Return what is to be counted, in one order, so that two transactions never wait in a circle.

    Calls outside any run are not counted.
    """
    return sorted((key[0], key[1], count) for key, count in counts.items() if key[0] and count)
