"""The file, the store and experiment trackers get a run's numbers once, whatever happens to it.

TensorBoard is part of the development environment and is read back by its own reader. W&B and
trackio are read back wherever they are installed: here, or in the environment whose python is
AGENTRL_TEST_TRACKERS_PYTHON (with wandb, trackio and agentrl's own dependencies). What they are
told is tested without them too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from settings import nested

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder
from agentrl.training.metrics_log import MetricsLog, Trackers
from agentrl_tracer.store import Store

PYTHON = os.environ.get("AGENTRL_TEST_TRACKERS_PYTHON")
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


def test_tensorboard_gets_the_metrics(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    assert told(folder, ROWS, "tensorboard") == []
    assert scalars(folder) == {
        "reward/mean": [(1, 0.5), (2, 0.75)],
        "eval/accuracy": [(1, 0.25)],
    }


def test_tensorboard_draws_no_step_of_a_resumed_run_twice(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    before = [*ROWS, {"step": 3, "reward/mean": 1.0}, {"step": 4, "reward/mean": 0.0}]
    told(folder, before, "tensorboard")
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


class Recorded:
    """A module like wandb's: ``init`` makes a run with ``log`` and ``finish``."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> Recorded:
        self.begun.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_tracker_is_told(
    name: Any, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Recorded()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=module.init))
    assert told(folder, ROWS, name) == []
    [options] = module.begun
    assert options["project"] == "agentrl"
    assert options["resume"] == "allow"
    assert options["config"] == {"seed": 3}
    if name == "wandb":
        assert options["id"] == "00001876543210fedcba9876"
        assert options["dir"] == str(folder.root)
    else:
        assert options["name"] == "hello-dcba9876"
    expected = [(1, {"reward/mean": 0.5}), (1, {"eval/accuracy": 0.25}), (2, {"reward/mean": 0.75})]
    assert module.rows == expected
    assert module.finished == 1

    # Resumed from step 1: what it was told of step 2 stays, whatever step 2 is now.
    again = [{"step": 2, "reward/mean": 0.7}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]
    told(folder, again, name, step=1, told=ROWS)
    assert module.rows[len(expected) :] == [(2, {"loss": 1.0}), (3, {"loss": 2.0})]


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
config = SQLiteStorage.get_run_config("agentrl", run)
print(json.dumps({"run": run, "rows": rows, "config": config}))
"""

# LevelDB's log format: blocks of 32 KiB, in them records of checksum, length, kind and bytes.
READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2 as wandb

data, at, whole, rows, runs = open(sys.argv[1], "rb").read(), 7, b"", [], []
while at + 7 <= len(data):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    _, length, kind = struct.unpack("<IHB", data[at : at + 7])
    whole += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):
        record = wandb.Record()
        record.ParseFromString(whole)
        whole = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif record.WhichOneof("record_type") == "run":
            runs.append(record.run.run_id)
print(json.dumps({"rows": rows, "runs": runs}))
"""


def python_with(name: str) -> str:
    if PYTHON is not None:
        return PYTHON
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: see the top of this file")
    return sys.executable


def run(python: str, script: str, *arguments: str, **env: str) -> str:
    done = subprocess.run(
        [python, "-c", script, *arguments],
        capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.trackers
def test_trackio_for_real(folder: RunFolder, tmp_path: Path) -> None:
    python = python_with("trackio")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    rows = [row for row in ROWS if "loss" not in row] + [{"step": 2, "loss": 0.5}]
    run(python, SCRIPT, "trackio", str(folder.root), json.dumps(rows), "{}", **env)
    resumed = json.dumps({"step": 1, "told": rows})
    again = json.dumps([{"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}])
    run(python, SCRIPT, "trackio", str(folder.root), again, resumed, **env)

    found = json.loads(run(python, READ_TRACKIO, **env))
    assert found["run"] == "hello-dcba9876"  # one run, gone on with
    assert found["config"]["seed"] == 3
    logged = [{k: v for k, v in row.items() if k != "timestamp"} for row in found["rows"]]
    assert logged == [
        {"step": 1, "eval/accuracy": 0.25},
        {"step": 2, "reward/mean": 0.75},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 0.125},
    ]


@pytest.mark.trackers
def test_wandb_for_real_offline(folder: RunFolder) -> None:
    python = python_with("wandb")
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    rows = json.dumps([row for row in ROWS if "loss" not in row] + [{"step": 3, "loss": 0.5}])
    run(python, SCRIPT, "wandb", str(folder.root), rows, "{}", **env)
    [file] = folder.root.glob("wandb/offline-run-*/*.wandb")
    found = json.loads(run(python, READ_WANDB, str(file), **env))
    assert set(found["runs"]) == {"00001876543210fedcba9876"}
    logged = [
        {k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")}
        for row in found["rows"]
    ]
    assert logged == [
        {"_step": 1, "eval/accuracy": 0.25},
        {"_step": 2, "reward/mean": 0.75},
        {"_step": 3, "loss": 0.5},
    ]
