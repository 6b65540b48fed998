"""The file, the store and experiment trackers get a run's numbers once, whatever happens to it.

TensorBoard is part of the development environment and is read back by its own reader. W&B and
trackio are read back wherever they are installed: here, or in the environment whose python is
AGENTRL_TEST_TRACKERS_PYTHON (with wandb, trackio and agentrl's own dependencies). What they are
told is tested without them too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from peer import python_with
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.training.metrics_log import MetricsLog, Trackers
from agentrl_tracer.store import Store

ROWS = [
    {"step": 1, "reward/mean": 0.5, "loss": float("nan"), "name": "x"},
    {"step": 1, "eval/accuracy": 0.25},
    {"step": 2, "reward/mean": 0.75},
]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "hello")
    folder.root.mkdir()
    folder.run_id.write_text("00001876543210fedcba9876")
    return folder


@pytest.mark.parametrize("logged", [True, False])
def test_the_checkpoints_row_stands_in_where_none_was_logged(
    tmp_path: Path, store: Store, logged: bool
) -> None:
    """A row without a mean reward counts, too."""
    row: dict[str, Any] = {"step": 2, "reward/mean": None, "loss": 0.5}
    folder = RunFolder.create(tmp_path, "run", "train")
    run_id = store.create_run("run", "train", {})
    config = TrainConfig(**nested(agent="x:y", tasks=tmp_path))
    log = MetricsLog(config, folder, store, run_id, print)
    earlier, evaluated = {"step": 1, "reward/mean": 0.5}, {"step": 2, "eval/accuracy": 1.0}
    rows = [earlier, *([row | {"seconds/publish": 1.0}] if logged else []), evaluated]
    for one in [*rows, {"step": 3, "reward/mean": 0.0}]:
        folder.append_metrics(one)  # the process died before the store had them
    log.go_back(2, row)
    assert log.rows() == [*rows, *([] if logged else [row])]
    assert log.held_out() == {2: 1.0}
    expected = {"eval/accuracy": 1.0, "loss": 0.5} | ({"seconds/publish": 1.0} if logged else {})
    assert {n: v for n, v in store.metrics(run_id)[2].items() if n != "step"} == expected
    assert 3 not in store.metrics(run_id)


def scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """By TensorBoard's own reader."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder.root / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


def told(folder: RunFolder, rows: list[dict[str, Any]], *names: Any, **begin: Any) -> list[str]:
    """As by a process of its own that logs ``rows``; the notes it made."""
    notes: list[str] = []
    trackers = Trackers(names, folder, {"seed": 3}, notes.append)
    trackers.begin(**begin)
    for row in rows:
        trackers.log(row["step"], row)
    trackers.close()
    return notes


def test_tensorboard_draws_no_step_of_a_resumed_run_twice(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    before = [*ROWS, {"step": 3, "reward/mean": 1.0}, {"step": 4, "reward/mean": 0.0}]
    assert told(folder, before, "tensorboard") == []
    assert scalars(folder)["reward/mean"] == [(1, 0.5), (2, 0.75), (3, 1.0), (4, 0.0)]
    # Killed in step 5, resumed from the checkpoint of step 2: 3 and 4 happen again, differently.
    after = [{"step": 3, "reward/mean": 0.25}, {"step": 4, "reward/mean": 0.125}]
    told(folder, after, "tensorboard", step=2, told=before)
    assert scalars(folder) == {
        "reward/mean": [(1, 0.5), (2, 0.75), (3, 0.25), (4, 0.125)],
        "eval/accuracy": [(1, 0.25)],
    }
    # And once more, before anything of step 3 was logged: nothing is lost.
    rows = [row for row in before if row["step"] < 3] + after
    told(folder, [], "tensorboard", step=4, told=rows)
    assert scalars(folder)["reward/mean"] == [(1, 0.5), (2, 0.75), (3, 0.25), (4, 0.125)]


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where its folder should be")
    [note] = told(RunFolder(tmp_path), ROWS, "tensorboard")
    assert note.startswith("tracker tensorboard was given up")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_there_is_refused(
    name: Any, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        Trackers([name], folder, {}, print)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_tracker_is_told(
    name: Any, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Mock()
    monkeypatch.setitem(sys.modules, name, module)
    assert told(folder, ROWS, name) == []
    own = {"id": "00001876543210fedcba9876", "dir": str(folder.root)}
    expected = own if name == "wandb" else {"name": "hello-dcba9876"}
    expected |= {"project": "agentrl", "resume": "allow", "config": {"seed": 3}}
    assert module.init.call_args.kwargs.items() >= expected.items()
    assert module.init.return_value.finish.call_count == 1

    # Resumed from step 1: what it was told of step 2 stays, whatever step 2 is now.
    again = [{"step": 2, "reward/mean": 0.7}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]
    told(folder, again, name, step=1, told=ROWS)
    calls = module.init.return_value.log.call_args_list
    assert [(call.kwargs["step"], *call.args) for call in calls] == [
        (1, {"reward/mean": 0.5}),
        (1, {"eval/accuracy": 0.25}),
        (2, {"reward/mean": 0.75}),
        (2, {"loss": 1.0}),
        (3, {"loss": 2.0}),
    ]


SCRIPT = """
import json, sys
from pathlib import Path
from agentrl.runs.folder import RunFolder
from agentrl.training.metrics_log import Trackers

name, folder = sys.argv[1], RunFolder(Path(sys.argv[2]))
rows, begin = map(json.loads, sys.argv[3:])
trackers = Trackers([name], folder, {"seed": 3}, sys.exit)
trackers.begin(**begin)
for row in rows:
    trackers.log(row["step"], row)
trackers.close()
"""
READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage

[run] = SQLiteStorage.get_runs("agentrl")
rows = SQLiteStorage.get_logs("agentrl", run)
print(json.dumps([run, rows, SQLiteStorage.get_run_config("agentrl", run)]))
"""


def run(name: str, script: str, *arguments: Any, **env: str) -> str:
    python = python_with(name, "AGENTRL_TEST_TRACKERS_PYTHON")
    if python is None:
        pytest.skip(f"{name} is not installed: see the top of this file")
    done = subprocess.run(
        [python, "-c", script, *(a if isinstance(a, str) else json.dumps(a) for a in arguments)],
        capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.trackers
def test_trackio_for_real(folder: RunFolder, tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    rows = [*ROWS[1:], {"step": 2, "loss": 0.5}]
    run("trackio", SCRIPT, "trackio", str(folder.root), rows, {}, **env)
    again = [{"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}]
    resumed = {"step": 1, "told": rows}
    run("trackio", SCRIPT, "trackio", str(folder.root), again, resumed, **env)
    name, found, config = json.loads(run("trackio", READ_TRACKIO, **env))
    assert name == "hello-dcba9876"  # one run, continued
    assert config["seed"] == 3
    logged = [{k: v for k, v in row.items() if k != "timestamp"} for row in found]
    assert logged == [*rows, {"step": 3, "loss": 0.125}]


@pytest.mark.trackers
def test_wandb_for_real_offline(folder: RunFolder) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run(
        "wandb", SCRIPT, "wandb", str(folder.root), [*ROWS[1:], {"step": 3, "loss": 0.5}], {}, **env
    )
    [file] = folder.root.glob("wandb/offline-run-*/*.wandb")
    for told in (b"00001876543210fedcba9876", b"eval/accuracy", b"reward/mean", b"loss", b"0.75"):
        assert told in file.read_bytes()
