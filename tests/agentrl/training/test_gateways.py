"""``--gateways 2``: both answer, and one that is killed is no loss."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from training_run import hello, wait_for

from agentrl_tracer.schemas import CallState
from agentrl_tracer.store import Store

BOOTS = sa.text("SELECT boot_id, pid FROM gateways WHERE run_id = :run ORDER BY started_at")
GATEWAYS = sa.text("SELECT id, gateway, state FROM calls WHERE run_id = :run")


def test_hello_is_learned_though_a_gateway_is_killed(tmp_path: Path, postgres: str) -> None:
    run = hello(tmp_path, store=postgres, gateways=2, samplers=2, trainers=2)
    process = run.start()
    with closing(Store(postgres)) as store:
        wait_for(run.steps, process, 120)
        [(killed, pid)] = [
            row for row in store.db.fetch_rows(BOOTS, {"run": run.run_id}) if row[0][0] == "1"
        ]
        os.kill(pid, signal.SIGKILL)
        run.finish(process)
        accounting = store.verify(run.run_id).kept
        boots = [boot for boot, _ in store.db.fetch_rows(BOOTS, {"run": run.run_id})]
        calls = store.db.fetch_rows(GATEWAYS, {"run": run.run_id})
    assert accounting.adds_up
    assert accounting.pending == 0
    assert sorted(boot[:2] for boot in boots) == ["0.", "1.", "1."]
    assert boots[-1][0] == "1"
    assert {boot for _, boot, state in calls if state != CallState.COMPLETED} <= {killed}
    answered = Counter(boot[0] for _, boot, _ in calls)
    assert min(answered["0"], answered["1"]) > len(calls) / 4
    assert run.folder.read_metrics()[-1]["eval/accuracy"] == 1.0
