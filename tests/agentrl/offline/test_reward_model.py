"""``agentrl reward-model``: it tells held-out answers apart, scores rollouts, and is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_data import TOOL, asked, write_lines
from pair_data import answer, qwen, scored, write_pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from agentrl.cli.export import export_command
from agentrl.cli.offline import reward_model_command
from agentrl.config.commands import ServeConfig
from agentrl.config.errors import ConfigError
from agentrl.console.output import console
from agentrl.runs.folder import RunFolder, adapter_folders
from agentrl.scoring.functions import RewardFunction, ScoringContext
from agentrl.scoring.reward_model import RewardModel
from agentrl_trainer.models.sources import resolve_model

GOOD, BAD = "I am {}.", "I am Qwen, not {}."


def flags(home: Path, name: str, *more: object) -> list[str]:
    given = ("--runs", home / "runs", "--name", name, "--rank", 8, "--batch-size", 8, "--every", 3)
    return [str(one) for one in (*given, *more)]


def measured(folder: RunFolder, name: str) -> list[float]:
    return [row[f"eval/{name}"] for row in folder.read_metrics() if f"eval/{name}" in row]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    home = tmp_path_factory.mktemp("rm")
    data = write_pairs(home / "pairs.jsonl", range(100, 148), qwen)
    held_out = write_pairs(home / "held_out.jsonl", range(1000, 1024), qwen)
    more = ("--data", data, "--held-out", held_out, "--epochs", 2)
    with console.capture() as printed:
        reward_model_command(*flags(home, "helpful", *more))
    assert "--rewards model:" in printed.get()
    return RunFolder(home / "runs/helpful")


@pytest.fixture(scope="module")
def model(trained: RunFolder) -> RewardModel:
    return RewardModel(trained.root)


def test_held_out_pairs_are_told_apart(trained: RunFolder) -> None:
    accuracy = measured(trained, "rewards/accuracies")
    assert accuracy[-1] == 1.0  # by chance once in 16 million
    assert measured(trained, "rewards/margins")[-1] > 0.5
    assert measured(trained, "loss")[-1] < 0.5 * measured(trained, "loss")[0]


def chats(number: int) -> list[list[dict[str, Any]]]:
    return [[asked(number), answer(text.format(number))] for text in (GOOD, BAD)]


def score(model: RewardModel, said: list[Any]) -> list[Any]:
    return model([traced(messages) for messages in said])


def traced(messages: Any, *calls: Any) -> Any:
    return SimpleNamespace(rollout_id="r", messages=messages, calls=calls)


def test_it_scores_conversations_and_rollouts(model: RewardModel) -> None:
    said = [chat for number in range(2000, 2006) for chat in chats(number)]
    scores = score(model, said)
    assert all(good > bad for good, bad in zip(scores[0::2], scores[1::2], strict=True))
    assert score(model, said[3:4]) == pytest.approx(scores[3:4], abs=1e-5)
    on_cpu = model._loaded[0].base.device.type == "cpu"
    assert RewardFunction("helpful", model).takes_cores is on_cpu
    noted: list[str] = []
    store: Any = None
    model.connect(ScoringContext(store, "run", Path(), noted.append))
    traces: Any = [
        SimpleNamespace(rollout_id=f"r{at}", messages=messages, calls=[])
        for at, messages in enumerate([said[0], [asked(1)], [asked(2)], said[1]])
    ]
    found = model(traces)
    assert [found[0], found[3]] == pytest.approx(scores[:2], abs=1e-5)
    assert found[1:3] == [None, None]
    assert len(noted) == 1  # once by reason
    assert "cannot score r1" in noted[0]
    assert model([traced([asked(1), answer("Yes."), asked(2)])]) == [None]
    with_tools = call_of(said[0], tools=[TOOL])
    assert model([traced(said[0], with_tools)])[0] != pytest.approx(scores[0], abs=1e-5)
    # The tools are those of another agent.
    found = model([traced(said[0], call_of(said[0]), call_of(said[1], tools=[TOOL]))])
    assert found[0] == pytest.approx(scores[0], abs=1e-5)


def test_an_answer_that_was_cut_off_is_scored_without_an_end(model: RewardModel) -> None:
    """So it is recorded, and so it was learned."""
    messages = chats(2000)[0]
    whole = model._tokens(traced(messages, call_of(messages)))
    cut = model._tokens(traced(messages, call_of(messages, finish_reason="length")))
    assert cut == whole[:-1]
    assert model._loaded[1].is_stop(whole[-1])


def call_of(messages: list[dict[str, Any]], finish_reason: str = "stop", **request: Any) -> Any:
    return SimpleNamespace(
        response_id="chatcmpl-1", request={"messages": messages[:-1], **request},
        response={"choices": [{"message": messages[-1]}]}, finish_reason=finish_reason,
    )  # fmt: skip


def test_what_is_exported_scores_the_same(
    trained: RunFolder, model: RewardModel, tmp_path: Path
) -> None:
    with console.capture() as printed:
        export_command(str(trained.root), tmp_path / "merged", merged=True)
        export_command(str(trained.root), tmp_path / "peft")
    assert "AutoModelForSequenceClassification" in printed.get()
    rows = [model._tokens(traced(messages)) for messages in chats(3001)]
    scores = score(model, chats(3001))
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        found = plain(input_ids=ids, attention_mask=(ids != 0).long()).logits
    assert found.shape == (2, 1)
    assert scores == pytest.approx(found[:, 0].tolist(), abs=1e-5)
    assert score(RewardModel(tmp_path / "peft"), chats(3001)) == pytest.approx(scores)


def test_the_end_of_a_turn_is_no_padding(
    trained: RunFolder, model: RewardModel, tmp_path: Path
) -> None:
    """transformers would take it for padding, and score the token before it."""
    base = shutil.copytree(resolve_model("agentrl-tiny"), tmp_path / "base")
    for file, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        settings = json.loads((base / file).read_text())
        settings[key] = settings[key.replace("pad", "eos")]
        (base / file).write_text(json.dumps(settings))
    with console.capture() as printed:
        export_command(str(trained.root), tmp_path / "peft", model=str(base))
        export_command(str(trained.root), tmp_path / "merged", merged=True, model=str(base))
    [load] = [line for line in printed.get().splitlines() if "AutoPeftModel" in line]
    padding = int(load.partition("pad_token_id=")[2].partition(")")[0])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert plain.config.pad_token_id == padding
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    rows = [model._tokens(traced(messages)) for messages in chats(3001)]
    assert len(rows[0]) != len(rows[1])
    with torch.no_grad():
        found = plain(**tokenizer.pad({"input_ids": rows}, return_tensors="pt")).logits[:, 0]
    assert score(model, chats(3001)) == pytest.approx(found.tolist(), abs=1e-5)


def test_no_optimizer_has_its_head() -> None:
    with pytest.raises(ConfigError, match="init_optimizer: a reward model has a score head"):
        reward_model_command("--data", "a", "--init-adapter", "b", "--init-optimizer")


def test_regression_learns_scores(tmp_path: Path) -> None:
    records = [one for number in range(100, 148) for one in scored(number)]
    data = write_lines(tmp_path / "scores.jsonl", records)
    more = ("--data", data, "--held-out", 0.25, "--loss", "regression", "--epochs", 3)
    reward_model_command(*flags(tmp_path, "scores", *more))
    folder = RunFolder(tmp_path / "runs/scores")
    explained = measured(folder, "rewards/explained")
    assert explained[0] < 0.3
    assert explained[-1] > 0.7


def test_a_reward_model_and_a_policy_are_not_taken_for_each_other(
    trained: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"adapter_path: .* is a reward model, which writes no"):
        adapter_folders(ServeConfig(), trained.root)
    assert RewardModel(trained.root).adapter == trained.best_adapter
    with pytest.raises(ConfigError, match=r"rewards: .* is no run folder"):
        RewardModel("nothing")
    config = trained.best_adapter / "adapter_config.json"
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / config.name).write_text(config.read_text().replace("SEQ_CLS", "CAUSAL_LM"))
    with pytest.raises(ConfigError, match="is an adapter that writes answers"):
        RewardModel(policy)
