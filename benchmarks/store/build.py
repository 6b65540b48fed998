"""Build the store of a run with many calls, by bulk inserts; print its run's id.

Ten calls a rollout and 500 rollouts a step. A call has 600 + 64 tokens, a request of 1.5 KB and an
answer of 0.5 KB. The last step is rolled out and not judged: a trainer that is killed now resumes
after the step before it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from agentrl_tracer.schemas import (
    AttemptState,
    CallState,
    NewRollout,
    Policies,
    Purpose,
    RolloutState,
    SkipReason,
)
from agentrl_tracer.store import Store
from agentrl_tracer.store import tables as t

CALLS, ROLLOUTS = 10, 500  # a rollout, a step
_CHUNK = 2_000


def build(url: str, calls: int) -> str:
    """Fill an empty store; return the run's id."""
    store, steps = Store(url), max(calls // (CALLS * ROLLOUTS), 1)
    run_id = store.create_run("large", "train", {}, Policies())
    task_ids = store.add_tasks(run_id, "train", [{"n": i} for i in range(100)])
    store.register_gateway("boot", run_id, 1)
    for step in range(1, steps + 1):
        new = [
            NewRollout(task_ids[i % 100], f"g{step}-{i // 8}", Purpose.TRAIN, step, i % 8, i)
            for i in range(ROLLOUTS)
        ]
        ids = store.enqueue(run_id, new)
        with store.db.write() as c:
            c.execute(t.attempts.insert(), [_attempt(rollout_id) for rollout_id in ids])
        _insert(store, _calls(run_id, ids, step))
        with store.db.write() as c:
            rewards = [_reward(rollout_id, i) for i, rollout_id in enumerate(ids)]
            c.execute(t.rewards.insert(), rewards)
            mine = t.rollouts.c.run_id == run_id, t.rollouts.c.step == step
            ended = {"state": RolloutState.SUCCEEDED, "attempts": 1, "ended_at": time.time()}
            winner = "a" + t.rollouts.c.id
            c.execute(t.rollouts.update().where(*mine).values(winner=winner, **ended))
        if step < steps:
            _judge(store, run_id, ids, step)
            store.log_metrics(run_id, step, {"reward/mean": step / steps, "calls": 5000})
    with store.db.write() as c:
        c.execute(t.gateways.update().values(proxied=steps * ROLLOUTS * CALLS))
    if store.is_remote:  # as autovacuum does by the time that a run has made so many calls
        with store.db.engine.connect() as c:
            c.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE")
    store.close()
    return run_id


def _judge(store: Store, run_id: str, ids: list[str], step: int) -> None:
    """Three of four calls train."""
    names = [f"{rollout_id}-{i}" for rollout_id in ids for i in range(CALLS)]
    trained = {name: step for at, name in enumerate(names) if at % 4}
    skipped = dict.fromkeys(names[::4], SkipReason.ZERO_ADVANTAGE)
    if not hasattr(store, "verify"):  # an earlier version
        store.settle(trained=trained, skipped=skipped)
        return
    calls = store.calls(rollout_ids=ids, bodies=False)
    store.settle(trained=trained, skipped=skipped, calls=calls)


def _attempt(rollout_id: str) -> dict[str, Any]:
    return {
        "id": f"a{rollout_id}", "rollout_id": rollout_id, "number": 1, "runner": "r",
        "state": AttemptState.SUCCEEDED, "key_hash": rollout_id, "lease_expires_at": 0.0,
        "heartbeat_at": 0.0, "started_at": time.time(), "ended_at": time.time(),
    }  # fmt: skip


def _reward(rollout_id: str, i: int) -> dict[str, Any]:
    return {
        "attempt_id": f"a{rollout_id}", "rollout_id": rollout_id, "name": "reward", "key": "k",
        "value": float(i % 2), "created_at": time.time(),
    }  # fmt: skip


def _calls(run_id: str, ids: list[str], step: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(step)
    words = "".join(draw.choices("abcdefghij klmnopqrstuvwxyz", k=4000))
    for rollout_id in ids:
        for i in range(CALLS):
            at = draw.randrange(2000)
            began = {"continued": True} if i else {"continued": False, "branched": "first_call"}
            if i == 5 and draw.random() < 0.2:
                began = {"continued": True, "branched": "history_edited"}
            message = {"role": "user", "content": words[at : at + 1400]}
            answer = {"role": "assistant", "content": words[at : at + 400]}
            yield {
                "id": f"{rollout_id}-{i}", "response_id": f"{rollout_id}-{i}", "choice": 0,
                "run_id": run_id, "rollout_id": rollout_id, "attempt_id": f"a{rollout_id}",
                "seq": i, "agent": None, "model": "policy", "adapter": "policy",
                "adapter_version": step - 1, "state": CallState.COMPLETED,
                "prompt_ids": [draw.randrange(150_000)] * 600, "response_ids": list(range(64)),
                "response_logprobs": [-0.5] * 64, "finish_reason": "stop",
                "params": {"temperature": 1.0, "seed": i, **began},
                "request": {"model": "policy", "messages": [message]},
                "response": {"id": f"{rollout_id}-{i}", "choices": [{"message": answer}]},
                "started_at": time.time(), "ended_at": time.time(), "gateway": "boot",
            }  # fmt: skip


def _insert(store: Store, calls: Iterator[dict[str, Any]]) -> None:
    """Insert with the driver: SQLAlchemy takes three times as long."""
    rows = list(calls)
    names = tuple(rows[0])
    for at in range(0, len(rows), _CHUNK):
        with store.db.write_hot() as cursor:
            values = [tuple(row.values()) for row in rows[at : at + _CHUNK]]
            store.db.insert_rows(cursor, t.calls, names, values)


if __name__ == "__main__":
    began = time.perf_counter()
    run = build(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"run": run, "seconds": round(time.perf_counter() - began, 1)}))
