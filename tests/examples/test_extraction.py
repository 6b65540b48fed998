"""The extraction example: its texts, its reward, and its graph against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from example_files import EXAMPLES, load_module, read_tasks
from running_gateway import WEIGHTS, running

from agentrl_proxy.rendering.renderer import Renderer

EXAMPLE = EXAMPLES / "extraction"
FILES = ("train", "dev", "held_out")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    return load_module("extraction", "agent")


def tasks(name: str) -> list[dict[str, Any]]:
    return read_tasks("extraction", name)


ORDER = {"customer": "Ada Byron", "item": "desk lamps", "quantity": 3, "total": 74.5}


# --- the texts


def test_files_are_what_make_tasks_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maker = load_module("extraction", "make_tasks")
    monkeypatch.setattr(maker, "HERE", tmp_path)
    maker.main()
    for name in FILES:
        assert (tmp_path / f"{name}.jsonl").read_text() == (EXAMPLE / f"{name}.jsonl").read_text()


@pytest.mark.parametrize("other", ["dev", "held_out"])
def test_no_text_and_no_value_of_training_is_in_another_file(other: str) -> None:
    whole = ("item", "place", "company", "phone", "email", "date")
    people = ("customer", "person", "name")

    def values(name: str) -> set[str]:
        records = [task["record"] for task in tasks(name)]
        found = {record[key] for record in records for key in whole if key in record}
        names = " ".join(record[key] for record in records for key in people if key in record)
        return found | set(names.split())

    assert not {task["text"] for task in tasks("train")} & {task["text"] for task in tasks(other)}
    assert len(values(other)) > 50
    assert not values("train") & values(other)
    assert {task["phrasing"] for task in tasks(other)} == {"known", "new"}


def test_new_phrasings_occur_in_one_file_only() -> None:
    maker = load_module("extraction", "make_tasks")
    for _, _, phrasings in maker.FORMS:
        assert set(phrasings) == set(FILES)
        every = [phrasing for name in FILES for phrasing in phrasings[name]]
        assert len(every) == len(set(every))


# --- the reward


@pytest.mark.parametrize("name", FILES)
def test_the_right_record_is_worth_1(example: ModuleType, name: str) -> None:
    for task in tasks(name):
        said = json.dumps(task["record"])
        assert example.score(said, task["form"], task["record"]) == 1.0
        assert set(task["record"]) == set(example.FORMS[task["form"]].model_fields)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (json.dumps(ORDER | {"customer": "ada byron", "total": 74.50}), 1.0),
        (json.dumps(ORDER | {"quantity": 4}), 0.8),
        (json.dumps(ORDER | {"quantity": "3"}), 0.7),  # the wrong type
        (json.dumps(ORDER | {"quantity": True}), 0.7),
        (json.dumps(ORDER | {"note": "urgent"}), 0.9),  # a key too many
        (json.dumps({"customer": "Ada Byron"}), 0.3),
        (json.dumps([ORDER]), 0.0),
        (f"```json\n{json.dumps(ORDER)}\n```", 0.0),
        (f"Here it is: {json.dumps(ORDER)}", 0.0),
        (json.dumps(ORDER)[:-1], 0.0),
        ("", 0.0),
    ],
)
def test_reward(example: ModuleType, reply: str, reward: float) -> None:
    assert example.score(reply, "order", ORDER) == reward


# --- the graph


def test_a_record_that_fits_ends_the_graph_and_another_is_asked_for_once(
    example: ModuleType,
) -> None:
    from langchain_core.messages import AIMessage

    state = {"messages": [AIMessage(json.dumps(ORDER))], "form": "order", "tries": 1}
    assert example.after_check(state | example.check(state)) == "__end__"
    state["messages"] = [AIMessage(json.dumps(ORDER | {"quantity": "3"}))]
    checked = example.check(state)
    assert "quantity" in checked["messages"][0].text
    assert example.after_check(state | checked) == "extract"
    assert example.after_check(state | checked | {"tries": 2}) == "__end__"


def test_graph_over_a_gateway(
    example: ModuleType,
    tmp_path: Path,
    tiny_sampler: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tiny model writes no record, so it is corrected once; the second prompt continues."""
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(WEIGHTS))
    with running(
        tmp_path, renderer, {}, sampler=tiny_sampler, models={}, default_adapter=None,
        context_length=tiny_sampler.context_length, defaults={"max_tokens": 16},
    ) as gateway:  # fmt: skip
        claim = gateway.claims[0]
        monkeypatch.setenv("OPENAI_API_BASE", f"{gateway.url}/rollouts/{claim.rollout_id}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", claim.key)
        example.agent(tasks("dev")[0])
        first, second = gateway.calls(claim)
    known = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(known)] == known
    assert tasks("dev")[0]["text"] in renderer.decode(first.prompt_ids)
