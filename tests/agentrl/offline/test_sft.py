"""``agentrl sft``: from chats, rollouts and served calls to an adapter that does what they show."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_data import TOOL, asked, clerk, game, result, wanted, write_lines
from running_gateway import running
from safetensors.torch import load_file
from ui_pages import Recorded

from agentrl.cli.offline import sft_command
from agentrl.config.errors import ConfigError
from agentrl.console.output import console
from agentrl.datasets.chats import to_chat
from agentrl.datasets.rendering import chat_rows
from agentrl.history.export import paths_of
from agentrl.offline.examples import chat_examples, split
from agentrl.runs.folder import RunFolder, find_adapters
from agentrl.runs.recorded import open_store, state_of
from agentrl.samplers.embedded import EmbeddedSampler
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_trainer.data.training_row import to_training_row
from agentrl_trainer.models.loading import load_base, load_facts

KILLED = Path(__file__).parents[2] / "support/offline_killed.py"


def sft(*arguments: object) -> None:
    sft_command(*map(str, arguments))


def held_out_losses(folder: RunFolder) -> dict[int, float]:
    rows = folder.read_metrics()
    return {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}


def tensors(folder: Path) -> dict[str, bytes]:
    found = load_file(str(folder / "adapter_model.safetensors"))
    return {name: value.numpy().tobytes() for name, value in found.items()}


@dataclass
class Trained:
    folder: RunFolder
    said: str
    """What the command printed."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run on games and a clerk's chats, with an example that is too long."""
    home = tmp_path_factory.mktemp("sft")
    chats = [*map(game, range(100, 196)), *map(clerk, range(20, 84)), game(7, weight=0)]
    long = game(8)
    long["messages"][0]["content"] += " Please." * 300
    write_lines(home / "chats.jsonl", [*chats, long])
    write_lines(home / "held_out.jsonl", [*map(game, range(1000, 1008)), *map(clerk, (11, 13))])
    with console.capture() as printed:
        sft(
            "--data", home / "chats.jsonl", "--held-out", home / "held_out.jsonl",
            "--runs", home / "runs", "--name", "first", "--learning-rate", "4e-3", "--rank", 16,
            "--batch-size", 16, "--epochs", 5, "--learning.max-length", 400,
        )  # fmt: skip
    return Trained(RunFolder(home / "runs/first"), printed.get())


def test_the_held_out_loss_falls_and_what_is_left_out_is_said(trained: Trained) -> None:
    losses = held_out_losses(trained.folder)
    assert losses[50] < 0.2 * losses[0]
    assert "train on 160 examples" in trained.said
    left_out = "1 chats without an answer that trains (all); 1 rows longer than 400 tokens"
    assert f"examples: left out are {left_out}" in " ".join(trained.said.split())
    assert f"agentrl serve --adapter-path {trained.folder.best_adapter}" in trained.said


@pytest.fixture(scope="module")
def sampler(trained: Trained) -> Iterator[EmbeddedSampler]:
    made = EmbeddedSampler(load_base("agentrl-tiny", device="cpu", dtype="float32"))
    made.start()
    made.load_now("policy", 1, str(trained.folder.adapter))
    yield made
    made.stop()


def test_the_adapter_does_what_it_was_shown_and_is_recorded_with_the_tokens_that_it_learned(
    sampler: EmbeddedSampler, tmp_path: Path
) -> None:
    renderer = Renderer(load_base("agentrl-tiny", device="cpu").tokenizer)
    with running(tmp_path, renderer, {"temperature": 0.0}, sampler=sampler) as gateway:
        clients = [
            openai.OpenAI(base_url=gateway.base_url(claim), api_key=claim.key)
            for claim in gateway.claims
        ]

        def ask(client: openai.OpenAI, said: list[Any], **more: Any) -> Any:
            answer = client.chat.completions.create(model="policy", messages=said, **more)
            message = answer.choices[0].message
            said.append(json.loads(message.model_dump_json(exclude_none=True)))
            return message

        game_of = [asked(1003)]
        assert ask(clients[0], game_of).content == "I am 1003."
        [call] = ask(clients[1], clerk_of := [wanted(12)], tools=[TOOL]).tool_calls
        assert json.loads(call.function.arguments) == {"item": 12}
        clerk_of.append(result(12, call.id))
        assert ask(clients[1], clerk_of, tools=[TOOL]).content == "13."
        ids = [claim.attempt_id for claim in gateway.claims[:2]]
        recorded = [gateway.store.calls(attempt_ids=[one]) for one in ids]
    for calls, chat in zip(
        recorded, ({"messages": game_of}, {"messages": clerk_of, "tools": [TOOL]}), strict=True
    ):
        [path] = paths_of(calls, imitated=True)
        theirs = to_training_row(path, dict.fromkeys(path.call_ids, 1.0))
        [ours] = chat_rows(renderer, to_chat(chat), "all")
        assert (ours.tokens, ours.mask, ours.advantages) == (
            theirs.tokens, theirs.mask, theirs.advantages,
        )  # fmt: skip


