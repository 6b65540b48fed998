"""Killed at named moments, a resumed run learns what it would have, to the last bit."""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from documented_metrics import undocumented
from training_run import Run

from agentrl.runs import token_records
from agentrl.runs.best_adapter import best_step
from agentrl.runs.recorded import state_of
from agentrl_tracer.schemas import Purpose, RolloutState

pytestmark = pytest.mark.timeout(600)

SYNCHRONOUS: dict[str, Any] = {
    "runners": 1, "steps": 2, "seed": 5, "batch_size": 2, "group_size": 3, "lease": 5,
}  # fmt: skip


def best_weights(run: Run) -> bytes:
    """Return the best adapter, which is a copy of its version."""
    held_out = {row["step"]: row["eval/accuracy"] for row in run.curve() if "eval/accuracy" in row}
    version = run.folder.adapter_version("policy", best_step(held_out) or 0)
    files = [path / "adapter_model.safetensors" for path in (run.folder.best_adapter, version)]
    assert files[0].read_bytes() == files[1].read_bytes()
    return files[0].read_bytes()


def killed_and_whole(
    folder: Path, agent: str, moments: list[tuple[str, int, int]], **settings: Any
) -> tuple[Run, Run]:
    """Make a run that is killed at each moment in turn, and one that is not; compare them."""
    whole = Run(folder / "whole", agent, **SYNCHRONOUS | settings).finish()
    run = Run(folder / "killed", agent, **SYNCHRONOUS | settings)
    for moment, step, by in moments:
        run.kill_at(moment, step, by)
        with run.store() as store:
            [row] = store.runs()
        # A process that was killed could not say so; its lock on the folder tells.
        assert row["state"] == ("running" if by == SIGKILL else "interrupted"), run.output
        assert state_of(run.folder, row) == "interrupted"
        saved = (run.folder.checkpoints / f"step-{step:08d}").exists()
        assert saved == (moment in ("publishing", "evaluating"))
    run.finish()

    assert "has lost its last writes" not in run.output  # it knew every checkpoint
    assert run.curve() == whole.curve()
    assert [row["step"] for row in run.steps()] == [1, 2]
    assert run.weights() == whole.weights()
    assert run.accounting().trained == whole.accounting().trained
    of_killed, of_whole = (check_tokens(each) for each in (run, whole))
    assert of_killed == of_whole
    return run, whole


def check_tokens(run: Run) -> dict[str, list[float]]:
    """Compare what a run keeps of its tokens with what its learner reported and its store has."""
    found: dict[str, list[float]] = {"trainer": [], "advantage": []}
    calls = {call.id: call for call in run.calls()}
    several = len({call.adapter for call in calls.values()}) > 1
    for row in run.steps():
        step = row["step"]
        ids = [call.id for call in calls.values() if call.trained_step == step]
        assert sorted(ids) == sorted(_ids(run, step))
        for adapter in sorted({str(calls[name].adapter) for name in ids}):
            seen: dict[str, list[float]] = {"trainer": [], "advantage": [], "sampler": []}
            for call in (calls[name] for name in _ids(run, step)):
                one = token_records.read_call(run.folder, call)
                assert one is not None
                assert len(one.trainer) == len(one.advantage) == len(call.response_ids)
                if call.adapter == adapter:
                    seen["trainer"] += one.trainer.tolist()
                    seen["advantage"] += one.advantage.tolist()
                    kept = call.response_logprobs if one.sampler is None else one.sampler.tolist()
                    seen["sampler"] += kept
            said = {k: row[f"{adapter}/{k}" if several else k] for k in _REPORTED}
            assert len(seen["trainer"]) == said["tokens/trained"]
            assert -fmean(seen["trainer"]) == pytest.approx(said["entropy"], rel=1e-5)
            assert max(seen["advantage"]) == pytest.approx(said["advantage/max"], rel=1e-6)
            assert min(seen["advantage"]) == pytest.approx(said["advantage/min"], rel=1e-6)
            pairs = zip(seen["trainer"], seen["sampler"], strict=True)
            apart = fmean(abs(one - other) for one, other in pairs)
            assert apart == pytest.approx(said["sampler_trainer/mean_logprob_difference"], rel=1e-2)
            for name in found:
                found[name] += seen[name]
    return found


_REPORTED = (
    "tokens/trained", "entropy", "advantage/max", "advantage/min",
    "sampler_trainer/mean_logprob_difference",
)  # fmt: skip


def _ids(run: Run, step: int) -> list[str]:
    with np.load(run.folder.tokens / f"{step:06d}.npz") as file:
        return [name.decode() for name in file["calls"]]


@pytest.mark.kills
def test_two_adapters_with_a_value_function_are_killed_while_they_learn(tmp_path: Path) -> None:
    run, _ = killed_and_whole(
        tmp_path,
        "two_models",
        [("optimizer", 1, SIGINT), ("writing", 2, SIGKILL)],
        adapters="asker,answerer",
        estimator="gae",
        loss="ppo",
        epochs=2,
        eval_every=9,
    )
    assert len(run.weights()) == 2
    assert undocumented(run.folder.read_metrics(), ["asker", "answerer"]) == {}


