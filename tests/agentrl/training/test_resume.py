"""What a resumed run may change, what it refuses, and that it locks out every other process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from settings import changed, dotted, nested

from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.config.setting_names import flattened
from agentrl.config.settings.learning import VerlSettings
from agentrl.runs.folder import RunFolder
from agentrl.training.resume import check_resume, checkpoint_of, go_back
from agentrl.training.session import Session
from agentrl_tracer.store import Store

TASKS = [{"n": 1}, {"n": 2}, {"n": 3}]


def started(root: Path, **settings: Any) -> RunFolder:
    """Return a run folder as it is once its run has registered itself and its tasks."""
    folder = RunFolder.create(root, "before", "train")
    (root / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    kept = {"agent": "json:loads", "tasks": root / "tasks.jsonl", "runs": root, "name": "before"}
    config = TrainConfig(**nested(**kept | settings)).model_dump(mode="json")
    store = Store(str(folder.store))
    run_id = store.create_run("before", "train", config)
    store.add_tasks(run_id, "train", TASKS)
    store.close()
    folder.run_id.write_text(run_id)
    folder.write_json(folder.config, config)
    return folder


def resumed_with(folder: RunFolder, tasks: list[Any] = TASKS, **settings: Any) -> dict[str, Any]:
    config = TrainConfig(**changed(folder.read_config(), **settings))
    return check_resume(folder, config, tasks, [])


def refused_by_command(folder: RunFolder, *flags: str, code: int = 2) -> str:
    """Return what ``agentrl train --resume`` says, in one line."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "--resume", str(folder.root), *flags],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join(done.stderr.replace("│", " ").split())


def test_new_settings_are_kept_before_anything_runs(tmp_path: Path) -> None:
    """So they outlive the next kill."""
    folder = started(tmp_path, learning_rate=1e-3)
    new = {"steps": 3, "learning_rate": 5e-4, "on_error": -1, "max_attempts": 2}
    session = Session(folder, TrainConfig(**changed(folder.read_config(), **new)), "train")
    kept = folder.read_config()
    assert {name: flattened(kept)[dotted(name)] for name in new} == new
    (row,) = session.store.runs()
    session.store.close()
    assert row["policies"]["on_error"] == -1.0
    assert row["policies"]["max_attempts"] == 2
    assert row["config"] == kept


