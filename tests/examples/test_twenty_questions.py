"""20 Questions: its nouns, its offline answerer, and its CrewAI flow, by itself and trained."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
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


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"twenty_questions_{name}", EXAMPLE / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def answerer() -> ModuleType:
    return load("answerer")


def rows(name: str) -> list[dict[str, Any]]:
    text = (EXAMPLE / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# --- the nouns -------------------------------------------------------------------------------


def test_two_hundred_nouns_in_eight_categories_each_split_twenty_to_five() -> None:
    train, test = rows("train"), rows("test")
    nouns = [row["noun"] for row in train + test]
    assert len(nouns) == 200
    assert len(set(nouns)) == 200
    assert all(noun == noun.strip().lower() and noun.isalpha() for noun in nouns)
    assert len({row["category"] for row in train}) == 8
    assert set(Counter(row["category"] for row in train).values()) == {20}
    assert set(Counter(row["category"] for row in test).values()) == {5}


def test_attributes_are_consistent(answerer: ModuleType) -> None:
    for row in rows("train") + rows("test"):
        held = set(row["attributes"])
        assert set(row) == {"noun", "category", "attributes"}
        assert row["attributes"] == sorted(held), row
        assert held <= set(answerer.ATTRIBUTES), row
        assert row["category"] in answerer.CATEGORIES, row
        kind = row["category"]
        assert ("edible" in held) == (kind == "food"), row
        assert ("music" in held) == (kind == "instrument"), row
        assert ("worn" in held) == (kind == "clothing"), row
        assert not {"small", "big"} <= held, row
        assert not {"alive", "made"} <= held, row
        for needs, needed in (
            ("fur", "alive"), ("wheels", "made"), ("engine", "made"),
            ("electric", "made"), ("strings", "music"), ("worn", "made"),
        ):  # fmt: skip
            assert needs not in held or needed in held, (row, needs)


def test_every_attribute_and_category_of_a_test_noun_occurs_in_training() -> None:
    known = {name for row in rows("train") for name in row["attributes"]}
    assert {name for row in rows("test") for name in row["attributes"]} <= known


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_simple_nouns_are_four_whole_categories(split: str) -> None:
    kinds = {"animal", "clothing", "food", "vehicle"}
    assert rows(f"simple_{split}") == [row for row in rows(split) if row["category"] in kinds]


# --- the answerer ----------------------------------------------------------------------------


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
    from corpus import PROPERTIES

    asked: dict[str, list[str]] = defaultdict(list)
    for name, (question, _) in PROPERTIES.items():
        asked[name].append(question.format(x="it"))
    for row in rows("train"):
        for name, questions in asked.items():
            expected = "yes" if name in row["attributes"] else "no"
            for question in questions:
                found = answerer.verdict(row["noun"], row["category"], question)
                assert found["yes_or_no"] == expected, (row, question)


def test_naming_the_category_wins_the_simple_game(answerer: ModuleType) -> None:
    assert answerer.verdict("bread", "food", "Is it food?")["correct"]
    assert not answerer.verdict("bread", "food", "Can you eat it?")["correct"]


def test_the_search_model_knows_training_nouns_only(answerer: ModuleType) -> None:
    found = answerer.search("a vehicle that can fly")
    assert "plane" in found
    assert "helicopter" not in found  # held out
    assert answerer.search("colourless green ideas") == "Nothing found."


# --- the flow --------------------------------------------------------------------------------


@pytest.fixture
def endpoint(answerer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The offline server, with a scripted player: it asks for the categories in turn."""
    names = ["food", "an animal", "a vehicle", "clothing", "a tool"]
    plain = answerer.reply

    def reply(request: dict[str, Any]) -> str:
        if request["model"] != "player":
            return plain(request)
        prompt = request["messages"][-1]["content"]
        asked = sum(f"Is it {name}?" in prompt for name in names)
        return f"Is it {names[asked]}?" if asked < len(names) else "Is it a dog?"

    monkeypatch.setattr(answerer, "reply", reply)
    server = answerer.Server(("127.0.0.1", 0), answerer.Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_evaluate_needs_no_agentrl_and_any_endpoint_will_do(endpoint: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
    env |= {
        "OPENAI_BASE_URL": endpoint,
        "OPENAI_API_KEY": "none",
        "PLAYER_MODEL": "player",
        "ANSWERER_MODEL": "answerer",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "CREWAI_STORAGE_DIR": str(tmp_path),
    }
    games = tmp_path / "games.jsonl"
    argv = [sys.executable, str(EXAMPLE / "evaluate.py"), "--simple", "--per-category", "1"]
    done = subprocess.run(
        [*argv, "--json", str(games)], env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in games.read_text().splitlines()]
    assert len(found) == 8
    # Three questions reach the first three categories, after one, two and three turns.
    turns = {"food": 1, "animal": 2, "vehicle": 3, "clothing": 3}
    assert {row["category"]: row["turns"] for row in found} == turns
    assert {row["category"] for row in found if row["won"]} == {"food", "animal", "vehicle"}
    assert "75% (3/4)" in done.stdout.splitlines()[-2]


def training(folder: Path, port: int, **settings: object) -> list[str]:
    """The command line of a run of the simple game on one noun of each category."""
    models = {"answerer": {"model": "openai/answerer", "api_base": f"http://127.0.0.1:{port}/v1"}}
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows("simple_train")[::20]))
    settings = {
        "tasks": tasks, "runs": folder, "name": "run", "runners": 1, "batch_size": 4,
        "group_size": 4, "steps": 1, "learning_rate": 4e-3, "rollouts_per_process": 16,
        "models": json.dumps(models),
    } | settings  # fmt: skip
    return [
        *(sys.executable, str(EXAMPLE / "answerer.py"), "--port", str(port), "--"),
        *(sys.executable, "-m", "agentrl", "train", f"{EXAMPLE / 'agent.py'}:simple"),
        *flags(**settings),
    ]  # fmt: skip


def test_player_trains_and_answerer_is_recorded(tmp_path: Path) -> None:
    """A step of the real thing: CrewAI in runners, gateway, offline answerer, trainer."""
    command = training(tmp_path, 18765)
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "run")
    store = Store(str(folder.store))
    calls = store.calls()
    player = [call for call in calls if call.adapter == "policy"]
    others = [call for call in calls if call.model == "answerer"]
    store.close()
    assert len(player) + len(others) == len(calls)
    assert len(player) == len(others) >= 16
    assert all(call.trained_step is None for call in others)
    assert {call.skip_reason for call in others} == {SkipReason.NOT_TRAINABLE_MODEL}
    assert any(call.trained_step is not None for call in player)
    assert max(Counter(call.attempt_id for call in player).values()) == 3  # multi-turn
