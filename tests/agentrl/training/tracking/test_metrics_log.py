"""The file, the store and experiment trackers get a run's numbers once, whatever happens to it.

TensorBoard is part of the development environment and is read back by its own reader. W&B, trackio
and MLflow are read back wherever they are installed: here, or in the environment whose python is
AGENTRL_TEST_TRACKERS_PYTHON (with wandb, trackio, mlflow-skinny and agentrl's own dependencies).
What they are told is tested without them too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from peer import python_with
from settings import nested
from store_records import claimed, enqueue, record_answer

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.runs.learning_curve import draw_learning_curve
from agentrl.training.tracking.metrics_log import MetricsLog
from agentrl.training.tracking.samples import samples_of
from agentrl_tracer.schemas import AttemptState, Purpose
from agentrl_tracer.store import Store

ROWS = [
    {"step": 1, "reward/mean": 0.5, "loss": float("nan"), "name": "x"},
    {"step": 1, "eval/accuracy": 0.25},
    {"step": 2, "reward/mean": 0.75},
]
HOSTILE = "8 | <script>alert(1)</script>\n![](http://x/y) `k`"
EMPTY = Mock(**{"rollouts.return_value": [], "calls.return_value": [], "rewards.return_value": []})
"""A store without rollouts."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "hello")
    folder.root.mkdir()
    folder.run_id.write_text("00001876543210fedcba9876")
    return folder


@pytest.fixture
def run_id(store: Store) -> str:
    """A run with a rollout of step 1 and one of the evaluation after it."""
    made = store.create_run("hello", "train", {})
    record_answer(store, made, Purpose.TRAIN, 1, ("Say 7.", "No."), -1.0)
    record_answer(store, made, Purpose.EVAL, 1, ("Say 8.", HOSTILE), 1.0)
    return made


def log_of(
    folder: RunFolder, *trackers: str, store: Any = None, note: Any = print, run_id: str = "run",
    **settings: Any,
) -> MetricsLog:  # fmt: skip
    config = TrainConfig(**nested(agent="x:y", tasks="t", seed=3, trackers=list(trackers)))
    config.run = config.run.model_copy(update=settings)
    return MetricsLog(config, folder, store or EMPTY, run_id, note)


def told(
    folder: RunFolder, rows: list[dict[str, Any]], name: str, after: int = 0, **how: Any
) -> list[str]:
    """Log ``rows`` after a resume at step ``after``; return the notes."""
    notes: list[str] = []
    log = log_of(folder, name, note=notes.append, **how)
    log.go_back(after, None)
    for row in rows:
        log.log(row["step"], row)
    draw_learning_curve(rows, "hello", folder.picture)
    log.show_picture(rows[-1]["step"] if rows else after)
    log.close()
    return notes


@pytest.mark.parametrize("logged", [True, False])
def test_the_checkpoints_row_stands_in_where_none_was_logged(
    folder: RunFolder, store: Store, logged: bool
) -> None:
    """A row without a mean reward counts, too."""
    row: dict[str, Any] = {"step": 2, "reward/mean": None, "loss": 0.5}
    earlier, evaluated = {"step": 1, "reward/mean": 0.5}, {"step": 2, "eval/accuracy": 1.0}
    rows = [earlier, *([row | {"seconds/publish": 1.0}] if logged else []), evaluated]
    for one in [*rows, {"step": 3, "reward/mean": 0.0}]:
        folder.append_metrics(one)  # the process died before the store had them
    log = log_of(folder, store=store)
    log.go_back(2, row)
    assert folder.read_metrics() == [*rows, *([] if logged else [row])]
    assert log.held_out() == {2: 1.0}
    expected = {"eval/accuracy": 1.0, "loss": 0.5} | ({"seconds/publish": 1.0} if logged else {})
    assert {n: v for n, v in store.metrics("run")[2].items() if n != "step"} == expected
    assert 3 not in store.metrics("run")


def test_tensorboard_draws_no_step_of_a_resumed_run_twice(folder: RunFolder) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def drawn() -> dict[str, list[tuple[int, float]]]:
        events = accumulator.EventAccumulator(str(folder.root / "tensorboard"))
        events.Reload()
        names = events.Tags()["scalars"]
        return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}

    before = [*ROWS, {"step": 3, "reward/mean": 1.0}, {"step": 4, "reward/mean": 0.0}]
    assert told(folder, before, "tensorboard") == []
    assert drawn()["reward/mean"] == [(1, 0.5), (2, 0.75), (3, 1.0), (4, 0.0)]
    # Killed in step 5, resumed from the checkpoint of step 2: 3 and 4 happen again, differently.
    again = [{"step": 3, "reward/mean": 0.25}, {"step": 4, "reward/mean": 0.125}]
    told(folder, again, "tensorboard", after=2)
    rewards = [(1, 0.5), (2, 0.75), (3, 0.25), (4, 0.125)]
    assert drawn() == {"reward/mean": rewards, "eval/accuracy": [(1, 0.25)]}
    # And once more, before anything of step 5 was logged: nothing is lost.
    told(folder, [], "tensorboard", after=4)
    assert drawn()["reward/mean"] == rewards


