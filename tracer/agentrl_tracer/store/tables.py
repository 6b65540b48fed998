"""Define the tables, as SQLAlchemy Core.

Tables of a record in ``schemas`` have its fields as columns. Token arrays are int32 blobs and
log-probs float32 blobs, 4 bytes a token, little-endian like every platform of PyTorch. A test
compares the tables with the migrations.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import sqlalchemy as sa

from agentrl_tracer.schemas import (
    AdapterVersion,
    Attempt,
    Call,
    Feedback,
    Json,
    Reward,
    Rollout,
    Span,
)

metadata = sa.MetaData()


class TokenIds(sa.TypeDecorator[list[int]]):
    """``list[int]`` as a little-endian int32 blob."""

    impl = sa.LargeBinary
    cache_ok = True
    typecode = "i"

    def process_bind_param(self, value: Sequence[float] | None, dialect: sa.Dialect):
        return None if value is None else array(self.typecode, value).tobytes()

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect):
        return None if value is None else array(self.typecode, value).tolist()


class Logprobs(TokenIds):
    """``list[float]`` as a little-endian float32 blob."""

    typecode = "f"
    cache_ok = True


_TYPES: dict[Any, Any] = {
    int: sa.Integer,
    float: sa.Float,
    Json: sa.JSON,
    list[Json]: sa.JSON,
    list[int]: TokenIds,
    list[float]: Logprobs,
}


def _columns(record: type, *key: str, **types: Any) -> list[sa.Column[Any]]:
    """Return a record's fields as columns; strings and enums are text, ``| None`` is nullable."""
    columns = []
    for name, hint in get_type_hints(record).items():
        kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
        kind = types.get(name) or _TYPES.get(kinds[0], sa.Text)
        nullable = type(None) in kinds
        columns.append(sa.Column(name, kind, primary_key=name in key, nullable=nullable))
    return columns


runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),  # train | eval | serve
    sa.Column("state", sa.Text, nullable=False),  # running | finished | failed
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("policies", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("heartbeat_at", sa.Float),  # when its trainer last said that it is alive
)

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("split", sa.Text, nullable=False),  # train | eval
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.UniqueConstraint("run_id", "split", "index"),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    *_columns(Rollout, "id", seed=sa.BigInteger),
    sa.Column("ordinal", sa.Integer, nullable=False, unique=True),  # the order of the queue
    sa.Column("sampling", sa.JSON, nullable=False),
    sa.Column("infrastructure_retries", sa.Integer, nullable=False),
    # How the prompts of its judged calls began: counts by kind as JSON text, which SQL can group.
    sa.Column("continuity", sa.Text),
    sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
    sa.ForeignKeyConstraint(["task_id"], ["tasks.id"]),
    sa.Index("rollouts_queue", "run_id", "state", "ordinal"),
    sa.Index("rollouts_step", "run_id", "step", "purpose"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    *_columns(Attempt, "id"),
    sa.Column("key_hash", sa.Text, nullable=False, unique=True),
    sa.Column("lease_expires_at", sa.Float, nullable=False),
    sa.Column("heartbeat_at", sa.Float, nullable=False),
    sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"]),
    sa.UniqueConstraint("rollout_id", "number"),
    sa.Index("attempts_leases", "state", "lease_expires_at"),
)

# calls, spans and rewards have no foreign keys: what arrived is kept, whatever it belongs to.
calls = sa.Table(
    "calls",
    metadata,
    *_columns(Call, "id"),
    sa.Column("gateway", sa.Text),
    sa.Index("calls_attempt", "attempt_id", "seq"),
    sa.Index("calls_rollout", "rollout_id"),
    sa.Index("calls_accounting", "run_id", "trained_step", "skip_reason"),
)
_served = calls.c.run_id.is_(None)
# Calls of ``agentrl serve`` in order of time; calls of runs do not pay for it. With run_id in it
# SQLite prefers it to ``calls_accounting``, after which it would have to sort.
sa.Index(
    "calls_served",
    calls.c.run_id,
    calls.c.started_at,
    calls.c.id,
    sqlite_where=_served,
    postgresql_where=_served,
)

# How many calls have each verdict, kept by the transactions that give verdicts: counting the calls
# themselves takes seconds at a million.
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("verdict", sa.Text, primary_key=True),  # "trained", or a skip reason
    sa.Column("calls", sa.Integer, nullable=False),
)

spans = sa.Table(
    "spans",
    metadata,
    *_columns(Span, "trace_id", "span_id", start_ns=sa.BigInteger, end_ns=sa.BigInteger),
    sa.Index("spans_attempt", "attempt_id"),
)

rewards = sa.Table(
    "rewards",
    metadata,
    *_columns(Reward, "attempt_id", "key"),
    sa.Index("rewards_rollout", "rollout_id"),
)

feedback = sa.Table(
    "feedback",
    metadata,
    *_columns(Feedback, "id"),
    sa.Index("feedback_run", "run_id"),
    sa.Index("feedback_rollout", "rollout_id"),
    sa.Index("feedback_call", "call_id"),
)

adapters = sa.Table("adapters", metadata, *_columns(AdapterVersion, "run_id", "name", "version"))

metrics = sa.Table(
    "metrics",
    metadata,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)

gateways = sa.Table(
    "gateways",
    metadata,
    # Begins with the gateway's number in its run and a dot, see runs.new_boot_id.
    sa.Column("boot_id", sa.Text, primary_key=True),
    sa.Column("run_id", sa.Text),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    # The gateway's count of accepted answers, kept apart from the recorded calls.
    sa.Column("proxied", sa.Integer, nullable=False),
)
