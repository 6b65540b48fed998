"""What a folder and its store say together: which store, which state, how to go on."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from settings import nested

from agentrl.cli import runs as commands
from agentrl.cli.main import main
from agentrl.config.commands import TrainConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import how_to_continue, open_store, state_of
from agentrl.training.resume import return_to_start
from agentrl_tracer.store import Store, StoreError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that was started in ``here``, with relative paths, by a process that is gone."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "agent.py").write_text("def agent(task): ...")
    (here / "tasks.jsonl").write_text('{"n": 1}\n')
    folder = RunFolder.create(Path("runs"), "a-long-name-of-a-run-of-one-of-many-settings", "train")
    settings = {"agent": "agent.py:agent", "tasks": "tasks.jsonl", "store": "shared.db"}
    config = TrainConfig(**nested(**settings)).model_dump(mode="json")
    with contextlib.closing(Store("shared.db")) as store:
        folder.run_id.write_text(store.create_run(folder.name, "train", config))
    folder.started_in.write_text(str(here))
    folder.write_json(folder.config, config)
    (folder.root / "lock").write_text("process 1 on elsewhere\n")
    return folder


def test_a_run_is_shown_from_any_directory(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, run = open_store(folder)
    store.close()
    assert run["name"] == folder.name
    assert not (tmp_path / "shared.db").exists()


def test_a_store_that_is_gone_is_not_made_anew(folder: RunFolder) -> None:
    file = Path("shared.db")
    file.unlink()
    with pytest.raises(ConfigError, match=r"shared.db is not there, or does not hold the run"):
        open_store(folder)
    assert not file.exists()
    Store(str(file)).close()
    with pytest.raises(ConfigError, match="bring it back, with the files -wal and -shm"):
        open_store(folder)


def test_a_list_names_the_folders_that_it_cannot_read(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    torn, closed = folder.root.with_name("torn"), folder.root.with_name("closed")
    for other in (torn, closed):
        shutil.copytree(folder.root, other)
    (torn / "config.json").write_text('{"agent": ')
    closed.chmod(0o000)
    with pytest.raises(StoreError, match=r"torn/config.json is damaged; bring a copy back") as said:
        commands.list_command(folder.root.parent)
    assert folder.name in "".join(capsys.readouterr().out.split())
    if os.geteuid():  # root reads everywhere
        assert f"Permission denied: '{closed}'" in str(said.value)
    closed.chmod(0o700)


def test_a_run_elsewhere_is_interrupted_when_it_is_silent(folder: RunFolder) -> None:
    store, run = open_store(folder)
    assert state_of(folder, run) == "running"
    assert state_of(folder, run | {"heartbeat_at": time.time() - 61}) == "interrupted"
    assert state_of(folder, run | {"heartbeat_at": None}) == "running"  # of an earlier version
    folder.pruned.touch()  # by a sweep
    assert state_of(folder, run | {"heartbeat_at": 0.0}) == "pruned"
    assert state_of(folder, run | {"state": "finished"}) == "finished"
    store.beat(run["id"])
    store.close()


def test_a_run_here_is_interrupted_when_its_process_is_gone(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunFolder(folder.root)
    other.lock()
    store, run = open_store(folder)
    store.close()
    silent = run | {"heartbeat_at": 0.0}  # suspended, or with another clock: its lock counts
    assert state_of(folder, silent) == "running"
    del other
    assert state_of(folder, run) == "interrupted"
    # At 80 columns a long name is whole, and the command is one line.
    monkeypatch.setattr(commands.console, "_width", 80)
    commands.list_command(Path("runs"))
    listed = capsys.readouterr().out.splitlines()
    assert listed[1].split()[:2] == [folder.name, "interrupted"]
    assert listed[-1].endswith(f"agentrl train --resume {folder.root}")
    commands.show_command(Path("runs") / folder.name)
    assert f"{how_to_continue(folder)}\n" in capsys.readouterr().out


def test_without_its_password_a_run_names_the_variable_and_hides_no_other(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = RunFolder.create(Path("runs"), "elsewhere", "train")
    config = folder.read_config()
    config["run"] |= {"store": "postgresql://me:os.environ/NO_SUCH_NAME@host/db"}
    secret.write_json(secret.config, config)
    secret.run_id.write_text("x")
    for command in ("runs show", "runs verify", "train --resume", "runs list"):
        given = [] if command == "runs list" else [str(secret.root)]
        monkeypatch.setattr(sys, "argv", ["agentrl", *command.split(), *given])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1, command
        said = " ".join(capsys.readouterr().err.split())
        assert "run.store: the environment variable NO_SUCH_NAME is not set" in said
        assert "Traceback" not in said
        assert len(said.split(". ")) == 1
    monkeypatch.setattr(commands.console, "_width", 80)
    with pytest.raises(StoreError, match=rf"{secret.name}: run.store: .*NO_SUCH_NAME"):
        commands.list_command()
    assert folder.name[:20] in capsys.readouterr().out
    load(TrainConfig, ["--resume", str(secret.root), "--run.store", "given.db"])


def test_resumed_from_another_directory_its_paths_begin_where_it_started(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    (there / "others.jsonl").write_text('{"n": 1}\n')
    given = ("--resume", str(folder.root), "--tasks", "others.jsonl", "--model", "no-path")
    config = load(TrainConfig, given)
    assert config.agent.tasks == there / "others.jsonl"  # given here
    assert config.model.name == "no-path"
    said: list[Any] = []
    return_to_start(folder, said.append)
    assert Path.cwd() == tmp_path / "here"
    assert Path(config.agent.entrypoint.partition(":")[0]).is_file()
    return_to_start(folder, said.append)
    assert len(said) == 1
    folder.started_in.write_text(str(tmp_path / "gone"))
    return_to_start(folder, said.append)
    assert "which is not here (No such file or directory)" in said[1]
