"""Adapters and metrics of a run."""

from __future__ import annotations

from agentrl_tracer.store import Store


def test_adapters_and_metrics(store: Store) -> None:
    run_id = store.create_run("test", "train", {})
    for version in (0, 1, 2):
        store.publish_adapter(run_id, "policy", version, f"/v{version}", version)
    assert [a.version for a in store.latest_adapters(run_id)] == [2]
    store.drop_adapters_after(run_id, 1)
    assert [a.version for a in store.latest_adapters(run_id)] == [1]
    store.log_metrics(run_id, 1, {"loss": 0.5})
    store.log_metrics(run_id, 1, {"loss": 0.25, "x": 1})
    store.log_metrics(run_id, 2, {"loss": 0.5})
    store.drop_metrics_after(run_id, 1)
    assert store.metrics(run_id) == {1: {"loss": 0.25, "x": 1.0}}


def test_one_task_is_found_by_its_split_and_place(store: Store) -> None:
    run_id = store.create_run("test", "train", {})
    store.add_tasks(run_id, "train", [{"n": 0}, {"n": 1}])
    store.add_tasks(run_id, "eval", [{"n": 7}])
    assert store.task(run_id, "train", 1) == {"n": 1}
    assert store.task(run_id, "eval", 1) is None


def test_metrics_are_thinned_but_for_evaluations_alerts_and_the_newest(store: Store) -> None:
    run_id = store.create_run("test", "train", {})
    for step in range(1, 8):
        store.log_metrics(run_id, step, {"loss": float(step), "other": 1.0})
    store.log_metrics(run_id, 5, {"eval/accuracy": 0.5, "a/alert/truncation": 1.0})
    names = ["loss", "eval/accuracy", "a/alert/truncation"]
    assert store.metrics(run_id, names, every=3) == {
        3: {"loss": 3.0},
        5: {"eval/accuracy": 0.5, "a/alert/truncation": 1.0},
        6: {"loss": 6.0},
        7: {"loss": 7.0},
    }
    assert list(store.logged_at(run_id, "loss", 2)) == [6, 7]
