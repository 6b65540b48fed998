"""Record calls, spans and rewards, judge calls, and keep the sum that must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
from agentrl_tracer.store.database import json_text
from agentrl_tracer.store.rewards import RewardStore

_CALL_COLUMNS = [t.calls.c[name] for name in Call.__dataclass_fields__]
# A verdict stands: a call judged while it was open keeps its verdict when it finishes.
_VERDICT = ("trained_step", "skip_reason")
_CALL_UPDATES = tuple(c.name for c in _CALL_COLUMNS if c.name not in ("id", *_VERDICT))
_UNJUDGED = sa.and_(t.calls.c.trained_step.is_(None), t.calls.c.skip_reason.is_(None))

_ROW = (*(c.name for c in _CALL_COLUMNS), "gateway")
_values = attrgetter(*Call.__dataclass_fields__)
_SKIP_REASON = _ROW.index("skip_reason")
_TOKEN_BYTES = 4

# Statements of the hot path are built once: building one costs as much as executing it.
_SET_PROXIED = (
    t.gateways.update()
    .where(t.gateways.c.boot_id == sa.bindparam("boot"))
    .values(proxied=sa.bindparam("count"))
)
_OF_ATTEMPT = t.calls.c.attempt_id == sa.bindparam("attempt_id")
_LAST_SEQ = sa.select(sa.func.max(t.calls.c.seq)).where(_OF_ATTEMPT)
# JSON is read in Python: PostgreSQL extracts nothing from a document that contains a NUL.
_SIZES = sa.select(
    t.calls.c.seq,
    t.calls.c.params,
    sa.func.length(t.calls.c.prompt_ids),
    sa.func.length(t.calls.c.response_ids),
).where(_OF_ATTEMPT)
# The request's text is compared, not a digest: a further index or column would cost every call,
# and only client retries after a restart need this.
_SAME_REQUESTS = (
    sa.select(*_CALL_COLUMNS)
    .where(_OF_ATTEMPT)
    .where(sa.cast(t.calls.c.request, sa.Text) == sa.bindparam("request", type_=sa.Text))
    .order_by(t.calls.c.seq, t.calls.c.choice)
)
_PROMPTS = sa.select(t.calls.c.seq, t.calls.c.prompt_ids).where(_OF_ATTEMPT)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Spans and rewards that arrived together, of one attempt or (None) of none."""

    attempt_id: str | None
    spans: Sequence[Span]
    rewards: Sequence[Reward] = ()


