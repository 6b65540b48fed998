"""Whole sweeps: killed and continued, pruned, ended in order, repeated with seeds."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tomllib
from pathlib import Path

import pytest
from fake_gateway import until
from sweeps import SmallSweep
from training_run import wait_for

from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store, state_of

pytestmark = pytest.mark.timeout(900)


def steps_of(folder: RunFolder) -> list[int]:
    return [row["step"] for row in folder.read_metrics() if "reward/mean" in row]


def test_nothing_is_lost_or_made_twice_when_sweep_and_trials_are_killed(tmp_path: Path) -> None:
    sweep = SmallSweep(
        tmp_path, "slow", metric="calls", sampler="grid", trials=10, pruner="asha",
        space={"rollouts.group_size": [2, 3, 4]},
    )  # fmt: skip
    runs = [RunFolder(sweep.root / f"small-{number:03d}") for number in range(3)]
    process = sweep.start()
    wait_for(lambda: steps_of(runs[0]), process, 120)
    [training] = sweep.trainings()
    os.kill(training, signal.SIGKILL)
    wait_for(lambda: set(sweep.trainings()) - {training}, process)  # resumed
    wait_for(lambda: steps_of(runs[0])[1:], process)
    chosen = sweep.record().trials[0].params
    process.kill()
    process.communicate()
    until(lambda: not sweep.trainings(), 20)  # they end with it

    assert sweep.record().state == "interrupted"
    again = sweep.start()
    output = again.communicate(timeout=600)[0]
    assert again.returncode == 0, output
    assert "trial 0 goes on" in output
    record = sweep.record()
    assert record.state == "finished"
    assert record.trials[0].params == chosen
    assert len({row.params["rollouts.group_size"] for row in record.trials}) == 3
    assert {row.state for row in record.trials} == {"complete", "pruned"}
    assert record.best is not None
    assert record.best.params == {"rollouts.group_size": 4}
    assert sorted(os.listdir(sweep.root)) == ["small", *(run.name for run in runs)]
    for row, run in zip(record.trials, runs, strict=True):
        store, found = open_store(run)
        with contextlib.closing(store):
            assert len(store.runs()) == 1
            state = "finished" if row.state == "complete" else "interrupted"
            assert state_of(run, found) == state
            assert store.verify(found["id"]).fault is None
            steps = steps_of(run)
            assert steps == list(range(1, len(steps) + 1))
            assert (len(steps) == 3) == (row.state == "complete")
            calls = [line["calls"] for line in run.read_metrics() if "calls" in line]
            assert calls == [4 * row.params["rollouts.group_size"]] * len(steps)
    best = tomllib.loads((sweep.root / "small" / "best.toml").read_text())
    assert best["rollouts"]["group_size"] == 4
    assert "agentrl train --config" in output
    assert (sweep.root / "small" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>small</h1>" in (sweep.root / "small" / "sweep.html").read_text()


def test_seeds_repeat_a_trial_and_a_sweep_that_is_ended_stops_its_trials_in_order(
    tmp_path: Path,
) -> None:
    sweep = SmallSweep(
        tmp_path, metric="reward/mean", seeds=2, trials=1, space={"learning.rank": [4]}
    )
    process = sweep.start()
    first, second = (RunFolder(sweep.root / f"small-000-{seed}") for seed in (0, 1))
    wait_for(lambda: steps_of(first), process, 120)
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143
    assert f"go on with:  agentrl sweep --config {sweep.file} --name small" in output
    assert not sweep.trainings()

    output = sweep.start().communicate(timeout=300)[0]
    [row] = sweep.record().trials
    assert row.state == "complete", output
    last = [[line["reward/mean"] for line in run.read_metrics()][-1] for run in (first, second)]
    assert row.value == pytest.approx(statistics.fmean(last))
    assert row.spread == pytest.approx(statistics.stdev(last))
    assert [run.read_config()["run"]["seed"] for run in (first, second)] == [0, 1]
    assert row.runs == [first.name, second.name]
    assert first.read_config()["run"]["group"] == "small"


def test_a_metric_that_runs_do_not_have_is_refused_with_those_that_they_have(
    tmp_path: Path,
) -> None:
    sweep = SmallSweep(tmp_path, metric="reward/median", space={"learning.rank": [4]})
    process = sweep.start()
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 2
    assert "sweep.metric: small-000 has no 'reward/median'" in output
    assert "reward/mean" in output


def test_a_name_of_a_run_and_a_sweep_in_use_are_refused(tmp_path: Path) -> None:
    sweep = SmallSweep(tmp_path, metric="reward/mean", space={"learning.rank": [4]})
    folder = RunFolder(sweep.root / "small")
    folder.lock()
    output = sweep.start().communicate(timeout=60)[0]
    assert "is in use" in output
    folder.write(folder.config, "{}")
    output = sweep.start().communicate(timeout=60)[0]
    assert "is a run; give the sweep another --name" in output
    with pytest.raises(ConfigError, match="there is no sweep 'small'"):
        sweep.record()
