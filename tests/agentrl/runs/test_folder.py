"""A run's folder: its metrics, its name, and where adapters are found again."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file
from settings import nested

from agentrl.config.commands import EvalConfig, TrainConfig
from agentrl.config.errors import ConfigError, explain
from agentrl.runs.folder import RunFolder, adapter_folders, find_adapters, run_and_step
from agentrl.runs.learning_curve import draw_learning_curve


def test_metrics_are_json_and_old_or_torn_ones_are_mended(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "r", "x")
    folder.metrics.write_text('{"step": 1, "reward/mean": NaN}\n')
    folder.append_metrics({"step": 2, "reward/mean": math.inf, "loss": 0.5})
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "x"')
    expected: list[Any] = [
        {"step": 1, "reward/mean": None},
        {"step": 2, "reward/mean": None, "loss": 0.5},
    ]
    assert folder.read_metrics() == expected
    folder.drop_metrics_after(1)
    [line] = folder.metrics.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == expected[0]  # not NaN
    folder.write_json(folder.summary, {"held_out": [(1, math.nan)], "reward": [-math.inf]})
    summary = json.loads(folder.summary.read_text(), parse_constant=pytest.fail)
    assert summary == {"held_out": [[1, None]], "reward": [None]}
    draw_learning_curve(expected, "nothing", folder.picture)
    assert folder.picture.is_file()


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a", "train").config.write_text("{}")
    with pytest.raises(ConfigError, match=r"name: .*exists already"):
        RunFolder.create(tmp_path, "a", "train")


@pytest.mark.parametrize("name", ["..", ".", "-x", "a" * 101, "a/b"])
def test_a_run_named_like_another_folder_is_refused(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig(**nested(agent="json:loads", tasks="t", name=name))
    assert explain(caught.value, TrainConfig).startswith(f"run.name: got {name!r}, but a name has")


def test_the_step_is_behind_the_runs_own_name(tmp_path: Path) -> None:
    """An @ in the name of a folder above is none."""
    run, step = run_and_step(tmp_path / "me@work" / "r@2")
    assert (run.root, step) == (tmp_path / "me@work" / "r", "2")
    assert run_and_step(tmp_path / "me@work" / "r")[1] == ""


def test_adapters_are_found_by_name(tmp_path: Path) -> None:
    one, both = tmp_path / "one", tmp_path / "both"
    two = [both / "answerer", both / "asker"]
    for path in (one, *two):
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")

    def found(source: Path, **settings: Any) -> dict[str, Path]:
        given = nested(agent="json:loads", **{"evaluation.tasks": "t"}, **settings)
        return adapter_folders(EvalConfig(**given), source)

    assert found(one) == {"policy": one}
    assert found(one, adapter="player") == {"player": one}
    assert found(both) == {"answerer": two[0], "asker": two[1]}
    assert found(both, adapters="asker") == {"asker": two[1]}
    for source, adapters, message in (
        (both, "asker,judge", "has no adapter judge; it has answerer, asker"),
        (one, "asker,judge", "has no adapter"),
        (tmp_path / "nowhere", "asker", "no PEFT folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            found(source, adapters=adapters)


@pytest.mark.parametrize("kept", [0, 5, 300])
def test_a_torn_adapter_is_refused(tmp_path: Path, kept: int) -> None:
    """Whatever a full disk or a copy has left of it."""
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"lora_A": np.ones((8, 8), np.float32)}, str(weights))
    assert find_adapters(tmp_path, "x") == {tmp_path.name: tmp_path}
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=rf"x: {weights} is damaged \(.*bring a copy back"):
        find_adapters(tmp_path, "x")


def test_an_adapter_on_tinker_is_fetched_first(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "r", "x")
    folder.write_json(folder.config, {})
    version = folder.adapter_version("policy", 2)
    version.mkdir(parents=True)
    (version / "tinker.json").write_text(json.dumps({"state": "tinker://a/b", "path": "x"}))
    settings = EvalConfig(**nested(agent="a:b", **{"evaluation.tasks": "t"}))
    with pytest.raises(ConfigError, match=r"is on Tinker; .*: tinker checkpoint"):
        adapter_folders(settings, f"{folder.root}@2")


def test_pruning_leaves_what_is_new_evaluated_checkpointed_or_marked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in range(20):
        folder.adapter_version("policy", step).mkdir(parents=True)
    (folder.checkpoints / "step-00000012").mkdir(parents=True)
    (folder.adapter_version("policy", 3) / "keep").touch()
    for foreign in (folder.adapters / "policy" / "v_mine", folder.checkpoints / "step-mine"):
        foreign.mkdir()
    folder.prune_adapters(4, {0, 5})
    folder.config.write_text("{}")
    for step in (3, 5, 12):
        path = folder.adapter_version("policy", step)
        assert find_adapters(f"{folder.root}@{step}", "x") == {"policy": path}
    (folder.adapters / "policy" / "v_mine").rmdir()  # it is still there
    kept = [int(path.name[1:]) for path in sorted((folder.adapters / "policy").iterdir())]
    assert kept == [0, 3, 5, 12, 16, 17, 18, 19]
    folder.logs.mkdir()
    names = [f"{number:024x}-1.log" for number in range(6)]
    for age, name in enumerate(["gateway.log", "runners.log", *names]):
        (folder.logs / name).touch()
        os.utime(folder.logs / name, (age, age))
    folder.prune_logs(2, {f"{1:024x}"})  # which runs, and has been silent
    left = {"gateway.log", "runners.log", names[1], *names[-2:]}
    assert {path.name for path in folder.logs.iterdir()} == left


def test_a_log_that_its_worker_deletes_meanwhile_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, "r", "x")
    names = [f"{number:024x}-1.log" for number in range(4)]
    for name in names:
        (folder.logs / name).touch()
    found = sorted(os.scandir(folder.logs), key=lambda file: file.name)
    (folder.logs / names[0]).unlink()
    monkeypatch.setattr(os, "scandir", lambda _: iter(found))
    folder.prune_logs(2, set())
    monkeypatch.undo()
    assert len([*folder.logs.iterdir()]) == 2