class CallStore(RewardStore):
    def write_calls(
        self,
        boot_id: str,
        opened: Sequence[Call],
        arrived: Sequence[Call | Delivery],
        proxied: int,
        *,
        wait: bool = True,
    ) -> dict[str, AttemptState]:
        """Commit open and finished calls, the gateway's count, spans and rewards together.

        A call that finishes after its attempt was sealed is kept as ``late_call``; spans and
        rewards that come after it are not kept; what is delivered twice is kept once. Returns the
        state of every attempt in ``arrived`` as of this transaction, by id.

        Args:
            arrived: finished calls, and deliveries of spans and rewards.
            wait: see ``Database.write_hot``.
        """
        finished = [item for item in arrived if isinstance(item, Call)]
        done = {call.id for call in finished}
        marks = [(*_values(call), boot_id) for call in opened if call.id not in done]
        with self.db.write_hot(wait=wait) as c:
            states = self._attempt_states(c, {item.attempt_id for item in arrived} - {None})
            if marks:
                self.db.insert_rows(c, t.calls, _ROW, marks)
            if finished:
                rows = [_finished_row(call, states, boot_id) for call in finished]
                self.db.insert_rows(c, t.calls, _ROW, rows, _CALL_UPDATES, _VERDICT)
            if opened or finished:
                count = self.db.compiled(_SET_PROXIED, ("boot", "count"))
                c.execute(count.sql, count.parameters((boot_id, proxied)))
            for item in arrived:
                if isinstance(item, Delivery) and _is_open(item, states):
                    self.db.insert_records(c, t.spans, item.spans)
                    self._add_rewards(c, item.rewards)
        return states

    def _attempt_states(self, c: Any, ids: Collection[Any]) -> dict[str, AttemptState]:
        """Return the states of the attempts that exist."""
        if not ids:
            return {}
        size = 1 << (len(ids) - 1).bit_length()  # one statement each for 1, 2, 4, 8, ...
        select = self.db.compiled(_select_states(size), [f"id{i}" for i in range(size)])
        c.execute(select.sql, select.parameters([*ids, *[None] * (size - len(ids))]))
        return {attempt_id: AttemptState(state) for attempt_id, state in c.fetchall()}

    def next_seq(self, attempt_id: str) -> int:
        last = self.db.look_up(_LAST_SEQ, attempt_id=attempt_id)
        return 0 if last is None else last + 1

    def spent(self, attempt_id: str) -> tuple[int, int]:
        """Return how many calls an attempt has made and how many tokens they used, with prompts."""
        with self.db.read() as c:
            rows = c.execute(_SIZES, {"attempt_id": attempt_id}).all()
        tokens = 0
        counted: set[int] = set()
        for seq, params, prompt, response in rows:
            tokens += response // _TOKEN_BYTES
            if seq not in counted:  # choices that were sampled together share the prompt
                counted.add(seq)
                usage = params.get("usage") or {}  # provider models report usage, not ids
                tokens += prompt // _TOKEN_BYTES + (usage.get("total_tokens") or 0)
        return len(rows), tokens

    def same_requests(self, attempt_id: str, request: Json) -> list[PastCall]:
        """Return the attempt's calls with exactly this wire request, in order."""
        attempt = {"attempt_id": attempt_id}
        rows = self.db.fetch(_SAME_REQUESTS, {**attempt, "request": json_text(request)})
        calls = [_call(row) for row in rows]
        later = [(row["seq"], row["prompt_ids"]) for row in self.db.fetch(_PROMPTS, attempt)]
        return [PastCall(call, any(_continues(call, *other) for other in later)) for call in calls]

    def calls(
        self,
        *,
        rollout_ids: Collection[str] | None = None,
        attempt_ids: Collection[str] | None = None,
    ) -> list[Call]:
        """Return calls of these rollouts or attempts, by attempt and order of acceptance."""
        query = sa.select(*_CALL_COLUMNS)
        if rollout_ids is not None:
            query = query.where(t.calls.c.rollout_id.in_(rollout_ids))
        if attempt_ids is not None:
            query = query.where(t.calls.c.attempt_id.in_(attempt_ids))
        query = query.order_by(t.calls.c.attempt_id, t.calls.c.seq, t.calls.c.choice)
        return [_call(row) for row in self.db.fetch(query)]

    def spans(self, rollout_id: str) -> list[Span]:
        """Return the rollout's spans in order of their start."""
        query = sa.select(t.spans).where(t.spans.c.rollout_id == rollout_id)
        return [Span(**row) for row in self.db.fetch(query.order_by(t.spans.c.start_ns))]

    def continuity(self, run_id: str) -> dict[str, Counter[str]]:
        """Count how the prompts of each rollout began, by rollout id and by kind.

        ``continued``: with the exact tokens of an earlier call. The other kinds say why not, or
        (beside ``continued``) why not with the last reply; see
        ``agentrl_proxy.rendering.continuity.Branch``. Provider models' calls have no prompt here.
        """
        query = sa.select(t.calls.c.rollout_id, t.calls.c.params).where(
            t.calls.c.run_id == run_id, t.calls.c.rollout_id.is_not(None), t.calls.c.choice == 0
        )
        found: dict[str, Counter[str]] = {}
        for row in self.db.fetch(query):
            params = row["params"]
            if params.get("continued") is not None:
                kinds = ("continued" if params["continued"] else None, params.get("branched"))
                counts = found.setdefault(row["rollout_id"], Counter())
                counts.update(kind for kind in kinds if kind is not None)
        return found

    def settle(self, *, trained: Mapping[str, int], skipped: Mapping[str, SkipReason]) -> None:
        """Give calls their verdict: the step that trained on them, or why none did.

        A call judged before keeps its first verdict.
        """
        judged = t.calls.update().where(t.calls.c.id == sa.bindparam("call_id"), _UNJUDGED)
        with self.db.write() as c:
            for column, verdicts in (("trained_step", trained), ("skip_reason", skipped)):
                if verdicts:
                    rows = [{"call_id": i, column: verdict} for i, verdict in verdicts.items()]
                    c.execute(judged, rows)

    def supersede(self, run_id: str, after_step: int) -> int:
        """Mark calls that a resumed run repeats as superseded; return their number.

        These are the calls that later steps trained on, calls without a verdict, and all calls of
        canceled rollouts.
        """
        canceled = sa.select(t.rollouts.c.id).where(
            t.rollouts.c.run_id == run_id, t.rollouts.c.state == RolloutState.CANCELLED
        )
        repeated = sa.or_(
            _UNJUDGED, t.calls.c.trained_step > after_step, t.calls.c.rollout_id.in_(canceled)
        )
        return self.db.execute(
            t.calls.update()
            .where(t.calls.c.run_id == run_id, repeated)
            .values(trained_step=None, skip_reason=SkipReason.SUPERSEDED)
        )

    def accounting(self, run_id: str) -> Accounting:
        """Return the run's sums, read in one transaction."""
        verdict = (t.calls.c.skip_reason, t.calls.c.trained_step.is_not(None))
        gateways = sa.select(sa.func.sum(t.gateways.c.proxied)).where(t.gateways.c.run_id == run_id)
        calls = sa.select(*verdict, sa.func.count()).where(t.calls.c.run_id == run_id)
        with self.db.write() as c:
            proxied = c.execute(gateways).scalar() or 0
            rows = c.execute(calls.group_by(*verdict)).all()
        counts: Counter[str | None] = Counter()
        for reason, was_trained, count in rows:
            counts["trained" if was_trained else reason] += count
        trained, pending = counts.pop("trained", 0), counts.pop(None, 0)
        skipped = {str(reason): count for reason, count in counts.items()}
        return Accounting(proxied, sum(row[2] for row in rows), trained, skipped, pending)


