"""Whole sweeps: killed and continued, pruned, ended in order, repeated with seeds."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import until
from sweeps import SmallSweep
from training_run import wait_for

from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store
from agentrl.sweep import ray_job

pytestmark = pytest.mark.timeout(900)


def steps_of(folder: RunFolder) -> list[int]:
    return [row["step"] for row in folder.read_metrics() if "reward/mean" in row]


@pytest.fixture(params=["here", "ray"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Where trials are trained: on this machine, or as jobs of a Ray cluster."""
    if request.param == "here":
        yield {}
        return
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield {"ray": {"CPU": 1}}
    cluster.shutdown()


def test_trials_that_learn_nothing_have_their_value(tmp_path: Path) -> None:
    """A training that learned nothing exits with 1."""
    sweep = SmallSweep(
        tmp_path, "unpaid", metric="reward/mean", trials=3, space={"learning.rank": [4, 8, 16]}
    )
    process = sweep.start()
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert [(one.state.name, one.value) for one in sweep.results().trials] == [("COMPLETE", 0)] * 3


@pytest.mark.kills
def test_nothing_is_lost_or_made_twice_when_sweep_and_trials_are_killed(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    sweep = SmallSweep(
        tmp_path, "slow", metric="calls", sampler="grid", trials=10, pruner="asha",
        space={"rollouts.group_size": [2, 3, 4]}, **place,
    )  # fmt: skip
    runs = [RunFolder(sweep.root / f"small-{number:03d}") for number in range(3)]
    process = sweep.start()
    wait_for(lambda: steps_of(runs[0]), process, 120)
    [training] = sweep.trainings()
    os.kill(training, signal.SIGKILL)
    wait_for(lambda: set(sweep.trainings()) - {training}, process)  # resumed
    wait_for(lambda: steps_of(runs[0])[1:], process)
    chosen = sweep.results().trials[0].params
    process.kill()
    process.communicate()
    until(lambda: not sweep.trainings(), 20)  # they end with it

    assert sweep.results().state == "interrupted"
    again = sweep.start()
    output = again.communicate(timeout=600)[0]
    assert again.returncode == 0, output
    assert "trial 0 goes on" in output
    found = sweep.results()
    assert found.state == "finished"
    assert found.trials[0].params == chosen
    sizes = [trial.params["rollouts.group_size"] for trial in found.trials]
    assert sorted(sizes) == [2, 3, 4]
    assert found.best is not None
    assert found.best.params == {"rollouts.group_size": 4}
    assert sorted(os.listdir(sweep.root)) == ["small", *(run.name for run in runs)]
    for trial, run in zip(found.trials, runs, strict=True):
        complete, steps = trial.state.name == "COMPLETE", steps_of(run)
        assert complete or trial.state.name == "PRUNED"
        assert run.pruned.exists() == (not complete)
        assert steps == list(range(1, len(steps) + 1))
        assert (len(steps) == 3) == complete
        assert {row["calls"] for row in run.read_metrics() if "calls" in row} == {
            4 * trial.params["rollouts.group_size"]
        }
        store, row = open_store(run)
        with contextlib.closing(store):
            assert len(store.runs()) == 1
            assert row["state"] == ("finished" if complete else "interrupted")
            assert store.verify(row["id"]).fault is None
    best = tomllib.loads((sweep.root / "small/best.toml").read_text())
    assert best["rollouts"]["group_size"] == 4
    assert "agentrl train --config" in output
    assert (sweep.root / "small/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>small</h1>" in (sweep.root / "small/sweep.html").read_text()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")  # Ray's
def test_nodes_that_cannot_share_the_store_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray")
    cluster = pytest.importorskip("ray.cluster_utils").Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        assert ray_job.main({"resources": {"CPU": 1}, "nodes_share_store": False}, []) == 1
        assert "error: run.store: the Ray cluster has 2 nodes" in capfd.readouterr().out
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.kills
def test_seeds_repeat_a_trial_and_a_sweep_that_is_ended_stops_its_trials_in_order(
    tmp_path: Path,
) -> None:
    sweep = SmallSweep(
        tmp_path, metric="reward/mean", seeds=2, trials=1, space={"learning.rank": [4]}
    )
    process = sweep.start()
    runs = [RunFolder(sweep.root / f"small-000-{seed}") for seed in (0, 1)]
    wait_for(lambda: steps_of(runs[0]), process, 120)
    assert "is in use" in sweep.start().communicate(timeout=60)[0]
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143
    assert f"go on with:  agentrl sweep --config {sweep.file} --name small" in output
    assert not sweep.trainings()

    again, refused = sweep.start(), sweep.start("small-000-0")
    assert "small-000-0 is a run; give the sweep another" in refused.communicate()[0]
    output = again.communicate(timeout=300)[0]
    [trial] = sweep.results().trials
    assert trial.state.name == "COMPLETE", output
    last = [[row["reward/mean"] for row in run.read_metrics()][-1] for run in runs]
    assert trial.value == pytest.approx(statistics.fmean(last))
    assert trial.user_attrs == {
        "runs": [run.name for run in runs], "spread": pytest.approx(statistics.stdev(last))
    }  # fmt: skip
    recorded = [run.read_config()["run"] for run in runs]
    assert [(one["seed"], one["group"]) for one in recorded] == [(0, "small"), (1, "small")]
