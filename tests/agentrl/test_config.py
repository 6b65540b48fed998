from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.config import ConfigError, TrainConfig, explain
from agentrl.run_folder import RunFolder
from agentrl.tasks import load_tasks
from agentrl.train import default_learning_rate, steps_of_one_epoch, tasks_of_step


def agentrl(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env, "COLUMNS": "200"},
        check=False,
    )


def test_a_wrong_value_names_field_value_and_choices() -> None:
    done = agentrl("train", "x:y", "--tasks", "t", "--loss", "pppo", "--runners", "0")
    assert done.returncode == 2
    for part in ("loss", "'pppo'", "'cispo'", "runners", "greater than or equal to 1"):
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.py:f", "--tasks", "t"], "nowhere.py"),
        (["train", "json:loads", "--tasks", "no.jsonl"], "tasks: cannot read 'no.jsonl'"),
        (["train", "json:loads"], "tasks: is missing"),
        (["train", "--tasks", "t"], "agent"),
        (["train", "json:loads", "--tasks", "t", "--config", "x.ini"], ".toml, .yaml or .yml"),
        (["train", "json:loads", "--resume", "nowhere"], "is no run folder"),
        (["serve", "--host", "0.0.0.0"], "operator key"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    done = agentrl(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_file_environment_and_flags_agree(tmp_path: Path, suffix: str) -> None:
    """Flags win over the environment, that over the file: seen in which error is reported."""
    file = tmp_path / f"c.{suffix}"
    line = "{}: {}\n" if suffix == "yaml" else "{} = {}\n"
    file.write_text(line.format("rank", 0) + line.format("tasks", '"t"'))
    base = ("train", "json:loads", "--config", str(file))
    assert "rank: got '0'" in agentrl(*base).stderr
    assert "rank: got '-1'" in agentrl(*base, AGENTRL_RANK="-1").stderr
    assert "rank: got '-2'" in agentrl(*base, "--rank", "-2", AGENTRL_RANK="-1").stderr


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('tasks = "t"\nlearning_rat = 1.0\n')
    done = agentrl("train", "json:loads", "--config", str(file))
    assert done.returncode == 2
    assert "learning" in done.stderr


def test_groups_must_be_able_to_compare() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig(agent="a:b", tasks=Path("t"), group_size=1)
    assert "group_size 1 is too small" in explain(caught.value, TrainConfig)
    TrainConfig(agent="a:b", tasks=Path("t"), group_size=1, estimator="reinforce", min_group=1)


def test_tasks_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"n": 1}\n\n{"n": 2}\n')
    assert load_tasks(file, "tasks") == [{"n": 1}, {"n": 2}]
    file.write_text('{"n": 1}\n[2]\n')
    with pytest.raises(ConfigError, match=r"tasks: .*line 2 is a JSON list"):
        load_tasks(file, "tasks")
    file.write_text('{"n": 1\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        load_tasks(file, "tasks")


def test_every_epoch_visits_every_task_once() -> None:
    steps = steps_of_one_epoch(10, 4)
    assert steps == 3
    seen = [task for step in range(1, 6) for task in tasks_of_step(step, 10, 4, seed=3)]
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10))
    assert seen[:10] != seen[10:20]
    assert tasks_of_step(2, 10, 4, seed=3) == tasks_of_step(2, 10, 4, seed=3)
    assert tasks_of_step(2, 10, 4, seed=3) != tasks_of_step(2, 10, 4, seed=4)


def test_learning_rate_falls_with_size() -> None:
    assert default_learning_rate(850_000) == pytest.approx(1.5e-3)
    assert default_learning_rate(4_000_000_000) == pytest.approx(4e-5)
    assert 4e-5 < default_learning_rate(600_000_000) < 1.5e-3


def test_torn_metrics_are_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "x": 1})
    folder.append_metrics({"step": 2, "x": 2})
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "x"')
    assert [row["step"] for row in folder.read_metrics()] == [1, 2]
    folder.keep_metrics(lambda row: row["step"] <= 1)
    assert json.loads(folder.metrics.read_text()) == {"step": 1, "x": 1}


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a", "train").config.write_text("{}")
    with pytest.raises(ConfigError, match=r"name: .*exists already"):
        RunFolder.create(tmp_path, "a", "train")