def _is_open(item: Call | Delivery, states: Mapping[str, AttemptState]) -> bool:
    """Whether the item's attempt runs, or it belongs to none."""
    return item.attempt_id is None or states.get(item.attempt_id) is AttemptState.RUNNING


def _finished_row(call: Call, states: Mapping[str, AttemptState], boot_id: str) -> list[Any]:
    row = [*_values(call), boot_id]
    if not _is_open(call, states):
        row[_SKIP_REASON] = SkipReason.LATE_CALL
    return row


@cache
def _select_states(size: int) -> sa.Select[Any, Any]:
    ids = [sa.bindparam(f"id{i}", type_=sa.Text) for i in range(size)]
    return sa.select(t.attempts.c.id, t.attempts.c.state).where(t.attempts.c.id.in_(ids))


def _continues(call: Call, seq: int, prompt: list[int]) -> bool:
    """Whether a later call's prompt begins with this call's prompt and response.

    The response's last token is left out: templates end turns in their own way.
    """
    start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids) - 1
    return (
        seq > call.seq
        and start < end <= len(prompt)
        and prompt[start:end] == call.response_ids[:-1]
        and prompt[:start] == call.prompt_ids
    )


def _call(row: Any) -> Call:
    reason = row["skip_reason"] and SkipReason(row["skip_reason"])
    return Call(**{**row, "state": CallState(row["state"]), "skip_reason": reason})
