"""Store runs and what belongs to a whole run: tasks, adapters, metrics, gateways."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from agentrl_tracer.schemas import AdapterVersion, CallState, Json, Policies, SkipReason
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.verdicts import UNJUDGED, VerdictStore

_LOST = "the gateway died before it answered"


def new_boot_id(number: int) -> str:
    """Return an id for the process of a run's gateway with this number."""
    return f"{number}.{secrets.token_hex(6)}"


def _number_of(boot_id: str) -> int:
    number = boot_id.partition(".")[0]
    return int(number) if number.isdecimal() else 0


class RunStore(VerdictStore):
    def create_run(
        self, name: str, kind: str, config: Json, policies: Policies | None = None
    ) -> str:
        """Register a run of kind train, eval or serve; return its id."""
        row: Json = {
            "id": secrets.token_hex(4),
            "name": name,
            "kind": kind,
            "state": "running",
            "config": config,
            "policies": asdict(policies or Policies()),
            "created_at": time.time(),
            "heartbeat_at": time.time(),
        }
        self.db.execute(self.db.upsert(t.runs), row)
        return row["id"]

    def resume_run(self, run_id: str, config: Json, policies: Policies) -> None:
        """Set a run to running again, with these settings and policies."""
        now, known = time.time(), asdict(policies)
        self._change(
            run_id, state="running", ended_at=None, config=config, heartbeat_at=now, policies=known
        )

    def announce_gateways(self, run_id: str, urls: Sequence[str]) -> None:
        """Keep the addresses of a run's gateways in its settings, as ``gateway.urls``."""
        [run] = [run for run in self.runs() if run["id"] == run_id]
        gateway = {**(run["config"].get("gateway") or {}), "urls": list(urls)}
        self._change(run_id, config=run["config"] | {"gateway": gateway})

    def beat(self, run_id: str) -> None:
        """Note that the process of a run is alive."""
        self._change(run_id, heartbeat_at=time.time())

    def end_run(self, run_id: str, state: str) -> None:
        """Set a run's state: finished, interrupted or failed."""
        self._change(run_id, state=state, ended_at=time.time())

    def _change(self, run_id: str, **values: Any) -> None:
        self.db.execute(t.runs.update().where(t.runs.c.id == run_id).values(**values))

    def runs(self) -> list[Json]:
        """Return all runs in order of creation."""
        return [dict(row) for row in self.db.fetch(sa.select(t.runs).order_by(t.runs.c.created_at))]

    def run(self, run_id: str) -> Json | None:
        """Return one run; None if there is no such run."""
        rows = self.db.fetch(sa.select(t.runs).where(t.runs.c.id == run_id))
        return dict(rows[0]) if rows else None

    def add_tasks(self, run_id: str, split: str, data: Sequence[Json]) -> list[str]:
        """Store the tasks of a split, idempotently; return their ids in order."""
        rows = [
            {"id": f"{run_id}-{split}-{i}", "run_id": run_id, "split": split, "index": i, "data": d}
            for i, d in enumerate(data)
        ]
        if rows:
            self.db.execute(self.db.upsert(t.tasks, update=("data",)), rows)
        return [row["id"] for row in rows]

    def tasks(self, run_id: str, split: str) -> list[Json]:
        """Return the tasks of a split in order; none if there is no such run."""
        query = sa.select(t.tasks.c.data).where(t.tasks.c.run_id == run_id)
        query = query.where(t.tasks.c.split == split)
        return [row["data"] for row in self.db.fetch(query.order_by(t.tasks.c.index))]

    def task(self, run_id: str, split: str, index: int) -> Json | None:
        """Return one task of a split; None if there is no such task."""
        own = t.tasks.c.run_id == run_id, t.tasks.c.split == split, t.tasks.c.index == index
        rows = self.db.fetch(sa.select(t.tasks.c.data).where(*own))
        return rows[0]["data"] if rows else None

    def publish_adapter(self, run_id: str, name: str, version: int, path: str, step: int) -> None:
        """Make a saved adapter version the one that samplers use from now on."""
        row = AdapterVersion(run_id, name, version, path, step, time.time())
        insert = self.db.upsert(t.adapters, update=("path", "step", "created_at"))
        self.db.execute(insert, [asdict(row)])

    def latest_adapters(self, run_id: str) -> list[AdapterVersion]:
        """Return the newest version of each adapter of the run."""
        query = sa.select(t.adapters).where(t.adapters.c.run_id == run_id)
        rows = self.db.fetch(query.order_by(t.adapters.c.name, t.adapters.c.version))
        return list({row["name"]: AdapterVersion(**row) for row in rows}.values())

    def drop_adapters_after(self, run_id: str, step: int) -> None:
        """Drop versions made after ``step``: a resumed run makes them again."""
        self._drop_after(t.adapters, run_id, step)

    def drop_metrics_after(self, run_id: str, step: int) -> None:
        """Drop metrics of steps after ``step``: a resumed run logs them again."""
        self._drop_after(t.metrics, run_id, step)

    def _drop_after(self, table: sa.Table, run_id: str, step: int) -> None:
        self.db.execute(table.delete().where(table.c.run_id == run_id, table.c.step > step))

    def log_metrics(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        rows = [
            {"run_id": run_id, "step": step, "name": name, "value": float(value), "at": now}
            for name, value in values.items()
        ]
        if rows:
            self.db.execute(self.db.upsert(t.metrics, update=("value", "at")), rows)

    def metrics(
        self, run_id: str, names: Collection[str] | None = None, *, every: int = 1, since: int = 0
    ) -> dict[int, dict[str, float]]:
        """Return ``{step: {name: value}}``, steps ascending.

        Args:
            names: leave others out.
            every: of the steps keep multiples of this, those with an evaluation, and the newest.
            since: the first step.
        """
        found: dict[int, dict[str, float]] = {}
        m = t.metrics.c
        query = sa.select(m.step, m.name, m.value).where(m.run_id == run_id, m.step >= since)
        if names is not None:
            query = query.where(self.db.among(m.name, names))
        if every > 1:
            rare = m.name.startswith("eval/"), m.name.contains("alert/")
            query = query.where(
                sa.or_(m.step % every == 0, m.step == self.last_step(run_id), *rare)
            )
        for step, name, value in self.db.fetch_rows(query.order_by(m.step)):
            found.setdefault(step, {})[name] = value
        return found

    def metric_sums(self, run_id: str, names: Collection[str]) -> dict[str, float]:
        """Return the sum of each metric over all steps."""
        m = t.metrics.c
        query = sa.select(m.name, sa.func.sum(m.value)).where(m.run_id == run_id)
        query = query.where(self.db.among(m.name, names)).group_by(m.name)
        return {row[0]: row[1] for row in self.db.fetch_rows(query)}

    def logged_at(self, run_id: str, name: str, last: int) -> dict[int, float]:
        """Return when a metric of the newest ``last`` steps was logged, steps ascending."""
        m = t.metrics.c
        newest = (self.last_step(run_id) or 0) - last
        query = sa.select(m.step, m.at).where(m.run_id == run_id, m.name == name, m.step > newest)
        return {row[0]: row[1] for row in self.db.fetch_rows(query.order_by(m.step))}

    def last_step(self, run_id: str | None) -> int | None:
        """Return the newest step that has metrics."""
        query = sa.select(sa.func.max(t.metrics.c.step)).where(t.metrics.c.run_id == run_id)
        return self.db.fetch_rows(query)[0][0]

    def register_gateway(
        self, boot_id: str, run_id: str | None, pid: int, *, gateways: int = 1
    ) -> int:
        """Register a gateway process; return how many calls its predecessors left open.

        A run has one process of each number at a time, so calls that an earlier boot of the same
        number left open are lost. Before the run was resumed, it may have had more gateways: number
        ``n`` was followed by ``n`` modulo ``gateways``.

        Args:
            boot_id: a new one, see ``new_boot_id``.
            gateways: how many the run has.
        """
        row = {"boot_id": boot_id, "run_id": run_id, "pid": pid, "proxied": 0}
        g = t.gateways.c
        boots = sa.select(g.boot_id).where(g.run_id.is_not_distinct_from(run_id))
        before = [
            boot for [boot] in self.db.fetch_rows(boots)
            if _number_of(boot) % gateways == _number_of(boot_id) % gateways and boot != boot_id
        ]  # fmt: skip
        of_predecessor = self.db.among(t.calls.c.gateway, before)
        left_open = (t.calls.c.state == CallState.OPEN, of_predecessor)
        # Calls without a verdict, by an index. One that was judged while it was open is of one of
        # the last steps.
        newest = sa.select(sa.func.max(t.rollouts.c.step)).where(t.rollouts.c.run_id == run_id)
        recent = sa.select(t.rollouts.c.id).where(
            t.rollouts.c.run_id == run_id, t.rollouts.c.step >= newest.scalar_subquery() - 1
        )
        places = (
            [sa.and_(t.calls.c.run_id == run_id, UNJUDGED), t.calls.c.rollout_id.in_(recent)]
            if run_id
            else [t.calls.c.run_id.is_(None)]
        )

        def work(c: sa.Connection) -> int:
            c.execute(self.db.upsert(t.gateways), {**row, "started_at": time.time()})
            calls = [sa.select(t.calls.c.id, t.calls.c.skip_reason).where(p) for p in places]
            found = {
                call_id: reason
                for query in calls
                for call_id, reason in c.execute(query.where(*left_open).with_for_update())
            }
            lost = t.calls.update().where(self.db.among(t.calls.c.id, found))
            reason = sa.func.coalesce(t.calls.c.skip_reason, SkipReason.GATEWAY_LOST)
            c.execute(lost.values(state=CallState.ERROR, error=_LOST, skip_reason=reason))
            new = sum(reason is None for reason in found.values())
            self.count_verdicts(c, {(run_id, SkipReason.GATEWAY_LOST): new})
            return len(found)

        return self.db.transact(work)
