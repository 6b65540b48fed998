"""``agentrl prefer``: held-out pairs are told apart after it, by any of the losses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_data import write_lines
from pair_data import pair, write_pairs
from safetensors.torch import load_file

from agentrl.cli.offline import prefer_command, reward_model_command
from agentrl.config.commands import PreferConfig
from agentrl.config.errors import ConfigError
from agentrl.console.output import console
from agentrl.datasets.samples import Example
from agentrl.offline.examples import file_examples, pair_examples
from agentrl.offline.objectives import measure, update
from agentrl.runs.folder import RunFolder
from agentrl.training.setup.algorithm import REFERENCE
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.client import AdamParams, ServiceClient, TrainingClient
from agentrl_trainer.models.loading import load_facts

KILLED = Path(__file__).parents[2] / "support/offline_killed.py"


def flags(home: Path, name: str, *more: object) -> list[str]:
    data = write_pairs(home / "pairs.jsonl", range(100, 148))
    held_out = write_pairs(home / "held_out.jsonl", range(1000, 1024))
    given = (
        "--data", data, "--held-out", held_out, "--runs", home / "runs", "--name", name,
        "--rank", 8, "--batch-size", 8, "--epochs", 1, "--every", 3,
        "--run.checkpoint-every", 2, *more,
    )  # fmt: skip
    return [str(one) for one in given]


def measured(folder: RunFolder, name: str) -> list[float]:
    return [row[f"eval/{name}"] for row in folder.read_metrics() if f"eval/{name}" in row]


def test_held_out_pairs_are_told_apart(tmp_path: Path) -> None:
    with console.capture() as printed:
        prefer_command(*flags(tmp_path, "first"))
    folder = RunFolder(tmp_path / "runs/first")
    # By chance 24 of 24 come once in 16 million; the base model and its copy do not differ.
    assert measured(folder, "rewards/accuracies")[-1] == 1.0
    assert abs(measured(folder, "rewards/margins")[0]) < 1e-5
    assert measured(folder, "rewards/margins")[-1] > 0.05
    assert measured(folder, "loss")[-1] < 0.98 * measured(folder, "loss")[0]
    assert "held-out accuracy" in printed.get()
    assert json.loads(folder.config.read_text())["preference"]["loss"] == "dpo"


def measures(folder: RunFolder, metric: str) -> dict[int, float]:
    """Return a metric by step."""
    return {row["step"]: row[metric] for row in folder.read_metrics() if metric in row}


@pytest.mark.kills
@pytest.mark.parametrize(
    ("name", "command", "more"),
    [
        ("prefer", prefer_command, ["--loss", "kto"]),
        ("reward-model", reward_model_command, ["--loss", "bradley_terry"]),
    ],
)
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_killed_run_makes_the_steps_of_a_whole_one(
    trainers: int, name: str, command: Callable[..., None], more: list[str], tmp_path: Path
) -> None:
    """Bit for bit; with two trainers it makes those of one, but for rounding."""
    folder = RunFolder(tmp_path / "runs/killed")
    killed = [sys.executable, str(KILLED), "4", str(int(signal.SIGKILL)), name]
    ended = subprocess.run(
        [*killed, *flags(tmp_path, "killed", *more, "--trainers", trainers)],
        capture_output=True, text=True, timeout=175, check=False,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    command("--resume", str(folder.root))
    command(*flags(tmp_path, "whole", *more))
    whole = RunFolder(tmp_path / "runs/whole")
    for metric in ("loss", "rewards/margins", "grad_norm", "eval/loss"):
        ours, theirs = (measures(one, metric) for one in (folder, whole))
        assert any(theirs.values())
        assert ours == (theirs if trainers == 1 else pytest.approx(theirs, rel=1e-4, abs=1e-6))
    if trainers > 1:
        return
    ours, theirs = (
        load_file(str(one.adapter / "adapter_model.safetensors")) for one in (folder, whole)
    )
    assert {name: value.numpy().tobytes() for name, value in ours.items()} == {
        name: value.numpy().tobytes() for name, value in theirs.items()
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    source = write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", range(8))
    renderer = Renderer(load_facts("agentrl-tiny").tokenizer)
    return file_examples(str(source), "data.source", renderer, pair_examples).kept


@pytest.fixture
def client(tmp_path: Path) -> TrainingClient:
    service = ServiceClient(folder=tmp_path, device="cpu")
    return service.create_lora_training_client("agentrl-tiny", rank=4, seed=0, name="policy")


def preferring(**tables: Any) -> PreferConfig:
    return PreferConfig.model_validate({"data": {"source": "pairs.jsonl"}} | tables)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_every_loss_widens_the_margin(
    loss: str, client: TrainingClient, pairs: list[Example]
) -> None:
    config = preferring(preference={"loss": loss})
    before = measure(config, client, pairs)
    steps = [update(config, client, pairs, AdamParams(learning_rate=3e-3)) for _ in range(3)]
    after = measure(config, client, pairs)
    assert steps[0]["loss"] == pytest.approx(before["loss"], rel=1e-4)
    assert after["rewards/margins"] > before["rewards/margins"] + 0.003
    assert after["loss"] < before["loss"]
    assert steps[-1]["grad_norm"] > 0


def test_the_reference_is_what_the_adapter_started_from(
    client: TrainingClient, pairs: list[Example], tmp_path: Path
) -> None:
    config = preferring()
    for _ in range(3):
        update(config, client, pairs, AdamParams(learning_rate=3e-3))
    assert measure(config, client, pairs)["rewards/margins"] > 0.01
    client.save_weights_for_sampler(tmp_path / "start").result()
    client.local(lambda learner: learner.add_reference(REFERENCE, tmp_path / "start")).result()
    config = preferring(learning={"init_adapter": tmp_path / "start"})
    assert measure(config, client, pairs)["rewards/margins"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data: give one of source, from_run"),
        (["--data", "a", "--from-run", "b"], "data: give one of source, from_run"),
        (["--data", "a", "--where", "step > 1"], "data.where: has no effect without"),
        (["--data", "a", "--by", "feedback"], "data.by: has no effect without"),
        (["--data", "a", "--gamma", "2"], "preference.gamma: has no effect without"),
        (["--data", "a", "--loss", "kto", "--batch-size", "1"], "learning.batch_size: kto"),
        (["--data", "a", "--init-optimizer"], "learning.init_optimizer: has no effect without"),
        (["--data", "a", "--patience", "1"], "evaluation.patience: has no effect without"),
        (["--data", "bad.jsonl"], r"bad.jsonl, line 2: rejected: messages\[1\]"),
    ],
)
def test_what_cannot_be_trained_is_named_before_there_is_a_run(
    arguments: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = pair(2) | {"rejected": [{"role": "assistant", "content": 5}]}
    write_lines(tmp_path / "bad.jsonl", [pair(1), wrong])
    with pytest.raises(ConfigError, match=message):
        prefer_command(*arguments)
    assert not (tmp_path / "runs").exists()