def test_the_best_rollouts_of_a_run_are_examples(recorded: Recorded, tmp_path: Path) -> None:
    with console.capture() as printed:
        sft(
            "--from-run", recorded.root / recorded.other, "--best-of", 1, "--held-out", "0.25",
            "--runs", tmp_path, "--name", "best", "--learning-rate", "4e-3", "--batch-size", 4,
            "--epochs", 4, "--train-on", "last",
        )  # fmt: skip
    said = " ".join(printed.get().split())
    assert "rollouts beside the best 1 of their task" in said
    assert "rollouts of held-out tasks (name purpose in --where to take them)" in said
    assert re.search(
        r"train on (\d+) examples of \1 tasks.* hold out (\d+) examples of \2 tasks", said
    )
    folder = RunFolder(tmp_path / "best")
    found = held_out_losses(folder)
    assert found[max(found)] < 0.7 * found[0]
    [model] = find_adapters(f"{folder.root}@best", "adapter_path").values()
    assert model == folder.best_adapter


def flags(home: Path, name: str) -> list[str]:
    data = write_lines(home / "chats.jsonl", [*map(game, range(100, 132))])
    held_out = write_lines(home / "held_out.jsonl", [*map(game, range(1000, 1004))])
    given = (
        "--data", data, "--held-out", held_out, "--runs", home / "runs", "--name", name,
        "--learning-rate", "3e-3", "--rank", 8, "--batch-size", 8, "--epochs", 2,
        "--evaluation.every", 2, "--run.checkpoint-every", 2,
    )  # fmt: skip
    return [str(one) for one in given]


def killed(step: int, number: signal.Signals, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KILLED), str(step), str(int(number)), "sft", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=175, check=False)


def losses(folder: RunFolder) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "eval/loss", "grad_norm")
    return [tuple(map(row.get, names)) for row in folder.read_metrics()]


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs/killed")
    ended = killed(3, signal.SIGTERM, *flags(tmp_path, "killed"))
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert f"continue it with:  agentrl sft --resume {folder.root}" in ended.stderr
    store, row = open_store(folder, read_only=True)
    with contextlib.closing(store):
        assert state_of(folder, row) == "interrupted"
    ended = killed(5, signal.SIGKILL, "--resume", str(folder.root))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert losses(folder)[-1][0] == 4
    shutil.rmtree(folder.best_adapter)  # as if it had been killed before it was copied
    shutil.copytree(folder.adapter_version("policy", 4), folder.adapter_version("policy", 99))
    sft("--resume", folder.root)
    sft(*flags(tmp_path, "whole"))
    whole = RunFolder(tmp_path / "runs/whole")
    assert losses(folder) == losses(whole)
    assert tensors(folder.adapter) == tensors(whole.adapter)
    assert tensors(folder.best_adapter) == tensors(whole.best_adapter)
    versions = [sorted(one.adapters.glob("policy/*")) for one in (folder, whole)]
    assert [one.name for one in versions[0]] == [one.name for one in versions[1]]


@pytest.mark.kills
def test_two_trainers_that_are_killed_make_the_steps_of_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs/killed")
    ended = killed(5, signal.SIGKILL, *flags(tmp_path, "killed"), "--trainers", "2")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    sft("--resume", folder.root)
    sft(*flags(tmp_path, "whole"))
    for many, single in zip(
        losses(folder), losses(RunFolder(tmp_path / "runs/whole")), strict=True
    ):
        known = [value is not None for value in single]
        assert [*compress(many, known)] == pytest.approx([*compress(single, known)], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data: give one of source, from_run"),
        (["--data", "a", "--from-run", "b"], "data: give one of source, from_run"),
        (["--data", "a", "--best-of", "2"], "data.best_of: has no effect without data.from_run"),
        (["--data", "a", "--where", "step > 1"], "data.where: has no effect without"),
        (["--data", "a", "--patience", "2"], "evaluation.patience: has no effect without"),
        (["--from-run", "a", "--train-on", "tagged"], "data.train_on: tagged needs data.source"),
        (["--data", "bad.jsonl"], r"bad.jsonl, line 2: messages\[1\]\.content"),
        (["--data", "bad.jsonl", "--held-out", "2.5"], "data.held_out: 2.5 of 1 tasks leaves"),
        (["--resume", "runs/none"], "resume: 'runs/none' is no run folder"),
        (["agent.py", "--data", "a"], "agent"),
    ],
)
def test_what_cannot_be_trained_is_named_before_there_is_a_run(
    arguments: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = game(2)
    wrong["messages"][1]["content"] = 5
    records = [game(1)] if "2.5" in arguments else [game(1), wrong]
    write_lines(tmp_path / "bad.jsonl", records)
    with pytest.raises(ConfigError, match=message):
        sft(*arguments)
    assert not (tmp_path / "runs").exists()


def test_answers_to_one_prompt_are_all_held_out_or_none() -> None:
    renderer, left_out = Renderer(load_facts("agentrl-tiny").tokenizer), Counter[str]()
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": said}]}
        for n in range(10)
        for said in ("yes", "no", "why")
    ]
    examples = [one for chat in chats for one in chat_examples("all", renderer, chat, left_out)]
    train, held_out = split(examples, 0.2, 0)
    assert (len(train), len(held_out), len({one.task for one in examples})) == (24, 6, 10)
    assert not {one.task for one in train} & {one.task for one in held_out}