@pytest.mark.kills
@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_run_with_two_trainers_is_killed_while_they_learn(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_LEARNING__SHARD_BASE", shard)
    moments = [("optimizer", 1, SIGKILL), ("writing", 2, SIGKILL)]
    killed_and_whole(tmp_path, "mixed", moments, trainers=2)


@pytest.mark.kills
def test_a_run_with_evaluations_and_resampling_is_killed_around_them(tmp_path: Path) -> None:
    """An evaluation is made and counted once, in TensorBoard, too."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, whole = killed_and_whole(
        tmp_path,
        "dull",
        [("evaluating", 1, SIGKILL), ("rollouts", 2, SIGTERM), ("publishing", 2, SIGKILL)],
        resample_zero_variance=2,
        eval_every=1,
        trackers="tensorboard",
    )
    assert "passed over" not in run.output  # step 2 is not made again
    assert sum(row.get("groups/resampled", 0) for row in whole.curve()) > 0
    assert all(row.get("groups/used", 2) == 2 for row in whole.curve())
    with run.store() as store:
        evaluated = store.rollouts(run.run_id, step=1, purpose=Purpose.EVAL)
        outcomes = store.outcomes(run.run_id, purpose=Purpose.EVAL)  # what `runs show` shows
        rows = store.metrics(run.run_id)
    # Once in vain, once to the end, and not once more after that.
    assert best_weights(run) == best_weights(whole)
    states = [rollout.state for rollout in evaluated]
    assert states.count(RolloutState.SUCCEEDED) == states.count(RolloutState.CANCELLED) == 2
    assert outcomes.attempts == {"succeeded": 3 * 2}
    skipped = {**run.accounting().skipped}
    assert skipped.pop("superseded") > 0
    assert skipped == whole.accounting().skipped
    # The row of step 2 comes from its checkpoint: what came after was never measured.
    parts = {1: {"forward_backward", "checkpoint", "publish"}, 2: {"forward_backward"}}
    for row in run.steps():
        names = {f"seconds/{part}" for part in parts[row["step"]]}
        assert names <= row.keys()
        assert names <= rows[row["step"]].keys()
        assert row["seconds/forward_backward"] < row["seconds/update"]
    events = accumulator.EventAccumulator(str(run.folder.root / "tensorboard"))
    events.Reload()
    for name, steps in (("reward/mean", [1, 2]), ("eval/accuracy", [0, 1, 2])):
        assert [event.step for event in events.Scalars(name)] == steps
    assert undocumented(run.folder.read_metrics()) == {}


def test_an_asynchronous_run_that_is_killed_trains_nothing_twice(tmp_path: Path) -> None:
    run = Run(
        tmp_path, "slow", steps=4, batch_size=2, group_size=3, eval_every=4, lease=5,
        max_staleness=1,
    )  # fmt: skip
    run.kill_at("publishing", 3)
    with run.store() as store:  # as after a machine's death: the last writes are lost
        store.drop_metrics_after(run.run_id, 2)
    run.cores, run.changes = 2, ["--model.cores", "2"]
    run.finish(run.start(cwd=tmp_path.parent))
    said = "step 2 was computed with model.cores 1, the next ones with 2: "
    assert said in " ".join(run.output.split())
    assert "it knows the run up to step 2; later steps are made again" in run.output
    assert "checkpoint step-00000003 was passed over: its run's records end at step 2" in run.output

    rows = run.steps()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["staleness/max"] == 0
    assert rows[1]["staleness/max"] == 1  # while step 1 learned, their first calls were made
    assert 0 < rows[1]["staleness/share"] <= 1
    assert all(row["staleness/max"] <= 1 and row["staleness/beyond"] == 0 for row in rows)
    assert [row["groups/ahead"] for row in rows] == [2, 2, 2, 0]
    assert rows[1]["seconds/overlapped"] > 0
    assert "correction/weight" in rows[1]  # truncated importance weights
    assert undocumented(rows) == {}
    assert run.accounting().skipped["superseded"] > 0  # what was under way when it died

    trained: dict[tuple[str, int], set[str | None]] = {}
    with run.store() as store:
        for rollout in store.rollouts(run.run_id, purpose=Purpose.TRAIN):
            calls = store.calls(rollout_ids=[rollout.id])
            assert {c.trained_step for c in calls if c.trained_step} <= {rollout.step}
            for call in calls:
                if call.trained_step is not None:
                    assert rollout.state is RolloutState.SUCCEEDED
                    assert call.adapter_version is not None
                    assert call.adapter_version < call.trained_step
                    place = (rollout.group_id, rollout.index)
                    trained.setdefault(place, set()).add(call.attempt_id)
    assert {len(attempts) for attempts in trained.values()} == {1}
    assert {group for group, _ in trained} <= {
        f"train-{step}-{position}" for step in range(1, 5) for position in (0, 1)
    }
