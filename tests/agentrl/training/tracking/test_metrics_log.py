"""The file, the store and experiment trackers get a run's numbers once, whatever happens to it.

TensorBoard is part of the development environment and is read back by its own reader. W&B, trackio
and MLflow are read back wherever they are installed: here, or in the environment whose python is
AGENTRL_TEST_TRACKERS_PYTHON (with wandb, trackio, mlflow-skinny and agentrl's own dependencies).
What they are told is tested without them too.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_letters, digits
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from peer import python_with
from store_records import call_of, claimed, enqueue, record_answer

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.runs.learning_curve import draw_learning_curve
from agentrl.training.tracking import samples
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
Tell = Callable[..., list[str]]


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


@pytest.fixture
def tell(folder: RunFolder, store: Store, run_id: str) -> Tell:
    """Logs rows after a resume at step ``after``; returns the notes."""

    def tell(
        tracker: str | None, rows: Sequence[dict[str, Any]], after: int = 0, row: Any = None
    ) -> list[str]:
        run = {"seed": 3, "group": "sweep-1", "trackers": [tracker] if tracker else []}
        agent, notes = {"entrypoint": "x:y", "tasks": "t"}, list[str]()
        config = TrainConfig.model_validate({"agent": agent, "run": run})
        log = MetricsLog(config, folder, store, run_id, notes.append)
        log.go_back(after, row)
        for one in rows:
            log.log(one["step"], one)
        draw_learning_curve(list(rows), "hello", folder.picture)
        log.show_picture(rows[-1]["step"] if rows else after)
        log.close()
        return notes

    return tell


@pytest.mark.parametrize("logged", [True, False])
def test_the_checkpoints_row_stands_in_where_none_was_logged(
    folder: RunFolder, store: Store, run_id: str, tell: Tell, logged: bool
) -> None:
    """A row without a mean reward counts, too."""
    row: dict[str, Any] = {"step": 2, "reward/mean": None, "loss": 0.5}
    earlier, evaluated = {"step": 1, "reward/mean": 0.5}, {"step": 2, "eval/accuracy": 1.0}
    rows = [earlier, *([row | {"seconds/publish": 1.0}] if logged else []), evaluated]
    for one in [*rows, {"step": 3, "reward/mean": 0.0}]:
        folder.append_metrics(one)  # the process died before the store had them
    tell(None, [], after=2, row=row)
    assert folder.read_metrics() == [*rows, *([] if logged else [row])]
    expected = {"eval/accuracy": 1.0, "loss": 0.5} | ({"seconds/publish": 1.0} if logged else {})
    assert {n: v for n, v in store.metrics(run_id)[2].items() if n != "step"} == expected
    assert 3 not in store.metrics(run_id)


def test_tensorboard_draws_no_step_of_a_resumed_run_twice_and_shows_rollouts_as_plain_text(
    folder: RunFolder, tell: Tell
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def events() -> Any:
        made = accumulator.EventAccumulator(str(folder.root / "tensorboard/sweep-1"))
        return made.Reload()

    def rewards() -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in events().Scalars("reward/mean")]

    before = [*ROWS, {"step": 3, "reward/mean": 1.0}, {"step": 4, "reward/mean": 0.0}]
    assert tell("tensorboard", before) == []
    assert rewards() == [(1, 0.5), (2, 0.75), (3, 1.0), (4, 0.0)]
    # Killed in step 5, resumed from the checkpoint of step 2: 3 and 4 happen again, differently.
    again = [{"step": 3, "reward/mean": 0.25}, {"step": 4, "reward/mean": 0.125}]
    tell("tensorboard", again, after=2)
    assert rewards() == [(1, 0.5), (2, 0.75), (3, 0.25), (4, 0.125)]
    # And once more, before anything of step 2 was logged: nothing of step 1 is lost.
    tell("tensorboard", [], after=1)
    assert rewards() == [(1, 0.5)]
    assert [(one.step, one.value) for one in events().Scalars("eval/accuracy")] == [(1, 0.25)]
    assert [one.step for one in events().Images("learning_curve")] == [1]
    *_, table = events().Tensors("samples/text_summary")  # this reader keeps what was dropped
    head, _, evaluated, trained = table.tensor_proto.string_val[0].decode().splitlines()
    assert table.step == 1
    assert head == "| rollout | purpose | task | reward | advantage | messages |"
    assert set(re.sub("&#[0-9]+;|<br>", "", evaluated)) <= {*ascii_letters, *digits, *" |"}
    said = "user: Say 8.<br>assistant: " + HOSTILE.replace("\n", "<br>")
    assert html.unescape(evaluated).endswith(f"| eval | 0 | 1 |  | {said} |")
    assert "| train | 0 | -1 |  | user: Say 7.<br>assistant: No. |" in html.unescape(trained)


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


def test_a_sample_of_many_calls_is_read_as_far_as_it_is_shown(
    folder: RunFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = store.create_run("hello", "train", {})
    enqueue(store, run_id, {"n": 1}, step=1)
    claim = claimed(store)
    requests = [{"prompt": f"{number} {'x' * 1000}"} for number in range(100)]
    calls = [call_of(claim, f"c{n:03d}", request=one) for n, one in enumerate(requests)]
    store.write_calls("boot", [], calls, 1)
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    read = Mock(side_effect=samples.conversation)
    monkeypatch.setattr(samples, "conversation", read)
    [row] = samples_of(folder, store, run_id, 1)
    assert (len(str(row["messages"])), str(row["messages"])[-1]) == (4000, "…")
    assert read.call_count < 10


def test_a_tracker_that_fails_ends_no_run(folder: RunFolder, tell: Tell) -> None:
    pytest.importorskip("tensorboard")
    (folder.root / "tensorboard").write_text("a file where its folder should be")
    [note] = tell("tensorboard", ROWS)
    assert note.startswith("tracker tensorboard was given up")


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused(
    name: str, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install {name}(-skinny)?,"):
        tell(name, [])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_tells_only_what_is_new(
    name: str, folder: RunFolder, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Mock(Table=dict, Image=Path)
    monkeypatch.setitem(sys.modules, name, module)
    assert tell(name, ROWS) == []
    # Resumed from step 1: what it was told of step 2 stays, whatever step 2 is now.
    again = [{"step": 2, "reward/mean": 0.7}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]
    tell(name, again, after=1)
    calls = module.init.return_value.log.call_args_list
    logged = [(call.kwargs["step"], *call.args) for call in calls]
    rows = [row[1:5] for row in logged[1][1].pop("samples")["data"]]
    assert rows == [["eval", "0", 1.0, None], ["train", "0", -1.0, None]]
    picture = {"learning_curve": folder.picture}
    first = [(1, {"reward/mean": 0.5}), (1, {"eval/accuracy": 0.25}), (2, {"reward/mean": 0.75})]
    assert logged == [*first, (2, picture), (2, {"loss": 1.0}), (3, {"loss": 2.0}), (3, picture)]
    assert "store" not in module.init.call_args.kwargs["config"]["run"]
    assert module.init.return_value.finish.call_count == 2


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
log.close(killed=True)
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage

[run] = SQLiteStorage.get_runs("agentrl")
rows, config = SQLiteStorage.get_logs("agentrl", run), SQLiteStorage.get_run_config("agentrl", run)
history = {name: [[row["step"], row[name]] for row in rows if name in row]
           for name in ("eval/accuracy", "loss", "reward/mean")}
[table] = [row["samples"]["_value"] for row in rows if "samples" in row]
pictures = [row["step"] for row in rows if "learning_curve" in row]
print(json.dumps([history, config["run"]["seed"], [run, config["_Group"], pictures],
                  [[row["reward"], row["messages"]] for row in table]]))
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
print(json.dumps([history, int(run.data.params["run.seed"]), [run.info.status, *files],
                  [[row[3], row[5]] for row in table["data"]]]))
"""
LATER = [{"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}]
"""What a run logs that is resumed after step 1, and had come to step 2."""
TABLE = [
    [1.0, f"user: Say 8.\nassistant: {HOSTILE}"],
    [-1.0, "user: Say 7.\nassistant: No."],
]


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


@pytest.mark.trackers
@pytest.mark.parametrize(
    ("name", "script", "own"),
    [
        ("trackio", READ_TRACKIO, ["hello-dcba9876", "sweep-1", [2, 3]]),
        ("mlflow", READ_MLFLOW, ["KILLED", "learning_curve.png", "samples"]),
    ],
)
def test_a_run_that_is_resumed_is_one_run_for_real(
    other_python: Callable[..., str], name: str, script: str, own: list[Any]
) -> None:
    other_python(name, SCRIPT, 0, json.dumps([*ROWS[1:], {"step": 2, "loss": 0.5}]))
    other_python(name, SCRIPT, 1, json.dumps(LATER))
    history = {
        "eval/accuracy": [[1, 0.25]],
        "loss": [[2, 0.5], [3, 0.125]],
        "reward/mean": [[2, 0.75]],
    }
    assert json.loads(other_python(name, script)) == [history, 3, own, TABLE]


@pytest.mark.trackers
def test_a_server_of_mlflow_that_is_away_is_soon_given_up(other_python: Callable[..., str]) -> None:
    """With its own defaults MLflow tries for minutes, longer than ``other_python`` waits."""
    away = "import os; os.environ['MLFLOW_TRACKING_URI'] = 'http://127.0.0.1:9'\n"
    script = away + SCRIPT.replace("sys.exit", "print")
    said = other_python("mlflow", script, 0, json.dumps(ROWS[1:]))
    assert said.startswith("tracker mlflow was given up: MlflowException")


@pytest.mark.trackers
def test_wandb_for_real_offline(other_python: Callable[..., str], folder: RunFolder) -> None:
    other_python("wandb", SCRIPT, 0, json.dumps([*ROWS[1:], {"step": 3, "loss": 0.5}]))
    [file] = folder.root.glob("wandb/offline-run-*/*.wandb")
    for one in (b"00001876543210fedcba9876", b"eval/accuracy", b"loss", b"0.75", b"sweep-1"):
        assert one in file.read_bytes()
    [table] = folder.root.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    assert [[row[3], row[5]] for row in json.loads(table.read_text())["data"]] == TABLE
    assert [*folder.root.glob("wandb/offline-run-*/files/media/images/learning_curve_*.png")]
