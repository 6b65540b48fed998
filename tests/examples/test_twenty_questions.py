"""20 Questions: its nouns, its offline answerer, and its CrewAI flow, by itself and trained."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
from settings import flags

from agentrl.runs.folder import RunFolder
from agentrl_tracer.schemas import SkipReason
from agentrl_tracer.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "twenty_questions"


@pytest.fixture(scope="module")
def answerer() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield import_module("answerer")


def rows(name: str) -> list[dict[str, Any]]:
    text = (EXAMPLE / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# --- the nouns


def test_two_hundred_nouns_in_eight_categories_each_split_twenty_to_five() -> None:
    train, test = rows("train"), rows("test")
    nouns = [row["noun"] for row in train + test]
    assert len(nouns) == len(set(nouns)) == 200
    assert all(noun == noun.strip().lower() and noun.isalpha() for noun in nouns)
    assert len({row["category"] for row in train}) == 8
    for split, size in ((train, 20), (test, 5)):
        assert set(Counter(row["category"] for row in split).values()) == {size}
    known = {name for row in train for name in row["attributes"]}
    assert {name for row in test for name in row["attributes"]} <= known
    simple = {"animal", "clothing", "food", "vehicle"}
    for name in ("train", "test"):
        assert rows(f"simple_{name}") == [row for row in rows(name) if row["category"] in simple]


# --- the answerer


@pytest.mark.parametrize(
    ("noun", "question", "answer", "correct"),
    [
        ("owl", "Is it an animal?", "yes", False),
        ("owl", "Can it fly?", "yes", False),
        ("owl", "Does it live or move in water?", "no", False),
        ("owl", "Is it bigger than a car?", "no", False),
        ("owl", "Is it an owl?", "yes", True),
        ("owl", "Is it an eagle?", "no", False),
        ("owl", "Is it a unicorn?", "no", False),
        ("owl", "is it owl", "yes", True),
        ("owl", "Is it not alive?", "n/a", False),
        ("owl", "What is it?", "n/a", False),
        ("owl", "Does it have four legs?", "n/a", False),
        ("lamp", "Is it bigger than a house?", "n/a", False),
        ("shirt", "Can you wear it?", "yes", False),
        ("piano", "Is it a musical instrument?", "yes", False),
        ("car", "Does it have wheels?", "yes", False),
    ],
)
def test_rules(answerer: ModuleType, noun: str, question: str, answer: str, correct: bool) -> None:
    found = answerer.verdict(noun, noun, question)
    assert (found["yes_or_no"], found["correct"]) == (answer, correct), found


def test_the_rules_understand_every_question_that_the_tiny_model_knows(
    answerer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parents[1] / "scripts" / "tiny_model")
    from nouns import PROPERTIES

    for row in rows("train"):
        for name, (question, _) in PROPERTIES.items():
            expected = "yes" if name in row["attributes"] else "no"
            found = answerer.verdict(row["noun"], row["category"], question.format(x="it"))
            assert found["yes_or_no"] == expected, (row, question)
    # Naming the category wins the simple game.
    assert answerer.verdict("bread", "food", "Is it food?")["correct"]
    assert not answerer.verdict("bread", "food", "Can you eat it?")["correct"]


@pytest.mark.parametrize(("simple", "longest"), [(True, 3), (False, 20)])
def test_the_clumsy_player_is_understood_and_names_no_test_noun(
    answerer: ModuleType, simple: bool, longest: int
) -> None:
    clumsy = import_module("clumsy")
    rng = random.Random(0)
    games = [clumsy.game(rng, simple=simple) for _ in range(200)]
    assert max(map(len, games)) == longest
    assert min(map(len, games)) < longest  # a game ends when it is won
    assert {answer for turns in games for _, answer in turns} == {"yes", "no"}
    words = {word for turns in games for asked, _ in turns for word in asked.strip("?").split()}
    assert not words & {row["noun"] for row in rows("test")}


@pytest.mark.parametrize(
    ("simple", "low", "high"),
    [
        (True, 0.65, 0.75),  # 0.44 without reading, 0.77 when all answers are read
        (False, 0.52, 0.61),  # 0.30 without reading, 0.65 when all are read
    ],
)
def test_the_clumsy_player_reads_most_answers(
    answerer: ModuleType, simple: bool, low: float, high: float
) -> None:
    clumsy = import_module("clumsy")
    rng = random.Random(0)
    last = [clumsy.game(rng, simple=simple)[-1] for _ in range(400)]
    wins = "category" if simple else "noun"
    named = {clumsy.naming(row[wins]) for row in rows("train")}
    won = sum(asked in named and answer == "yes" for asked, answer in last)
    assert low < won / len(last) < high


def test_the_search_model_knows_training_nouns_only(answerer: ModuleType) -> None:
    found = answerer.search("a vehicle that can fly")
    assert "plane" in found
    assert "helicopter" not in found  # held out
    assert answerer.search("colorless green ideas") == "Nothing found."


def test_ctrl_c_leaves_the_command_its_time_to_end() -> None:
    command = "import time\ntry: print('up', flush=True); time.sleep(60)\n"
    command += "except KeyboardInterrupt: time.sleep(1); print('in order'); raise SystemExit(7)"
    with subprocess.Popen(
        [
            *(sys.executable, str(EXAMPLE / "answerer.py"), "--port", "18766", "--"),
            *(sys.executable, "-c", command),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        os.killpg(running.pid, signal.SIGINT)
        said, errors = running.communicate(timeout=30)
    assert (said, running.returncode) == ("in order\n", 7), errors
    assert "Traceback" not in errors


# --- the flow


@pytest.fixture
def conversations() -> list[list[dict[str, str]]]:
    """The messages of each call of the scripted player."""
    return []


@pytest.fixture
def endpoint(
    answerer: ModuleType,
    conversations: list[list[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The offline server, with a scripted player: it asks for the categories in turn."""
    names = ["food", "an animal", "a vehicle", "clothing", "a tool"]
    plain = answerer.reply

    def reply(request: dict[str, Any]) -> str:
        if request["model"] != "player":
            return plain(request)
        conversations.append(request["messages"])
        # After the last "first question": the ones before it are the prompt's example.
        asked = str(request["messages"]).split("first question")[-1].count("Is it ")
        return f"Is it {names[asked]}?" if asked < len(names) else "Is it a dog?"

    monkeypatch.setattr(answerer, "reply", reply)
    server = answerer.Server(("127.0.0.1", 0), answerer.Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_evaluate_needs_no_agentrl_and_any_endpoint_will_do(
    endpoint: str, conversations: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
    env |= {
        "OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": "none", "PLAYER_MODEL": "player",
        "ANSWERER_MODEL": "answerer", "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false", "CREWAI_STORAGE_DIR": str(tmp_path),
    }  # fmt: skip
    games = tmp_path / "games.jsonl"
    argv = [sys.executable, str(EXAMPLE / "evaluate.py"), "--simple", "--small", "--per-category"]
    done = subprocess.run(
        [*argv, "1", "--json", str(games)], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in games.read_text().splitlines()]
    assert len(found) == 8
    # Three questions reach the first three categories, after one, two and three turns.
    turns = {"food": 1, "animal": 2, "vehicle": 3, "clothing": 3}
    assert {row["category"]: row["turns"] for row in found} == turns
    assert {row["category"] for row in found if row["won"]} == {"food", "animal", "vehicle"}
    assert "75% (3/4)" in done.stdout.splitlines()[-2]
    # Each call continues the conversation of an earlier one.
    assert len(conversations) == sum(row["turns"] for row in found)
    for messages in conversations:
        assert messages[0]["role"] == "system"
        if "first question" not in messages[-1]["content"]:
            assert messages[:-2] in conversations


def test_player_trains_and_answerer_is_recorded(tmp_path: Path) -> None:
    """A step of the real thing: CrewAI in runners, gateway, offline answerer, trainer."""
    url = "http://127.0.0.1:18765/v1"
    tasks = tmp_path / "tasks.jsonl"  # one noun of each category
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows("simple_train")[::20]))
    settings = {
        "tasks": tasks, "runs": tmp_path, "name": "run", "runners": 1, "batch_size": 4,
        "group_size": 4, "steps": 1, "learning_rate": 4e-3, "rollouts_per_process": 16,
        "models": json.dumps({"answerer": {"model": "openai/answerer", "api_base": url}}),
    }  # fmt: skip
    command = [
        *(sys.executable, str(EXAMPLE / "answerer.py"), "--port", "18765", "--"),
        *(sys.executable, "-m", "agentrl", "train", f"{EXAMPLE / 'agent.py'}:simple"),
        *flags(**settings),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    with contextlib.closing(Store(str(RunFolder(tmp_path / "run").store))) as store:
        calls = store.calls()
    player = [call for call in calls if call.adapter == "policy"]
    others = [call for call in calls if call.model == "answerer"]
    assert len(player) + len(others) == len(calls)
    assert len(player) == len(others) >= 16
    assert all(call.trained_step is None for call in others)
    assert {call.skip_reason for call in others} == {SkipReason.NOT_TRAINABLE_MODEL}
    assert any(call.trained_step is not None for call in player)
    assert max(Counter(call.attempt_id for call in player).values()) == 3  # multi-turn
