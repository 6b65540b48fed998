"""``kill -9`` at named moments: a resumed run learns what it would have, to the last bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented_metrics import undocumented
from test_train import SUPPORT, Run

from agentrl_tracer.schemas import Purpose, RolloutState


def killed(run: Run, moment: str, step: int, *more: str) -> None:
    """Runs, or goes on, until it kills itself there."""
    first = not run.folder.run_id.exists()
    arguments = run.argv[3:] if first else ["train", "--resume", str(run.folder.root)]
    arguments += more
    process = subprocess.run(
        [sys.executable, str(SUPPORT / "killed_at.py"), moment, str(step), *arguments],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr


def weights(run: Run) -> dict[str, bytes]:
    return {
        str(path.relative_to(run.folder.adapter)): path.read_bytes()
        for path in sorted(run.folder.adapter.rglob("*.safetensors"))
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("agent", "settings", "moments"),
    [
        pytest.param(
            "two_models",
            {"adapters": "asker,answerer", "estimator": "gae", "loss": "ppo", "epochs": 2},
            ["rollouts", "optimizer", "writing", "publishing"],
            id="gae, two adapters",
        ),
        pytest.param(
            "dull",
            {"resample_zero_variance": 2},
            ["rollouts", "publishing"],
            id="zero variance resampled",
        ),
    ],
)
def test_a_run_killed_at_every_moment_is_the_run(
    tmp_path: Path, agent: str, settings: dict[str, Any], moments: list[str]
) -> None:
    """One runner, synchronous. One moment a step, one after the other, in the same run."""
    settings = {
        "runners": 1, "steps": len(moments), "seed": 5, "eval_every": 9, "batch_size": 2,
        "group_size": 3, "lease": 5,
    } | settings  # fmt: skip
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = Run(tmp_path / "whole", agent, **settings).finish()
    run = Run(tmp_path / "killed", agent, **settings)
    for step, moment in enumerate(moments, start=1):
        killed(run, moment, step)
        saved = (run.folder.checkpoints / f"step-{step:08d}").exists()
        assert saved == (moment == "publishing")
    run.resume()

    assert run.curve() == whole.curve()
    assert [row["step"] for row in run.curve() if "reward/mean" in row] == [
        *range(1, len(moments) + 1)
    ]
    assert weights(run) == weights(whole)
    assert len(weights(run)) == len(settings.get("adapters", "one").split(","))
    for one in (run, whole):
        assert one.accounting().adds_up
        assert one.accounting().pending == 0
    assert run.accounting().trained == whole.accounting().trained
    assert undocumented(whole.folder.read_metrics(), ["asker", "answerer"]) == {}
    if agent == "dull":
        assert sum(row.get("groups/resampled", 0) for row in whole.curve()) > 0
        assert all(row.get("groups/used", 2) == 2 for row in whole.curve())


@pytest.mark.timeout(600)
def test_an_evaluation_is_made_and_counted_once(tmp_path: Path) -> None:
    """Killed in the middle of one, and after one; TensorBoard is asked as well."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = {
        "runners": 1, "steps": 2, "seed": 3, "eval_every": 1, "batch_size": 2, "group_size": 3,
        "lease": 5, "trackers": "tensorboard",
    }  # fmt: skip
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = Run(tmp_path / "whole", "mixed", **settings).finish()
    run = Run(tmp_path / "killed", "mixed", **settings)
    killed(run, "evaluating", 1)
    assert len(run.folder.read_metrics()) == 2  # before training, and step 1
    killed(run, "rollouts", 2)
    before = run.store()
    measured = before.rollouts(run.run_id, step=1, purpose=Purpose.EVAL)
    run.resume()

    assert run.curve() == whole.curve()
    assert weights(run) == weights(whole)
    after = run.store()
    states = [r.state for r in after.rollouts(run.run_id, step=1, purpose=Purpose.EVAL)]
    # Once in vain, once to the end, and not once more after that.
    assert states == [r.state for r in measured]
    assert states.count(RolloutState.SUCCEEDED) == states.count(RolloutState.CANCELLED) == 2
    outcomes = after.outcomes(run.run_id, purpose=Purpose.EVAL)  # what `runs show` shows
    assert outcomes.attempts == {"succeeded": 3 * 2}
    skipped = {**run.accounting().skipped}
    assert skipped.pop("superseded") > 0
    assert skipped == whole.accounting().skipped
    rows = after.metrics(run.run_id)
    before.close()
    after.close()
    for one in run.folder.read_metrics():
        names = {"seconds/evaluation"}
        if "reward/mean" in one:
            names = {f"seconds/{part}" for part in ("forward_backward", "checkpoint", "publish")}
            assert one["seconds/forward_backward"] < one["seconds/update"]
        assert names <= one.keys()
        assert names <= rows[one["step"]].keys()
    events = accumulator.EventAccumulator(str(run.folder.root / "tensorboard"))
    events.Reload()
    for name, steps in (("reward/mean", [1, 2]), ("eval/accuracy", [0, 1, 2])):
        assert [event.step for event in events.Scalars(name)] == steps
    assert {f"seconds/{part}" for part in ("optimizer", "publish")} <= {*events.Tags()["scalars"]}
    assert undocumented(run.folder.read_metrics()) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stale", "moment"), [("correct", "optimizer"), ("wait", "publishing")])
def test_an_asynchronous_run_that_is_killed_trains_nothing_twice(
    tmp_path: Path, stale: str, moment: str
) -> None:
    settings = {
        "runners": 2, "steps": 4, "batch_size": 2, "group_size": 3, "eval_every": 4, "lease": 5,
        "max_staleness": 1, "stale": stale,
    }  # fmt: skip
    run = Run(tmp_path, "slow", **settings)
    killed(run, moment, 3)
    run.resume()

    rows = [row for row in run.folder.read_metrics() if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["staleness/max"] == 0
    assert rows[1]["staleness/max"] == 1  # while step 1 learned, their first calls were made
    assert 0 < rows[1]["staleness/share"] <= 1
    assert [row["groups/ahead"] for row in rows] == [2, 2, 2, 0]
    assert rows[1]["seconds/overlapped"] > 0
    if stale == "wait":
        assert all(row["staleness/max"] <= 1 and row["staleness/beyond"] == 0 for row in rows)
    else:
        assert "correction/weight" in rows[1]  # truncated importance weights
    assert undocumented(rows) == {}
    accounting = run.accounting()
    assert accounting.adds_up
    assert accounting.pending == 0
    assert accounting.skipped["superseded"] > 0  # what was under way when it died

    store = run.store()
    trained: dict[tuple[str, int], set[str | None]] = {}
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
    store.close()
    assert {len(attempts) for attempts in trained.values()} == {1}
    assert {group for group, _ in trained} <= {
        f"train-{s}-{p}" for s in range(1, 5) for p in (0, 1)
    }