def test_no_record_of_a_run_has_its_stores_password(tmp_path: Path, postgres: str) -> None:
    folder = RunFolder.create(tmp_path, "secret", "train")
    shared = postgres.replace("postgres:@", "postgres:hunter2@")
    given = nested(agent="json:loads", tasks="tasks.jsonl", store=shared)
    session = Session(folder, TrainConfig(**given), "train")
    [row] = [run for run in session.store.runs() if run["id"] == session.run_id]
    session.store.close()
    assert row["config"] == folder.read_config()
    kept = row["config"]["run"]["store"]
    assert kept == shared.replace("hunter2", "os.environ/AGENTRL_STORE_PASSWORD")
    files = [path for path in folder.root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_what_may_change_is_told(tmp_path: Path) -> None:
    folder = started(tmp_path, learning_rate=1e-3)
    assert resumed_with(folder) == {}
    assert resumed_with(folder, steps=40, learning_rate=5e-4) == {
        "run.steps": (None, 40),
        "learning.learning_rate": (1e-3, 5e-4),
    }
    # The same model by another path, and the same tasks in another file.
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    folder = started(tmp_path / "other", model=str(tmp_path / "model"))
    assert resumed_with(folder, model=str(tmp_path / "link")).keys() == {"model.name"}


def test_a_run_goes_on_with_verl_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.config.checks.find_spec", lambda name: True)
    options = {"verl_nodes": 2, "verl_engine": {"param_offload": True}}
    for name, own, other in (
        ("verl", {"backend": "verl", "trainers": 2} | options, "local"),
        ("local", {"trainers": "ray:2", "shard_base": True}, "verl"),
    ):
        folder = started(tmp_path / name, **own)
        config = load(TrainConfig, ["--resume", str(folder.root), "--backend", other])
        assert check_resume(folder, config, TASKS, [])["run.backend"] == (name, other)
        assert config.verl == VerlSettings()
        assert not config.learning.shard_base


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "tinker"}, ["run.backend: ", "with local, not tinker"]),
        ({"model": "/other"}, ["model.name: ", "agentrl-tiny, not /other", "leave --model.name"]),
        ({"rank": 8}, ["learning.rank: ", "with 32, not 8", "leave --learning.rank"]),
        ({"alpha": 8.0}, ["alpha: ", "with 32.0, not 8.0"]),
        ({"adapter": "other"}, ["adapter: ", "with policy, not other", "leave --model.adapter as"]),
        ({"adapters": "policy,other"}, ["adapters: ", "with policy, not other, policy"]),
        ({"seed": 1}, ["seed: ", "with 0, not 1"]),
        ({"estimator": "gae"}, ["estimator: ", "with grpo, not gae"]),
        ({"store": "s.db"}, ["store: ", "with the default, not s.db"]),
        ({"name": "after"}, ["name: ", "with before, not after"]),
    ],
)
def test_what_the_state_depends_on_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: list[str]
) -> None:
    folder = started(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resumed_with(folder, **settings)
    for words in (*said, str(folder.root), "start a new run"):
        assert words in str(caught.value)


@pytest.mark.parametrize("given", [TASKS[:2], [*TASKS, {"n": 4}], [{"n": 1}, {"n": 5}, {"n": 3}]])
def test_other_tasks_are_refused(tmp_path: Path, given: Any) -> None:
    folder = started(tmp_path)
    said = f"3 tasks of .*tasks.jsonl, not the {len(given)} that are in"
    with pytest.raises(ConfigError, match=f"tasks: .*{said}"):
        resumed_with(folder, given)


def test_the_command_refuses_before_it_changes_anything(tmp_path: Path) -> None:
    folder = started(tmp_path)
    before = folder.config.read_bytes()
    (tmp_path / "others.jsonl").write_text('{"n": 4}\n')
    assert "tasks: " in refused_by_command(folder, "--tasks", str(tmp_path / "others.jsonl"))
    # A setting that does not fit the tasks: kept, it would refuse every later --resume.
    assert "warmup_steps: 50 leave none" in refused_by_command(
        folder, "--learning.warmup-steps", "50"
    )
    store = Store(str(folder.store))
    assert store.tasks(folder.run_id.read_text(), "train") == TASKS
    store.close()
    assert folder.config.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = started(tmp_path)
    (folder.root / "lock").mkdir()  # root may write into a read-only folder
    with pytest.raises(RuntimeError, match=r"cannot write .*lock'?: Is a directory"):
        folder.lock()


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    folder = started(tmp_path)
    folder.lock()
    folder.lock()  # ours already
    before = folder.read_config()
    said = refused_by_command(folder, "--steps", "7")
    assert f"process {os.getpid()} " in said
    assert "is in use" in said
    assert folder.read_config() == before


def test_the_lock_dies_with_its_process_whatever_that_forked(tmp_path: Path) -> None:
    holder = (
        "import os, sys, time, pathlib\n"
        "from agentrl.runs.folder import RunFolder\n"
        "folder = RunFolder(pathlib.Path(sys.argv[1])); folder.lock()\n"
        "if not os.fork(): print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} on"):
            RunFolder(tmp_path).lock()
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # it lives on
        RunFolder(tmp_path).lock()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("torn", [True, False])
def test_a_run_without_a_whole_checkpoint_is_not_begun_again(tmp_path: Path, torn: bool) -> None:
    """By the rows of metrics, or by what is left of a later checkpoint."""
    folder = started(tmp_path, runners=1)
    folder.append_metrics({"step": 0, "eval/accuracy": 0.0})
    if torn:
        (folder.checkpoints / "step-00000001").mkdir(parents=True)
    else:
        folder.append_metrics({"step": 1, "reward/mean": 0.5})
    before = folder.read_metrics()
    said = refused_by_command(folder, code=1)
    assert "had come to step 1," in said
    assert ("step-00000001: no manifest.json" if torn else "it is empty") in said
    assert "start a new run" in said
    assert folder.read_metrics() == before


def test_a_run_goes_back_to_a_kept_step(tmp_path: Path) -> None:
    """What was made later is put aside: no later command takes it for the run's own."""
    folder = started(tmp_path)
    store, run_id = Store(str(folder.store)), folder.run_id.read_text()
    for step in (2, 4, 6):
        (folder.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (adapter := folder.adapter_version("policy", step)).mkdir(parents=True)
        store.publish_adapter(run_id, "policy", step, str(adapter), step)
        folder.append_metrics({"step": step, "eval/accuracy": 0.5 if step == 4 else 0.25})
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3; kept are those of: 2, 4, 6"):
        go_back(folder, "3")
    with pytest.raises(ConfigError, match="no checkpoint of step x"):
        go_back(folder, "x")
    go_back(folder, "best")
    assert [one.name for one in sorted(folder.checkpoints.glob("s*0*"))][:2] == [
        "step-00000002", "step-00000004"
    ]  # fmt: skip
    for folders in (folder.checkpoints, folder.adapters / "policy"):
        assert len([*folders.glob("superseded-*6-*")]) == 1
        assert len([*folders.iterdir()]) == 3
    # The gateway loads the newest that the store names, before the run is restored.
    assert [one.version for one in store.latest_adapters(run_id)] == [4]
    store.close()


def test_a_run_that_was_never_evaluated_has_no_best_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume: .* was never evaluated"):
        checkpoint_of(RunFolder(tmp_path), "best", "resume")
