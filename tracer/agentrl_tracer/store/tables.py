"""The tables, as SQLAlchemy Core. The migrations create them; a test holds the two together.

Token arrays are little-endian int32 blobs, log-probs float32 blobs: 4 bytes a token, no JSON lists.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import sqlalchemy as sa

metadata = sa.MetaData()


class TokenIds(sa.TypeDecorator[list[int]]):
    """``list[int]`` ↔ little-endian int32 blob."""

    impl = sa.LargeBinary
    cache_ok = True
    typecode = "i"

    def process_bind_param(self, value: Sequence[float] | None, dialect: sa.Dialect):
        if value is None:
            return None
        packed = array(self.typecode, value)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect):
        if value is None:
            return None
        unpacked = array(self.typecode)
        unpacked.frombytes(value)
        if sys.byteorder == "big":
            unpacked.byteswap()
        return unpacked.tolist()


class Logprobs(TokenIds):
    """``list[float]`` ↔ little-endian float32 blob."""

    typecode = "f"
    cache_ok = True


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
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("ordinal", sa.Integer, nullable=False, unique=True),  # the order of the queue
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("task_id", sa.Text, sa.ForeignKey("tasks.id"), nullable=False),
    sa.Column("group_id", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("sampling", sa.JSON, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("infrastructure_retries", sa.Integer, nullable=False),
    sa.Column("winner", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Index("rollouts_queue", "state", "ordinal"),
    sa.Index("rollouts_step", "run_id", "step", "purpose"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, sa.ForeignKey("rollouts.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("key_hash", sa.Text, nullable=False, unique=True),
    sa.Column("runner", sa.Text, nullable=False),
    sa.Column("lease_expires_at", sa.Float, nullable=False),
    sa.Column("heartbeat_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("error", sa.Text),
    sa.Column("log", sa.Text),
    sa.UniqueConstraint("rollout_id", "number"),
    sa.Index("attempts_leases", "state", "lease_expires_at"),
)

# calls, spans and rewards carry no foreign keys: what arrived is kept, whatever it belongs to.
calls = sa.Table(
    "calls",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("response_id", sa.Text, nullable=False),
    sa.Column("choice", sa.Integer, nullable=False),
    sa.Column("run_id", sa.Text),
    sa.Column("rollout_id", sa.Text),
    sa.Column("attempt_id", sa.Text),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("adapter", sa.Text),
    sa.Column("adapter_version", sa.Integer),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("prompt_ids", TokenIds, nullable=False),
    sa.Column("response_ids", TokenIds, nullable=False),
    sa.Column("response_logprobs", Logprobs, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("params", sa.JSON, nullable=False),
    sa.Column("request", sa.JSON),
    sa.Column("response", sa.JSON),
    sa.Column("error", sa.Text),
    sa.Column("trace_id", sa.Text),
    sa.Column("span_id", sa.Text),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("trained_step", sa.Integer),
    sa.Column("skip_reason", sa.Text),
    sa.Column("gateway", sa.Text),
    sa.Index("calls_attempt", "attempt_id", "seq"),
    sa.Index("calls_rollout", "rollout_id"),
    sa.Index("calls_accounting", "run_id", "trained_step", "skip_reason"),
)

spans = sa.Table(
    "spans",
    metadata,
    sa.Column("trace_id", sa.Text, primary_key=True),
    sa.Column("span_id", sa.Text, primary_key=True),
    sa.Column("parent_span_id", sa.Text),
    sa.Column("rollout_id", sa.Text),
    sa.Column("attempt_id", sa.Text),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("start_ns", sa.BigInteger, nullable=False),
    sa.Column("end_ns", sa.BigInteger, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("attributes", sa.JSON, nullable=False),
    sa.Column("events", sa.JSON, nullable=False),
    sa.Column("resource", sa.JSON, nullable=False),
    sa.Index("spans_attempt", "attempt_id"),
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("attempt_id", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("rollout_id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("span_id", sa.Text),
    sa.Column("response_id", sa.Text),
    sa.Column("explanation", sa.Text),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("rewards_rollout", "rollout_id"),
)

adapters = sa.Table(
    "adapters",
    metadata,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)

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
    sa.Column("boot_id", sa.Text, primary_key=True),
    sa.Column("run_id", sa.Text),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    # The gateway's own count of accepted answers: the independent side of the accounting.
    sa.Column("proxied", sa.Integer, nullable=False),
)
