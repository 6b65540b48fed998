"""The offline loop: it learns, measures, ends early, and resumes bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from safetensors.torch import load_file

from agentrl.config.commands import OfflineConfig, SftConfig
from agentrl.config.errors import ConfigError
from agentrl.config.settings.models import ModelSettings
from agentrl.console.offline import offline_report
from agentrl.console.output import console
from agentrl.datasets.samples import Example, weighted_row
from agentrl.offline.command import run_offline
from agentrl.offline.run import OfflineRun, OfflineSummary
from agentrl.runs.folder import RunFolder
from agentrl.runs.recorded import open_store, state_of
from agentrl_trainer.models.loading import ModelFacts


def rows(facts: ModelFacts, numbers: range, said: str = "I am {}.") -> list[Example]:
    made: list[Example] = []
    for number in numbers:
        asked = {"role": "user", "content": f"Let's play a game. Say you are {number}."}
        prompt: Any = facts.tokenizer.apply_chat_template(
            [asked], add_generation_prompt=True, return_dict=False
        )
        answer = [*facts.tokenizer.encode(said.format(number)), facts.tokenizer.eos_token_id]
        weights = [0.0] * len(prompt) + [1.0] * len(answer)
        made.append(Example((weighted_row([*prompt, *answer], weights),), str(number)))
    return made


def config(folder: Path, **tables: dict[str, Any]) -> SftConfig:
    given: dict[str, Any] = {
        "data": {"source": "chats.jsonl", "held_out": "held_out.jsonl"},
        "learning": {"epochs": 2, "batch_size": 8, "rank": 8, "learning_rate": 3e-3},
        "evaluation": {"every": 2},
        "run": {"folder": str(folder), "name": "first", "checkpoint_every": 2},
    }
    for name, table in tables.items():
        given[name] = given.get(name, {}) | table
    return SftConfig.model_validate(given)


Examples = tuple[list[Example], list[Example]]


def read(_: OfflineConfig, facts: ModelFacts) -> Examples:
    return rows(facts, range(100, 132)), rows(facts, range(1000, 1008))


def trained(
    config: SftConfig, resume: Path | None, read: Callable[[OfflineConfig, ModelFacts], Examples]
) -> OfflineSummary:
    with patch("agentrl.offline.command.read_examples", read):
        return run_offline(config, resume)


def train(folder: Path, resume: Path | None = None, **tables: dict[str, Any]) -> OfflineSummary:
    return trained(config(folder, **tables), resume, read)


def weights(folder: RunFolder) -> dict[str, bytes]:
    found = load_file(str(folder.adapter / "adapter_model.safetensors"))
    return {name: value.numpy().tobytes() for name, value in found.items()}


def losses(folder: RunFolder) -> list[tuple[Any, ...]]:
    return [
        (row["step"], row.get("loss"), row.get("eval/loss"), row.get("grad_norm"))
        for row in folder.read_metrics()
    ]


@dataclass
class Whole:
    """A run that nothing has interrupted."""

    summary: OfflineSummary
    folder: RunFolder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    home = tmp_path_factory.mktemp("whole")
    return Whole(train(home), RunFolder(home / "first"))


def test_the_held_out_loss_falls_and_the_folder_is_that_of_a_run(whole: Whole) -> None:
    folder, summary = whole.folder, whole.summary
    assert summary.steps == 8
    assert [*summary.held_out] == [0, 2, 4, 6, 8]
    assert summary.held_out[8] < 0.5 * summary.held_out[0]
    assert summary.best == 8
    assert weights(folder)
    best = load_file(str(folder.best_adapter / "adapter_model.safetensors"))
    assert {name: value.numpy().tobytes() for name, value in best.items()} == weights(folder)
    store, row = open_store(folder, read_only=True)
    with contextlib.closing(store):
        assert (row["kind"], state_of(folder, row)) == ("sft", "finished")
        assert store.metrics(row["id"], ["eval/loss"])[8]["eval/loss"] == summary.held_out[8]
    assert json.loads(folder.summary.read_text())["best"] == 8
    assert folder.picture.stat().st_size > 1000


def test_every_epoch_has_all_examples_in_an_order_of_its_own() -> None:
    run: Any = OfflineRun.__new__(OfflineRun)
    run.config, run.examples = config(Path("runs")), [*range(30)]
    first, second = (
        [one for step in steps for one in run.batch(step)] for steps in ((1, 2, 3, 4), (5, 6, 7, 8))
    )
    assert sorted(first) == sorted(second) == [*range(30)]
    assert first != second != [*range(30)] != first


def test_it_ends_early_and_keeps_the_best(tmp_path: Path) -> None:
    def overfits(_: OfflineConfig, facts: ModelFacts) -> Examples:
        other = rows(facts, range(1000, 1004), "I am not {}.")
        return rows(facts, range(100, 116)), other

    how = config(
        tmp_path, learning={"epochs": 9}, evaluation={"every": 1, "patience": 2},
        run={"keep_adapters": 1},
    )  # fmt: skip
    summary = trained(how, None, overfits)
    assert summary.why is not None
    assert "evaluation.patience: 2 measures in a row" in summary.why
    assert summary.best is not None
    assert summary.steps == summary.best + 2 < 18
    folder = RunFolder(tmp_path / "first")
    assert json.loads(folder.summary.read_text())["why"] == summary.why
    best = folder.adapter_version("policy", summary.best) / "adapter_model.safetensors"
    kept = folder.best_adapter / "adapter_model.safetensors"
    checkpointed = {int(path.name[-8:]) for path in folder.checkpoints.glob("step-*")}
    assert {path.name for path in (folder.adapters / "policy").iterdir()} == {
        f"v{step:06d}" for step in {summary.best, summary.steps, *checkpointed}
    }
    assert kept.read_bytes() == best.read_bytes()


def test_a_resumed_run_refuses_what_would_make_other_steps(whole: Whole, tmp_path: Path) -> None:
    root = shutil.copytree(whole.folder.root, tmp_path / "first")  # that one is locked
    with pytest.raises(ConfigError, match=r"learning.rank: .* was started with 8, not 4\."):
        train(root.parent, root, learning={"rank": 4})
    with pytest.raises(ConfigError, match=r"resume: .* was trained on other examples"):
        trained(
            config(root.parent, data={"source": "other.jsonl"}), root,
            lambda _, facts: (rows(facts, range(9)), rows(facts, range(3))),
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"warmup_steps: "):
        train(root.parent, root, learning={"warmup_steps": 100})
    kept = RunFolder(root).read_config()  # of which the next --resume takes its settings
    assert (kept["data"]["source"], kept["learning"]["warmup_steps"]) == ("chats.jsonl", 0)
    with pytest.raises(ConfigError, match=r"name: .* exists already; .* --resume"):
        train(root.parent)


def test_a_run_goes_back_to_a_kept_step(whole: Whole, tmp_path: Path) -> None:
    root = shutil.copytree(whole.folder.root, tmp_path / "first")
    assert train(tmp_path, Path(f"{root}@6")).steps == 8
    folder = RunFolder(root)
    assert len([*folder.checkpoints.glob("superseded-step-00000008-*")]) == 1
    assert weights(folder) == weights(whole.folder)
    assert losses(folder) == losses(whole.folder)
    assert json.loads(folder.summary.read_text())["seconds"] == pytest.approx(
        sum(row.get(f"seconds/{what}", 0) for row in folder.read_metrics()
            for what in ("update", "evaluation")), abs=0.01,
    )  # fmt: skip


def test_two_trainers_go_on_with_the_steps_of_one(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(whole.folder.root, tmp_path / "first")
    cores = whole.folder.read_config()["model"]["cores"]
    monkeypatch.setattr("agentrl.offline.command.available_cores", lambda: cores + 1)
    with console.capture() as printed:
        train(tmp_path, Path(f"{root}@6"), learning={"trainers": 2})
    for name, before in {"learning.trainers": 1, "model.cores": cores}.items():
        said = f"step 6 was computed with {name} {before}, the next ones with {before + 1}: "
        assert said in " ".join(printed.get().split())
    for many, single in zip(losses(RunFolder(root)), losses(whole.folder), strict=True):
        known = [value is not None for value in single]
        assert [*compress(many, known)] == pytest.approx([*compress(single, known)], rel=1e-5)


def test_pruning_leaves_what_would_be_the_best_of_each_checkpoint(tmp_path: Path) -> None:
    run: Any = OfflineRun.__new__(OfflineRun)
    run.folder = RunFolder(tmp_path)
    run.held_out_losses = {0: 5.0, 1: 3.5, 2: 3.0, 3: 4.0, 4: 2.0, 5: 9.0, 6: 8.0}
    (run.folder.checkpoints / "step-00000003").mkdir(parents=True)
    for step in run.held_out_losses:
        run.folder.adapter_version("policy", step).mkdir(parents=True)
    run.prune(1)
    kept = sorted(path.name for path in (run.folder.adapters / "policy").iterdir())
    assert kept == ["v000002", "v000003", "v000004", "v000006"]


def test_a_step_whose_loss_was_not_finite_is_left_out_of_the_report(whole: Whole) -> None:
    with patch.object(
        RunFolder, "read_metrics", return_value=[{"step": 2, "eval/rewards/accuracies": None}]
    ):
        for losses, said in (([2.0, 1.0], "2.0000 → 1.0000 in 3 steps"), ([], "never finite")):
            summary = OfflineSummary(3, losses, {}, None, 1.0, None)
            console = Console(record=True, width=120)
            console.print(offline_report(whole.folder, summary, ModelSettings()))
            assert said in console.export_text()
