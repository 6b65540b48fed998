"""Which records a step of a run trains on, by the run's settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_step_row import call

from agentrl.config import TrainConfig
from agentrl.step_records import StepRecords, adapter_rules
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose, Reward, SkipReason
from agentrl_tracer.store import Store


@pytest.mark.parametrize(("max_staleness", "dropped"), [(1, {0, 1}), (2, {0})])
def test_what_is_older_than_max_staleness_is_dropped(
    store: Store, max_staleness: int, dropped: set[int]
) -> None:
    """Step 4 trains version 3: what version v answered is 3 - v versions old."""
    run_id = store.create_run("run", "train", {})
    [task] = store.add_tasks(run_id, "train", [{}])
    new = [NewRollout(task, "group", Purpose.TRAIN, 4, i, seed=i, sampling={}) for i in range(4)]
    ids = store.enqueue(run_id, new)
    version_of: dict[str, int] = {}
    for version in range(4):
        claim = store.claim("runner", 60, run_id)
        assert claim is not None
        owner: dict[str, Any] = {
            "run_id": run_id,
            "rollout_id": claim.rollout_id,
            "attempt_id": claim.attempt_id,
        }
        one = replace(call([10 + version, 5]), adapter_version=version, **owner)
        store.write_calls("boot", [], [one], 1, wait=True)
        earned = float(version % 2)
        key = claim.attempt_id
        store.record_spans([], [Reward(key, claim.rollout_id, "reward", earned, key=key)])
        store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
        version_of[one.id] = version
    config = TrainConfig(
        agent="x:y",
        tasks=Path("tasks.jsonl"),
        adapter="policy",
        max_staleness=max_staleness,
        stale="drop",
    )
    records = StepRecords(config, store, adapter_rules(config), max_length=64)
    calls, batches = records.assemble(4, store.rollouts(run_id, ids=ids))
    assert len(calls) == 4
    whole = batches.whole()
    assert {version_of[name] for name in whole.skipped} == dropped
    assert set(whole.skipped.values()) == {SkipReason.STALE}
    assert {version_of[name] for name in whole.trained} == {0, 1, 2, 3} - dropped
