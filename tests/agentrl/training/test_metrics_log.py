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
from agentrl.training.metrics_log import MetricsLog
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


def log_of(folder: RunFolder, *trackers: str, store: Any = None, note: Any = print) -> MetricsLog:
    config = TrainConfig(**nested(agent="x:y", tasks="t", seed=3, trackers=list(trackers)))
    return MetricsLog(config, folder, store or Mock(), "run", note)


def told(folder: RunFolder, rows: list[dict[str, Any]], name: str, after: int = 0) -> list[str]:
    """Log ``rows`` after a resume at step ``after``; return the notes."""
    notes: list[str] = []
    log = log_of(folder, name, note=notes.append)
    log.go_back(after, None)
    for row in rows:
        log.log(row["step"], row)
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


def test_a_tracker_that_fails_ends_no_run(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    (folder.root / "tensorboard").write_text("a file where its folder should be")
    [note] = told(folder, ROWS, "tensorboard")
    assert note.startswith("tracker tensorboard was given up")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_tracker_is_told(
    name: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        log_of(folder, name)

    module = Mock()
    monkeypatch.setitem(sys.modules, name, module)
    assert told(folder, ROWS, name) == []
    given = module.init.call_args.kwargs
    own = {"id": "00001876543210fedcba9876", "dir": str(folder.root)}
    expected = own if name == "wandb" else {"name": "hello-dcba9876"}
    assert given.items() >= (expected | {"project": "agentrl", "resume": "allow"}).items()
    assert given["config"]["run"]["seed"] == 3
    assert "store" not in given["config"]["run"]
    assert module.init.return_value.finish.call_count == 1

    # Resumed from step 1: what it was told of step 2 stays, whatever step 2 is now.
    again = [{"step": 2, "reward/mean": 0.7}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 2.0}]
    told(folder, again, name, after=1)
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
from unittest.mock import Mock
from agentrl.config.commands import TrainConfig
from agentrl.runs.folder import RunFolder
from agentrl.training.metrics_log import MetricsLog

name, folder, after, rows = sys.argv[1:]
agent, run = {"entrypoint": "x:y", "tasks": "t"}, {"seed": 3, "trackers": [name]}
config = TrainConfig.model_validate({"agent": agent, "run": run})
log = MetricsLog(config, RunFolder(Path(folder)), Mock(), "run", sys.exit)
log.go_back(int(after), None)
for row in json.loads(rows):
    log.log(row["step"], row)
log.close()
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
        [python, "-c", script, *map(str, arguments)],
        capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.trackers
def test_trackio_for_real(folder: RunFolder, tmp_path: Path) -> None:
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    rows = [*ROWS[1:], {"step": 2, "loss": 0.5}]
    run("trackio", SCRIPT, "trackio", folder.root, 0, json.dumps(rows), **env)
    again = [{"step": 2, "loss": 0.25}, {"step": 3, "loss": 0.125}]
    run("trackio", SCRIPT, "trackio", folder.root, 1, json.dumps(again), **env)
    name, found, config = json.loads(run("trackio", READ_TRACKIO, **env))
    assert name == "hello-dcba9876"  # one run, continued
    assert config["run"]["seed"] == 3
    logged = [{k: v for k, v in row.items() if k != "timestamp"} for row in found]
    assert logged == [*rows, {"step": 3, "loss": 0.125}]


@pytest.mark.trackers
def test_wandb_for_real_offline(folder: RunFolder) -> None:
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    rows = [*ROWS[1:], {"step": 3, "loss": 0.5}]
    run("wandb", SCRIPT, "wandb", folder.root, 0, json.dumps(rows), **env)
    [file] = folder.root.glob("wandb/offline-run-*/*.wandb")
    for told in (b"00001876543210fedcba9876", b"eval/accuracy", b"reward/mean", b"loss", b"0.75"):
        assert told in file.read_bytes()
