"""The catalog example: its questions, its reward, and its two roles against a real gateway."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from example_files import EXAMPLES, load_module, read_tasks
from running_gateway import WEIGHTS, running
from scripted_sampler import ScriptedSampler

from agentrl_proxy.rendering.renderer import Renderer

EXAMPLE = EXAMPLES / "catalog"
FILES = ("train", "dev", "held_out")
SHEET = "red tent: price 45 dollars, stock 12, weight 3 kg, shelf B7"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_module("catalog", "agent")


def tasks(name: str) -> list[dict[str, Any]]:
    return read_tasks("catalog", name)


# --- the questions


def test_files_are_what_make_tasks_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maker = load_module("catalog", "make_tasks")
    monkeypatch.setattr(maker, "HERE", tmp_path)
    maker.main()
    for name in ("catalog.json", *(f"{name}.jsonl" for name in FILES)):
        assert (tmp_path / name).read_text() == (EXAMPLE / name).read_text()


@pytest.mark.parametrize("other", ["dev", "held_out"])
def test_no_question_and_no_thing_of_training_is_in_another_file(other: str) -> None:
    train, others = tasks("train"), tasks(other)
    assert not {task["question"] for task in train} & {task["question"] for task in others}
    things = [{task["name"].split()[1] for task in some} for some in (train, others)]
    assert not things[0] & things[1]
    assert {task["phrasing"] for task in others} == {"known", "new"}


def test_new_phrasings_occur_in_one_file_only() -> None:
    for phrasings in load_module("catalog", "make_tasks").PHRASINGS.values():
        every = [phrasing for name in FILES for phrasing in phrasings[name]]
        assert len(every) == len(set(every))


# --- the reward


@pytest.mark.parametrize("name", FILES)
def test_the_right_value_is_worth_1_and_no_other_value_of_the_sheet(
    example: ModuleType, name: str
) -> None:
    for task in tasks(name):
        sheet = example.CATALOG[task["name"]]
        earned = {key: example.score(True, f"It is {sheet[key]}.", task["value"]) for key in sheet}
        assert sorted(earned.values()) == [0.2, 0.2, 0.2, 1.0]
        assert example.find(task["name"]) is not None


@pytest.mark.parametrize(
    ("found", "answer", "reward"),
    [
        (True, "The red tent costs $45.", 1.0),
        (True, "45", 1.0),
        (True, SHEET, 0.2),  # all values at once
        (True, "It costs 450 dollars.", 0.2),
        (True, "It is on shelf B45.", 0.2),
        (True, "", 0.2),
        (False, "The red tent costs $45.", 0.0),
    ],
)
def test_reward(example: ModuleType, found: bool, answer: str, reward: float) -> None:
    assert example.score(found, answer, "45") == reward


@pytest.mark.parametrize("name", ["red tents", "tent", "the red tent", "red tent, blue tent", ""])
def test_a_sheet_is_found_by_the_exact_name_only(example: ModuleType, name: str) -> None:
    assert example.find(name) is None
    assert example.find("Red tent.\n") == example.find("red tent")


# --- the roles


@pytest.mark.parametrize(
    ("query", "roles"), [("red tent", ["searcher", "answerer"]), ("a tent", ["searcher"])]
)
def test_roles_over_a_gateway(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
    roles: list[str],
) -> None:
    """Each role asks its own adapter; the answerer alone sees the sheet, if there is one."""
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
    sampler = ScriptedSampler(renderer, lambda ids, *_: query)
    sampler.adapters = {"searcher": 1, "answerer": 1}
    models = {name: name for name in sampler.adapters}
    with running(
        tmp_path, renderer, {}, sampler=sampler, models=models, default_adapter=None
    ) as gateway:
        claim = gateway.claims[0]
        monkeypatch.setenv("OPENAI_BASE_URL", gateway.base_url(claim))
        monkeypatch.setenv("OPENAI_API_KEY", claim.key)
        example.agent({"question": "How much is a red tent?", "name": "red tent", "value": "1"})
        calls = gateway.calls(claim)
    assert [call.adapter for call in calls] == roles
    sheet = example.find("red tent")
    shown = [sheet in renderer.decode(call.prompt_ids) for call in calls]
    assert shown == [role == "answerer" for role in roles]
