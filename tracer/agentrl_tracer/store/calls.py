"""Record calls, spans and rewards, and read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import (
    AttemptState,
    Call,
    CallState,
    Json,
    PastCall,
    Reward,
    SkipReason,
    Span,
)
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.rewards import RewardStore
from agentrl_tracer.store.statements import json_text
from agentrl_tracer.store.verdicts import VerdictStore

_CALL_COLUMNS = [t.calls.c[name] for name in Call.__dataclass_fields__]
# A verdict stands: a call judged while it was open keeps its verdict when it finishes.
_VERDICT = ("trained_step", "skip_reason")
_CALL_UPDATES = tuple(c.name for c in _CALL_COLUMNS if c.name not in ("id", *_VERDICT))
_WITHOUT_BODIES = [
    sa.null().label(c.name) if c.name in ("request", "response") else c for c in _CALL_COLUMNS
]
_MOST_SHOWN = 100_000
_SHORT_BODIES = [  # of a call with a larger body, None
    sa.case((sa.func.length(sa.cast(c, sa.Text)) <= _MOST_SHOWN, c), else_=sa.null()).label(c.name)
    if c.name in ("request", "response")
    else c
    for c in _CALL_COLUMNS
]
_IN_ORDER = attrgetter("attempt_id", "seq", "choice")

_ROW = (*(c.name for c in _CALL_COLUMNS), "gateway")
_values = attrgetter(*Call.__dataclass_fields__)
_ID, _RUN, _STATE, _SKIP_REASON = map(_ROW.index, ("id", "run_id", "state", "skip_reason"))
_TOKEN_BYTES = 4

# Statements of the hot path are built once: building one costs as much as executing it.
_SET_PROXIED = (
    t.gateways.update()
    .where(t.gateways.c.boot_id == sa.bindparam("boot"))
    .values(proxied=sa.bindparam("count"))
)
_STATES = sa.select(t.attempts.c.id, t.attempts.c.state)
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
_ONE_CALL = sa.select(*_CALL_COLUMNS).where(t.calls.c.id == sa.bindparam("id"))
_PROMPTS = sa.select(t.calls.c.seq, t.calls.c.prompt_ids).where(_OF_ATTEMPT)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Spans and rewards that arrived together, of one attempt or (None) of none."""

    attempt_id: str | None
    spans: Sequence[Span]
    rewards: Sequence[Reward] = ()


