"""Runs and what belongs to a whole run: tasks, adapters, metrics, gateways."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import sqlalchemy as sa

from agentrl_tracer.schemas import AdapterVersion, CallState, Json, Policies, SkipReason
from agentrl_tracer.store import tables as t
from agentrl_tracer.store.database import Database
from agentrl_tracer.store.upsert import upsert


class RunStore:
    db: Database

    def create_run(
        self, name: str, kind: str, config: Json, policies: Policies | None = None
    ) -> str:
        """Registers a run; returns its id."""
        run_id = secrets.token_hex(4)
        with self.db.write() as c:
            c.execute(
                t.runs.insert().values(
                    id=run_id,
                    name=name,
                    kind=kind,
                    state="running",
                    config=config,
                    policies=asdict(policies or Policies()),
                    created_at=time.time(),
                )
            )
        return run_id

    def change_run(self, run_id: str, config: Json, policies: Policies) -> None:
        """Gives a run other settings and policies than it was registered with."""
        with self.db.write() as c:
            c.execute(
                t.runs.update()
                .where(t.runs.c.id == run_id)
                .values(config=config, policies=asdict(policies))
            )

    def end_run(self, run_id: str, state: str) -> None:
        """``state``: running (again) | finished | failed."""
        ended = None if state == "running" else time.time()
        with self.db.write() as c:
            c.execute(
                t.runs.update().where(t.runs.c.id == run_id).values(state=state, ended_at=ended)
            )

    def runs(self) -> list[Json]:
        with self.db.read() as c:
            rows = c.execute(sa.select(t.runs).order_by(t.runs.c.created_at)).mappings()
            return [dict(row) for row in rows]

    def add_tasks(self, run_id: str, split: str, data: Sequence[Json]) -> list[str]:
        """Stores the tasks of a split; idempotent for the same run. Returns their ids, in order."""
        rows = [
            {"id": f"{run_id}-{split}-{i}", "run_id": run_id, "split": split, "index": i, "data": d}
            for i, d in enumerate(data)
        ]
        if rows:
            with self.db.write() as c:
                c.execute(upsert(self.db, t.tasks, update=("data",)), rows)
        return [row["id"] for row in rows]

    def tasks(self, run_id: str, split: str) -> list[Json]:
        """The tasks of a split, in order; none if there is no such run."""
        with self.db.read() as c:
            query = sa.select(t.tasks.c.data).where(
                t.tasks.c.run_id == run_id, t.tasks.c.split == split
            )
            return list(c.execute(query.order_by(t.tasks.c.index)).scalars())

    def publish_adapter(self, run_id: str, name: str, version: int, path: str, step: int) -> None:
        """Makes a saved adapter version the one that samplers must use from now on."""
        row = AdapterVersion(run_id, name, version, path, step, time.time())
        with self.db.write() as c:
            c.execute(
                upsert(self.db, t.adapters, update=("path", "step", "created_at")), [asdict(row)]
            )

    def drop_adapters_after(self, run_id: str, step: int) -> None:
        """Forgets versions made after ``step``: a resumed run makes them again."""
        with self.db.write() as c:
            c.execute(
                t.adapters.delete().where(t.adapters.c.run_id == run_id, t.adapters.c.step > step)
            )

    def drop_metrics_after(self, run_id: str, step: int) -> None:
        """Forgets what was logged of later steps: a resumed run makes them again."""
        with self.db.write() as c:
            c.execute(
                t.metrics.delete().where(t.metrics.c.run_id == run_id, t.metrics.c.step > step)
            )

    def latest_adapters(self, run_id: str) -> list[AdapterVersion]:
        """The newest version of each adapter of the run."""
        with self.db.read() as c:
            rows = c.execute(
                sa.select(t.adapters)
                .where(t.adapters.c.run_id == run_id)
                .order_by(t.adapters.c.name, t.adapters.c.version)
            ).mappings()
            return list({row["name"]: AdapterVersion(**row) for row in rows}.values())

    def log_metrics(self, run_id: str, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        rows = [
            {"run_id": run_id, "step": step, "name": name, "value": float(value), "at": now}
            for name, value in values.items()
        ]
        if rows:
            with self.db.write() as c:
                c.execute(upsert(self.db, t.metrics, update=("value", "at")), rows)

    def metrics(self, run_id: str) -> dict[int, dict[str, float]]:
        """``{step: {name: value}}``, steps ascending."""
        found: dict[int, dict[str, float]] = {}
        with self.db.read() as c:
            query = sa.select(t.metrics).where(t.metrics.c.run_id == run_id)
            for row in c.execute(query.order_by(t.metrics.c.step)).mappings():
                found.setdefault(row["step"], {})[row["name"]] = row["value"]
        return found

    def register_gateway(self, boot_id: str, run_id: str | None, pid: int) -> int:
        """Announces a gateway process. Calls that an earlier one left open are lost: says how many.

        A run has one gateway at a time, so whatever an earlier boot had not finished never will be.
        """
        same_run = t.calls.c.run_id == run_id if run_id else t.calls.c.run_id.is_(None)
        with self.db.write() as c:
            c.execute(
                t.gateways.insert().values(
                    boot_id=boot_id, run_id=run_id, pid=pid, started_at=time.time(), proxied=0
                )
            )
            lost = c.execute(
                t.calls.update()
                .where(same_run, t.calls.c.state == CallState.OPEN, t.calls.c.gateway != boot_id)
                .values(
                    state=CallState.ERROR,
                    error="the gateway died before it answered",
                    skip_reason=sa.func.coalesce(t.calls.c.skip_reason, SkipReason.GATEWAY_LOST),
                )
            )
            return lost.rowcount

    def gateway_boots(self, run_id: str) -> list[str]:
        """Boot ids of the run's gateways, oldest first; the last one is alive, or was."""
        with self.db.read() as c:
            query = sa.select(t.gateways.c.boot_id).where(t.gateways.c.run_id == run_id)
            return list(c.execute(query.order_by(t.gateways.c.started_at)).scalars())
