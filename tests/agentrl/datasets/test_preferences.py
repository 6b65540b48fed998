"""Opinions as token rows: of files, and of a run's rewards and feedback."""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_data import asked, write_lines
from pair_data import answer, pair, scored
from ui_pages import Recorded

from agentrl.config.commands import RewardModelConfig
from agentrl.config.errors import ConfigError
from agentrl.datasets.recorded import run_pairs, run_scores
from agentrl.history.export import rollout_records
from agentrl.history.sources import open_run
from agentrl.offline.examples import (
    chat_examples,
    file_examples,
    pair_examples,
    score_examples,
)
from agentrl.runs.folder import RunFolder
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Feedback
from agentrl_tracer.store import Store
from agentrl_trainer.models.loading import load_facts


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_facts("agentrl-tiny").tokenizer)


def test_the_answers_of_a_pair_train_and_the_prompt_does_not(
    renderer: Renderer, tmp_path: Path
) -> None:
    earlier = [asked(3), answer("I am 3.")]
    one = pair(5) | {"prompt": [*earlier, asked(5)]}
    tie = pair(6) | {"rejected": pair(6)["chosen"]}
    source = write_lines(tmp_path / "pairs.jsonl", [one, pair(5), pair(5, 9), tie])
    found = file_examples(str(source), "data.source", renderer, pair_examples)
    assert +found.left_out == {"pairs whose answers are equal": 1}
    first, second, third = found.kept
    for row, text in zip(first.rows, ("I am 5.", "I am 6."), strict=True):
        said = [token for token, on in zip(row.tokens, row.mask, strict=True) if on]
        assert renderer.tokenizer.decode(said[:-1]) == text
        assert row.mask[-1]
        assert renderer.is_stop(row.tokens[-1])
    assert first.task != second.task == third.task  # pairs of one prompt are held out together
    assert first.length == len(first.rows[0].tokens)


def test_scores_are_read_from_chats_and_completions(renderer: Renderer, tmp_path: Path) -> None:
    completions = [
        {"response": "I am 4.", "overall_score": 9},
        {"response": "No.", "overall_score": 2},
    ]
    ultra = {"instruction": asked(4)["content"], "completions": completions}
    source = write_lines(tmp_path / "scores.jsonl", [*scored(3), ultra])
    found = file_examples(str(source), "data.source", renderer, score_examples)
    assert [one.score for one in found.kept] == [1.0, -1.0, 9.0, 2.0]
    assert found.kept[0].task == found.kept[1].task != found.kept[2].task
    write_lines(source, [*scored(3), {"messages": [asked(1), answer("No.")], "score": "high"}])
    with pytest.raises(ConfigError, match=r"scores.jsonl, line 3: score: give a number, not 'hi"):
        file_examples(str(source), "data.source", renderer, score_examples)


def test_a_tables_empty_fields_reach_neither_tools_nor_arguments(
    renderer: Renderer, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    functions = [
        {"name": name, "parameters": {"type": "object", "properties": {field: {"type": "string"}}}}
        for name, field in (("weather", "city"), ("calculator", "expr"))
    ]
    calls = [
        {
            "id": "c",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "x"}},
        },
        {
            "id": "d",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expr": "1"}},
        },
    ]
    chat = {
        "messages": [asked(1), {"role": "assistant", "content": "", "tool_calls": calls}],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    parquet.write_table(pa.Table.from_pylist([chat]), tmp_path / "chats.parquet")
    write_lines(tmp_path / "chats.jsonl", [chat])
    rows = [
        file_examples(str(tmp_path / name), "data.source", renderer, partial(chat_examples, "all"))
        .kept[0].rows[0].tokens
        for name in ("chats.parquet", "chats.jsonl")
    ]  # fmt: skip
    assert "null" not in renderer.decode_raw(rows[0])
    assert rows[0] == rows[1]


def test_what_is_null_in_json_lines_stays(renderer: Renderer, tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": {"city": None}}
    calls = [{"id": "c", "type": "function", "function": function}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    source = write_lines(tmp_path / "chats", [{"messages": [asked(1), said]}])
    [one] = file_examples(str(source), "data.source", renderer, partial(chat_examples, "all")).kept
    assert '"city": null' in renderer.decode_raw(one.rows[0].tokens)


def of_run(run: Path, where: str | None = None, by: str = "reward") -> RewardModelConfig:
    data = {"from_run": run, "where": where, "by": by}
    return RewardModelConfig.model_validate({"data": data})


@pytest.fixture
def run(recorded: Recorded, tmp_path: Path) -> Path:
    """A copy of a recorded run."""
    return shutil.copytree(recorded.root / recorded.other, tmp_path / "other")


def rollouts(run: Path) -> dict[str, Any]:
    with contextlib.closing(open_run(RunFolder(run))) as opened:
        while opened.fill():
            pass
        records = rollout_records(opened, 'purpose == "train" and reward is not None')
        return {one["id"]: one for one in records}


def last_tokens(record: dict[str, Any]) -> set[tuple[int, ...]]:
    return {(*call["prompt_ids"], *call["response_ids"]) for call in record["calls"]}


def test_the_best_rollout_of_a_group_is_preferred_to_its_worst_with_the_recorded_tokens(
    run: Path,
) -> None:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in rollouts(run).values():
        groups[one["group"]].append(one)
    differ = {
        name: sorted(members, key=lambda one: one["reward"])
        for name, members in groups.items()
        if len({one["reward"] for one in members}) > 1
    }
    assert differ
    found = run_pairs(of_run(run))
    assert len(found.kept) == len(differ)
    for one in found.kept:
        tokens = [tuple(row.tokens) for row in one.rows]
        assert any(
            tokens[0] in set().union(*map(last_tokens, of_value(members, -1)))
            and tokens[1] in set().union(*map(last_tokens, of_value(members, 0)))
            for members in differ.values()
        )
    scores = run_scores(of_run(run))
    assert len(scores.kept) == sum(map(len, groups.values()))
    assert any("single rollout" in why or "difference" in why for why in found.left_out) == (
        len(differ) < len(groups)
    )


def of_value(members: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    """The members with the reward of the sorted members' first or last."""
    return [one for one in members if one["reward"] == members[at]["reward"]]


def test_people_prefer_by_their_feedback(run: Path) -> None:
    known = rollouts(run)
    [(one, other)] = [
        [a, b] for a in known.values() for b in known.values()
        if a["group"] == b["group"] and a["id"] != b["id"]
        and last_tokens(a) != last_tokens(b)
    ][:1]  # fmt: skip
    with contextlib.closing(Store(str(run / "store.db"))) as store:
        [row] = store.runs()
        for rollout, thumb in ((one, 1), (other, -1)):
            given = Feedback(row["id"], rollout["id"], None, "helpful", "Bob", thumb)
            store.add_feedback(given)
    [pair] = run_pairs(of_run(run, f"id in ('{one['id']}', '{other['id']}')", "feedback")).kept
    assert tuple(pair.rows[0].tokens) in last_tokens(one)
    assert tuple(pair.rows[1].tokens) in last_tokens(other)
    found = run_pairs(of_run(run, None, "feedback"))
    assert found.left_out["rollouts without a feedback"] > 0