class CallStore(VerdictStore, RewardStore):
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
        judged = {row[_ID]: (row[_RUN], row[_SKIP_REASON]) for row in marks if row[_SKIP_REASON]}
        with self.db.write_hot(wait=wait) as c:
            states = self._attempt_states(c, {item.attempt_id for item in arrived} - {None})
            rows = list[list[Any]]()
            if finished:
                rows = [_finished_row(call, states, boot_id) for call in finished]
                judged |= {r[_ID]: (r[_RUN], r[_SKIP_REASON]) for r in rows if r[_SKIP_REASON]}
            if judged:
                self._count_written(c, judged)
            if marks:
                self.db.insert_rows(c, t.calls, _ROW, marks)
            if rows:
                self.db.insert_rows(c, t.calls, _ROW, rows, _CALL_UPDATES, _VERDICT)
            if opened or finished:
                count = self.db.compiled(_SET_PROXIED, ("boot", "count"))
                c.execute(count.sql, count.parameters((boot_id, proxied)))
            for item in arrived:
                if isinstance(item, Delivery) and _is_open(item, states):
                    self.db.insert_records(c, t.spans, item.spans)
                    self.db.insert_records(c, t.rewards, item.rewards)
        return states

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Keep what is said of attempts that are over; a span that is kept already stays."""
        with self.db.write_hot() as c:
            self.db.insert_records(c, t.spans, spans)

    def _attempt_states(self, c: Any, ids: Collection[Any]) -> dict[str, AttemptState]:
        """Return the states of the attempts that exist."""
        if not ids:
            return {}
        rows = self.db.select_among(c, _STATES, t.attempts.c.id, ids)
        return {attempt_id: AttemptState(state) for attempt_id, state in rows}

    def next_seq(self, attempt_id: str) -> int:
        last = self.db.look_up(_LAST_SEQ, attempt_id=attempt_id)
        return 0 if last is None else last + 1

    def spent(self, attempt_id: str) -> tuple[int, int]:
        """Return how many calls an attempt has made and how many tokens they used, with prompts."""
        rows = self.db.fetch_rows(_SIZES, {"attempt_id": attempt_id})
        tokens = 0
        counted: set[int] = set()
        for seq, params, prompt, response in rows:
            tokens += response // _TOKEN_BYTES
            if seq not in counted:  # choices that were sampled together share the prompt
                counted.add(seq)
                usage = params.get("usage") or {}  # provider models report usage, not ids
                tokens += prompt // _TOKEN_BYTES + (usage.get("total_tokens") or 0)
        return len(rows), tokens

    def call(self, call_id: str) -> Call | None:
        """Return one call; the first choice of a response has the response's id."""
        rows = self.db.fetch_rows(_ONE_CALL, {"id": call_id})
        return _call(rows[0]) if rows else None

    def same_requests(self, attempt_id: str, request: Json) -> list[PastCall]:
        """Return the attempt's calls with exactly this wire request, in order."""
        attempt = {"attempt_id": attempt_id}
        rows = self.db.fetch_rows(_SAME_REQUESTS, {**attempt, "request": json_text(request)})
        calls = [_call(row) for row in rows]
        later = [(row["seq"], row["prompt_ids"]) for row in self.db.fetch(_PROMPTS, attempt)]
        return [PastCall(call, any(_continues(call, *other) for other in later)) for call in calls]

    def mark_undelivered(self, attempt_id: str, request_ids: Collection[str]) -> None:
        """Cancel the attempt's completed calls whose requests did not get their answers."""

        def undelivered(row: Any) -> Json | None:
            if row.params.get("request_id", row.response_id) not in request_ids:
                return None
            done = row.state == CallState.COMPLETED
            return {**row.params, "undelivered": True} if done else None

        self._mark(attempt_id, CallState.CANCELLED, undelivered)

    def mark_delivered(self, attempt_id: str, response_id: str, request_id: str) -> None:
        """Assign an answer to the request that got it: a retry of the one that made it."""

        def delivered(row: Any) -> Json | None:
            done = row.state == CallState.COMPLETED or "undelivered" in row.params
            if row.response_id != response_id or not done:
                return None
            kept = {name: value for name, value in row.params.items() if name != "undelivered"}
            return {**kept, "request_id": request_id}

        self._mark(attempt_id, CallState.COMPLETED, delivered)

    def _mark(
        self, attempt_id: str, state: CallState, new_params: Callable[[Any], Json | None]
    ) -> None:
        """Change calls that have not been trained on, where ``new_params`` returns any."""
        columns = [t.calls.c[name] for name in ("id", "response_id", "state", "params")]
        query = sa.select(*columns).where(_OF_ATTEMPT, t.calls.c.trained_step.is_(None))

        def work(c: sa.Connection) -> None:
            for row in c.execute(query.with_for_update(), {"attempt_id": attempt_id}).all():
                if (params := new_params(row)) is not None:
                    mine = t.calls.c.id == row.id
                    c.execute(t.calls.update().where(mine).values(state=state, params=params))

        self.db.transact(work)

    def calls(
        self,
        *,
        rollout_ids: Collection[str] | None = None,
        attempt_ids: Collection[str] | None = None,
        bodies: bool = True,
    ) -> list[Call]:
        """Return calls of these rollouts or attempts, by attempt and order of acceptance.

        Args:
            bodies: False leaves ``request`` and ``response`` out (None).
        """
        query = sa.select(*(_CALL_COLUMNS if bodies else _WITHOUT_BODIES))
        if rollout_ids is not None:
            query = query.where(self.db.among(t.calls.c.rollout_id, rollout_ids))
        if attempt_ids is not None:
            query = query.where(self.db.among(t.calls.c.attempt_id, attempt_ids))
        # Sorted here: a database would copy the rows, tokens and all.
        return sorted((_call(row) for row in self.db.fetch_rows(query)), key=_IN_ORDER)

    def longest_calls(self, attempt_ids: Collection[str]) -> list[Call]:
        """Return the call of each attempt that has the most tokens, which holds the whole of the
        conversation; the last one among equals."""
        size = sa.func.length(t.calls.c.prompt_ids) + sa.func.length(t.calls.c.response_ids)
        columns = t.calls.c.attempt_id, size, t.calls.c.seq, t.calls.c.id
        query = sa.select(*columns).where(self.db.among(t.calls.c.attempt_id, attempt_ids))
        longest: dict[str, tuple[int, int, str]] = {}
        for attempt_id, *place in self.db.fetch_rows(query):
            longest[attempt_id] = max(longest.get(attempt_id, (-1, -1, "")), tuple(place))
        ids = [call_id for _, _, call_id in longest.values()]
        found = sa.select(*_CALL_COLUMNS).where(self.db.among(t.calls.c.id, ids))
        return [_call(row) for row in self.db.fetch_rows(found)]

    def calls_without_run(
        self,
        limit: int,
        *,
        before: tuple[float, str] | None = None,
        after: tuple[float, str] | None = None,
    ) -> list[Call]:
        """Return calls that belong to no run, newest first; bodies up to 100,000 characters.

        Args:
            before: start and id of a call: only those that came before it.
            after: the same the other way, oldest first.
        """
        place = sa.tuple_(t.calls.c.started_at, t.calls.c.id)
        query = sa.select(*_SHORT_BODIES).where(t.calls.c.run_id.is_(None)).limit(limit)
        if before is not None:
            query = query.where(place < before, t.calls.c.started_at <= before[0])
        if after is not None:
            query = query.where(place > after, t.calls.c.started_at >= after[0])
        # With run_id, which is always null here, PostgreSQL sees that the index has this order.
        order = (t.calls.c.run_id, t.calls.c.started_at, t.calls.c.id)
        query = query.order_by(*(order if after else (column.desc() for column in order)))
        return [_call(row) for row in self.db.fetch_rows(query)]

    def calls_by_id(self, ids: Collection[str]) -> list[Call]:
        """Return calls, newest first; bodies up to 100,000 characters."""
        query = sa.select(*_SHORT_BODIES).where(self.db.among(t.calls.c.id, ids))
        found = [_call(row) for row in self.db.fetch_rows(query)]
        return sorted(found, key=attrgetter("started_at", "id"), reverse=True)

    def count_calls_without_run(self) -> int:
        query = sa.select(sa.func.count()).where(t.calls.c.run_id.is_(None))
        return self.db.fetch_rows(query.select_from(t.calls))[0][0]

    def newest_calls(self, run_id: str | None, limit: int | None) -> list[Call]:
        """Return the newest calls of a run, or (None) those of no run, the newest first."""
        is_served = run_id is None
        order = sa.literal_column("rowid")
        if is_served or self.db.is_remote:
            order = t.calls.c.started_at
        # By an index of runs SQLite would sort all of the run's calls.
        of_run = t.calls.c.run_id.is_(None) if is_served else t.calls.c.run_id.concat("") == run_id
        query = sa.select(*_CALL_COLUMNS).where(of_run)
        return [_call(row) for row in self.db.fetch_rows(query.order_by(order.desc()).limit(limit))]

    def spans(self, rollout_id: str) -> list[Span]:
        """Return the rollout's spans in order of their start."""
        query = sa.select(t.spans).where(t.spans.c.rollout_id == rollout_id)
        return [Span(**row) for row in self.db.fetch(query.order_by(t.spans.c.start_ns))]


def _is_open(item: Call | Delivery, states: Mapping[str, AttemptState]) -> bool:
    """Whether the item's attempt runs, or it belongs to none."""
    return item.attempt_id is None or states.get(item.attempt_id) is AttemptState.RUNNING


def _finished_row(call: Call, states: Mapping[str, AttemptState], boot_id: str) -> list[Any]:
    row = [*_values(call), boot_id]
    if not _is_open(call, states):
        row[_SKIP_REASON] = SkipReason.LATE_CALL
    return row


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


def _call(row: Sequence[Any]) -> Call:
    values = list(row)
    values[_STATE] = CallState(values[_STATE])
    values[_SKIP_REASON] = values[_SKIP_REASON] and SkipReason(values[_SKIP_REASON])
    return Call(*values)
