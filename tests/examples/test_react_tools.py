"""The ReAct agent with a calculator: its tasks, its reward, and its turns through a gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from running_gateway import WEIGHTS, running

from agentrl_proxy.rendering.renderer import Renderer

EXAMPLE = Path(__file__).parents[2] / "examples" / "react_tools"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield import_module("agent")


def story(question: str) -> str:
    """The words of a question without numbers, names and things."""
    return " ".join(re.sub(r"\d+", "0", question).split()[1:4])


def test_task_files_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: rows(name) for name in ("train", "dev", "held_out")}
    questions = [row["question"] for made in files.values() for row in made]
    assert len(set(questions)) == len(questions)
    new = {
        name: {story(row["question"]) for row in files[name] if row["story"] == "new"}
        for name in ("dev", "held_out")
    }
    known = {story(row["question"]) for row in files["train"]}
    assert not new["dev"] & new["held_out"]
    assert not known & (new["dev"] | new["held_out"])
    monkeypatch.syspath_prepend(str(EXAMPLE))
    made = import_module("make_tasks")
    monkeypatch.setattr(made, "HERE", tmp_path)
    made.main()  # from a seed, so the files are what it writes
    for name in files:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (EXAMPLE / f"{name}.jsonl").read_bytes()


def test_gold_steps_earn_the_whole_reward(example: ModuleType) -> None:
    for row in (row for name in ("train", "dev", "held_out") for row in rows(name)):
        first, second = row["steps"]
        assert second.startswith(f"{example.calculate(first)} "), row
        last = example.calculate(second)
        assert set(re.findall(r"\d+", f"{first} {second.split(' ', 1)[1]}")) == set(
            re.findall(r"\d+", row["question"])
        )
        assert example.score(f"Thought: Done.\nFinal Answer: {last}", row["answer"]) == 1, row


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Final Answer: 857", 1.0),
        ("Thought: Done.\nFinal Answer: The total is 857 nuts.", 1.0),
        ("Final Answer: $ 1,857", 0.0),
        ("Final Answer: 85", 0.0),
        ("Final Answer: -857", 0.0),
        ("Final Answer: 12, 857", 0.0),
        ("857", 0.0),
        ("Thought: 857\nAction: calculator[857]", 0.0),
    ],
)
def test_reward_is_the_first_number_of_the_final_answer(
    example: ModuleType, reply: str, reward: float
) -> None:
    assert example.score(reply, "857") == reward


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("34 * 27", "918"),
        ("918-61", "857"),
        ("10 / 4", "error"),
        ("10 / 0", "error"),
        ("1 + 2 + 3", "error"),
        ("__import__('os')", "error"),
    ],
)
def test_calculator_does_one_operation(example: ModuleType, expression: str, result: str) -> None:
    assert example.calculate(expression).split(":")[0] == result


class Script:
    """A player that works out 34 * 27 - 61, and after each action makes up an observation."""

    REPLIES = (
        "Thought: All.\nAction: calculator[34 * 27]\nObservation: 1\nFinal Answer: 1",
        "Action: calculator[918 - 61]\nObservation: 2",
        "Final Answer: 857",
    )

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *_: Any) -> str:
        self.asked += 1
        return self.REPLIES[self.asked - 1]


def test_turns_continue_token_for_token(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    rewards: list[float] = []
    monkeypatch.setattr(example, "emit_reward", rewards.append)
    with running(tmp_path, Renderer(AutoTokenizer.from_pretrained(WEIGHTS)), {}) as gateway:
        gateway.sampler.script = Script()
        claim = gateway.claims[0]
        monkeypatch.setenv("OPENAI_BASE_URL", gateway.base_url(claim))
        monkeypatch.setenv("OPENAI_API_KEY", claim.key)
        example.agent({"question": "34 bags of 27 nuts less 61?", "answer": "857"})
        calls = gateway.calls(claim)
    assert rewards == [1.0]
    assert len(calls) == 3
    for before, after in pairwise(calls):
        asked: Sequence[int] = after.prompt_ids or []
        known = [*(before.prompt_ids or []), *(before.response_ids or [])]
        same = [a == b for a, b in zip(known, asked, strict=False)]
        kept = same.index(False) if False in same else len(same)
        # All of it up to the stop string, which the agent did not get.
        assert kept > len(before.prompt_ids or []) + 8
    last = (calls[-1].request or {})["messages"]
    assert [message["content"] for message in last[-4:]][1::2] == [
        "Observation: 918",
        "Observation: 857",
    ]