def test_tensorboard_shows_rollouts_as_plain_text_and_the_curve_in_the_groups_folder(
    folder: RunFolder, store: Store, run_id: str
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    how = {"store": store, "run_id": run_id, "group": "sweep-1"}
    assert told(folder, ROWS, "tensorboard", **how) == []
    # Killed after the evaluation and resumed: what it has dropped of step 1 is told again.
    assert told(folder, [], "tensorboard", after=1, **how) == []
    events = accumulator.EventAccumulator(str(folder.root / "tensorboard/sweep-1"))
    events.Reload()
    *_, table = events.Tensors("samples/text_summary")  # this reader keeps what was dropped
    text = table.tensor_proto.string_val[0].decode()
    head, _, evaluated, trained = text.splitlines()
    assert table.step == 1
    assert head == "| rollout | purpose | task | reward | advantage | messages |"
    assert evaluated.endswith("| eval | 0 | 1 |  | user&#58; Say 8.<br>assistant&#58; 8 "
        "&#124; &lt;script&gt;alert&#40;1&#41;&lt;/script&gt;<br>&#33;&#91;&#93;&#40;http&#58;//x/y"
        "&#41; &#96;k&#96; |")  # fmt: skip
    assert trained.endswith("| train | 0 | -1 |  | user&#58; Say 7.<br>assistant&#58; No. |")
    assert [one.step for one in events.Images("learning_curve")] == [1]


def test_samples_are_few_and_short_with_the_advantage_that_trained_or_why_a_rollout_failed(
    folder: RunFolder, store: Store, run_id: str
) -> None:
    [rollout] = store.rollouts(run_id, purpose=Purpose.TRAIN)
    calls = store.calls(rollout_ids=[rollout.id])
    store.settle(trained={calls[0].id: 1}, skipped={}, calls=calls)
    seen = {"calls": np.array([calls[0].id], np.bytes_), "offsets": np.array([0, 2])}
    seen |= {name: np.array([0.5, 1.0], np.float32) for name in ("trainer", "advantage")}
    folder.tokens.mkdir()
    np.savez(folder.tokens / "000001.npz", **seen)
    for _ in range(20):
        record_answer(store, run_id, Purpose.TRAIN, 1, ("Say 9.", "x" * 5000), 0.5)
    enqueue(store, run_id, {"n": 1}, step=2)
    store.end_attempt(claimed(store).attempt_id, AttemptState.TIMEOUT)
    rows = samples_of(folder, store, run_id, 1)
    assert [row["purpose"] for row in rows] == ["eval"] + ["train"] * 16
    assert [row["advantage"] for row in rows[:3]] == [None, 0.75, None]
    assert {len(str(row["messages"])) for row in rows[2:]} == {4000}
    [failed] = samples_of(folder, store, run_id, 2)
    assert (failed["reward"], failed["messages"]) == (None, "timeout")


def test_a_tracker_that_fails_ends_no_run(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    (folder.root / "tensorboard").write_text("a file where its folder should be")
    [note] = told(folder, ROWS, "tensorboard")
    assert note.startswith("tracker tensorboard was given up")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused(
    name: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        log_of(folder, name)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_tracker_is_told(
    name: str, folder: RunFolder, store: Store, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Mock()
    module.Table = dict
    module.Image = Path
    monkeypatch.setitem(sys.modules, name, module)
    how = {"store": store, "run_id": run_id, "group": "sweep-1"}
    assert told(folder, ROWS, name, **how) == []
    given = module.init.call_args.kwargs
    own = {"id": "00001876543210fedcba9876", "dir": str(folder.root)}
    expected = own if name == "wandb" else {"name": "hello-dcba9876"}
    expected |= {"project": "agentrl", "group": "sweep-1", "resume": "allow"}
    assert given.items() >= expected.items()
    assert given["config"]["run"]["seed"] == 3
    assert "store" not in given["config"]["run"]
    assert module.init.return_value.finish.call_count == 1

    # Resumed from step 1: what it was told of step 2 stays, whatever step 2 is now.
    again = [{"step": 2, "reward/mean": 0.7}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]
    told(folder, again, name, after=1, **how)
    calls = module.init.return_value.log.call_args_list
    logged = [(call.kwargs["step"], *call.args) for call in calls]
    samples = logged[1][1].pop("samples")
    assert samples["columns"][1:] == ["purpose", "task", "reward", "advantage", "messages"]
    assert [row[1:5] for row in samples["data"]] == [
        ["eval", "0", 1.0, None],
        ["train", "0", -1.0, None],
    ]
    picture = {"learning_curve": folder.picture}
    assert logged == [
        (1, {"reward/mean": 0.5}),
        (1, {"eval/accuracy": 0.25}),
        (2, {"reward/mean": 0.75}),
        (2, picture),
        (2, {"loss": 1.0}),
        (3, {"loss": 2.0}),
        (3, picture),
    ]


SCRIPT = """
import json, sys
from pathlib import Path
from agentrl.config.commands import TrainConfig
from agentrl.runs.folder import RunFolder
from agentrl.training.tracking.metrics_log import MetricsLog
from agentrl_tracer.store import Store

name, folder, store, run_id, after, rows = sys.argv[1:]
run = {"seed": 3, "trackers": [name], "group": "sweep-1"}
config = TrainConfig.model_validate({"agent": {"entrypoint": "x:y", "tasks": "t"}, "run": run})
log = MetricsLog(config, RunFolder(Path(folder)), Store(store), run_id, sys.exit)
log.go_back(int(after), None)
rows = json.loads(rows)
for row in rows:
    log.log(row["step"], row)
log.show_picture(rows[-1]["step"])
log.close()
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage

[run] = SQLiteStorage.get_runs("agentrl")
rows = SQLiteStorage.get_logs("agentrl", run)
print(json.dumps([run, rows, SQLiteStorage.get_run_config("agentrl", run)]))
"""
READ_MLFLOW = """
import json
from mlflow import MlflowClient

client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("agentrl/sweep-1").experiment_id])
id, at = run.info.run_id, "samples/000001.json"
history = {name: [[one.step, one.value] for one in client.get_metric_history(id, name)]
           for name in sorted(run.data.metrics)}
table = json.loads(open(client.download_artifacts(id, at)).read())
files = [one.path for one in client.list_artifacts(id)]
print(json.dumps([run.info.status, run.data.params, history, table, files]))
"""


@pytest.fixture
def other_python(
    folder: RunFolder, store: Store, run_id: str, tmp_path: Path
) -> Callable[..., str]:
    """Runs a script in the environment of a tracker; without arguments, logs rows in it."""

    def run(name: str, script: str, *arguments: Any) -> str:
        python = python_with(name, "AGENTRL_TEST_TRACKERS_PYTHON")
        if python is None:
            pytest.skip(f"{name} is not installed: see the top of this file")
        given = [name, folder.root, tmp_path / "store.db", run_id, *arguments]
        env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
        env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "DO_NOT_TRACK": "true"}
        env |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
        done = subprocess.run(
            [python, "-c", script, *map(str, given)], cwd=tmp_path,
            capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **env},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    draw_learning_curve([], "hello", folder.picture)
    return run


LATER = [{"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}]
"""What a run logs that is resumed after step 1, and had come to step 2."""


@pytest.mark.trackers
def test_trackio_for_real(other_python: Callable[..., str]) -> None:
    rows = [*ROWS[1:], {"step": 2, "loss": 0.5}]
    other_python("trackio", SCRIPT, 0, json.dumps(rows))
    other_python("trackio", SCRIPT, 1, json.dumps(LATER))
    name, found, config = json.loads(other_python("trackio", READ_TRACKIO))
    assert name == "hello-dcba9876"  # one run, continued
    assert config["run"]["seed"] == 3
    assert config["_Group"] == "sweep-1"
    logged = [{k: v for k, v in row.items() if k != "timestamp"} for row in found]
    table = logged[0].pop("samples")
    assert [row["reward"] for row in table["_value"]] == [1.0, -1.0]
    assert table["_value"][0]["messages"] == f"user: Say 8.\nassistant: {HOSTILE}"
    pictures = [row for row in logged if "learning_curve" in row]
    assert [row["step"] for row in pictures] == [2, 3]
    assert [row for row in logged if row not in pictures] == [*rows, {"step": 3, "loss": 0.125}]


@pytest.mark.trackers
def test_wandb_for_real_offline(other_python: Callable[..., str], folder: RunFolder) -> None:
    rows = [*ROWS[1:], {"step": 3, "loss": 0.5}]
    other_python("wandb", SCRIPT, 0, json.dumps(rows))
    [file] = folder.root.glob("wandb/offline-run-*/*.wandb")
    for one in (b"00001876543210fedcba9876", b"eval/accuracy", b"loss", b"0.75", b"sweep-1"):
        assert one in file.read_bytes()
    [table] = folder.root.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    rows = json.loads(table.read_text())["data"]
    assert [row[3] for row in rows] == [1.0, -1.0]
    assert rows[0][5] == f"user: Say 8.\nassistant: {HOSTILE}"
    assert [*folder.root.glob("wandb/offline-run-*/files/media/images/learning_curve_*.png")]


@pytest.mark.trackers
def test_mlflow_for_real(other_python: Callable[..., str]) -> None:
    rows = [*ROWS[1:], {"step": 2, "loss": 0.5}]
    other_python("mlflow", SCRIPT, 0, json.dumps(rows))
    other_python("mlflow", SCRIPT, 1, json.dumps(LATER))
    status, given, history, table, files = json.loads(other_python("mlflow", READ_MLFLOW))
    assert (status, given["run.seed"], "run.store" in given) == ("FINISHED", "3", False)
    assert history == {
        "eval/accuracy": [[1, 0.25]],
        "loss": [[2, 0.5], [3, 0.125]],
        "reward/mean": [[2, 0.75]],
    }
    assert table["columns"][-1] == "messages"
    assert [row[3] for row in table["data"]] == [1.0, -1.0]
    assert "learning_curve.png" in files
