"""What a step of a run trains on, and how, by the run's settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_records import make
from settings import nested
from store_records import record_spans

from agentrl.config.commands import TrainConfig
from agentrl.timing import PhaseTimer
from agentrl.training.loop import update
from agentrl.training.run import StepRecords
from agentrl_tracer.schemas import AttemptState, NewRollout, Purpose, Reward, SkipReason
from agentrl_tracer.store import Store
from agentrl_trainer.client import ServiceClient
from agentrl_trainer.data.batch_assembly import StepBatch
from agentrl_trainer.data.training_row import TrainingRow


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
        key = claim.attempt_id
        one = make(
            f"c{version}", [1], [10 + version, 5], adapter="policy", adapter_version=version,
            run_id=run_id, rollout_id=claim.rollout_id, attempt_id=key,
        )  # fmt: skip
        store.write_calls("boot", [], [one], 1, wait=True)
        earned = float(version % 2)
        record_spans(store, [], [Reward(key, claim.rollout_id, "reward", earned, key=key)])
        store.end_attempt(key, AttemptState.SUCCEEDED)
        version_of[one.id] = version
    config = TrainConfig(
        **nested(agent="x:y", tasks="tasks.jsonl", max_staleness=max_staleness, stale="drop")
    )
    records = StepRecords(config, store, max_length=64)
    calls, batches = records.assemble(4, store.rollouts(run_id, ids=ids))
    assert len(calls) == 4
    whole = batches.whole()
    assert {version_of[name] for name in whole.skipped} == dropped
    assert set(whole.skipped.values()) == {SkipReason.STALE}
    assert {version_of[name] for name in whole.trained} == {0, 1, 2, 3} - dropped


@pytest.mark.parametrize("bound", [0.0, 1e-3])
def test_max_grad_norm_reaches_the_optimizer(tmp_path: Path, bound: float) -> None:
    """AdamW's first momentum is a tenth of the gradient that it was given."""
    row = TrainingRow([5, 6, 7, 8], [False, True, True, True], [-1.0] * 4, [0.0, 1.0, -2.0, 1.0])
    config = TrainConfig(**nested(agent="x:y", tasks="tasks.jsonl", max_grad_norm=bound))
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client("agentrl-tiny", rank=4, seed=1)
        run: Any = SimpleNamespace(
            clients={"policy": client},
            config=config,
            learning_rate=lambda step: 1e-3,
            result=lambda asked: asked.result(),
        )
        [seen] = update(run, 1, "policy", StepBatch(rows=[row]), PhaseTimer())
        state = client.local(lambda learner: learner.state_dict()).result()
    momenta = [value for name, value in state.items() if name.startswith("exp_avg/")]
    given = torch.stack([value.norm() for value in momenta]).norm().item() / (1 - 0.9)
    assert seen.grad_norm is not None
    assert seen.grad_norm > 1e-2
    assert given == pytest.approx(bound or seen.grad_norm, rel=1e-4)
