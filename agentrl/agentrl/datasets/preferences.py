"""Turn opinions into token rows: pairs of answers and scored answers, of files and of runs.

Rows of a run are the exact tokens that were recorded. Those of files are written by the gateway's
renderer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from agentrl.config.errors import ConfigError
from agentrl.datasets.chats import Chat, to_chat
from agentrl.datasets.files import Record, read_records
from agentrl.datasets.pairs import scored_completions, to_pair
from agentrl.datasets.recorded import run_of_model
from agentrl.datasets.rendering import chat_rows
from agentrl.datasets.samples import Samples
from agentrl.history.export import row_records, withholds
from agentrl.history.rollout_table import Query, find_rollouts
from agentrl.history.sources import OpenRun
from agentrl.runs.excerpts import json_line
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Json
from agentrl_trainer.data.training_row import TrainingRow

JudgedBy = Literal["reward", "feedback"]


@dataclass(frozen=True, slots=True)
class RowPair:
    """Rows of two answers to one prompt; their masks select the answers."""

    chosen: TrainingRow
    rejected: TrainingRow
    task: str

    @property
    def length(self) -> int:
        return max(len(self.chosen.tokens), len(self.rejected.tokens))


@dataclass(frozen=True, slots=True)
class ScoredRow:
    row: TrainingRow
    score: float
    task: str

    @property
    def length(self) -> int:
        return len(self.row.tokens)


# ---- files


def file_pairs(source: str, field: str, renderer: Renderer) -> Samples[RowPair]:
    """Read the pairs of a file or dataset.

    Raises:
        ConfigError: names the file, the line and the field that does not fit.
    """
    found = Samples[RowPair]([])
    for record in read_records(source, field):
        pair = to_pair(record)
        if isinstance(pair, str):
            found.left_out[pair] += 1
            continue
        chosen, rejected = (
            _last_row(renderer, chat, f"{record.where}: {name}", found.left_out)
            for name, chat in zip(("chosen", "rejected"), pair.chats(), strict=True)
        )
        found.kept.append(RowPair(chosen, rejected, json_line(pair.prompt)))
    return found


def file_scores(source: str, field: str, renderer: Renderer) -> Samples[ScoredRow]:
    """Read chats with a ``score``, or UltraFeedback's completions, of a file or dataset.

    Raises:
        ConfigError: names the file, the line and the field that does not fit.
    """
    found = Samples[ScoredRow]([])
    for record in read_records(source, field):
        for chat, score in _scored_chats(record):
            row = _last_row(renderer, chat, record.where, found.left_out)
            found.kept.append(ScoredRow(row, score, json_line(chat.messages[:-1])))
    return found


def _scored_chats(record: Record) -> Iterator[tuple[Chat, float]]:
    data = record.data
    if data.get("completions") is not None and data.get("instruction") is not None:
        asked = {"role": "user", "content": data["instruction"]}
        try:
            scored = scored_completions(data)
        except ValueError as error:
            raise ConfigError(f"{record.where}: {error}") from error
        for answer, score in scored:
            yield to_chat(Record(record.where, {"messages": [asked, *answer]})), score
        return
    score = data.get("score")
    if not isinstance(score, int | float):
        raise ConfigError(f"{record.where}: score: give a number, not {score!r}")
    yield to_chat(record), float(score)


def _last_row(renderer: Renderer, chat: Chat, where: str, left_out: Counter[str]) -> TrainingRow:
    """Return the row of a chat that holds its last answer."""
    try:
        rows = chat_rows(renderer, chat, "all")
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if len(rows) > 1:
        left_out["answers that the chat template separates from the last one of their chat"] += 1
    return rows[-1]


# ---- runs


class _Judged(NamedTuple):
    """The longest row of a rollout, and how good the rollout was."""

    row: TrainingRow
    value: float
    group: str
    task: str


def run_pairs(path: Path, model: str, where: str | None, by: JudgedBy) -> Samples[RowPair]:
    """Pair the best rollout of each group of a run with its worst.

    Args:
        model: the base model, of whose tokens the rows must be.
        where: which rollouts; by default all that are judged.
        by: the rollouts' rewards, or people's feedback.

    Raises:
        ConfigError: the run has another base model, or ``where`` is wrong.
    """
    judged = _judged(path, model, where, by)
    found = Samples[RowPair]([], judged.left_out)
    groups: dict[str, list[_Judged]] = defaultdict(list)
    for one in judged.kept:
        groups[one.group].append(one)
    for group in groups.values():
        best, worst = (choose(group, key=lambda one: one.value) for choose in (max, min))
        if len(group) < 2:
            found.left_out[f"groups with a single rollout that has a {by}"] += 1
        elif best.value == worst.value:
            found.left_out[f"groups without a difference in {by}"] += 1
        elif best.row.tokens == worst.row.tokens:
            found.left_out["groups whose best and worst rollouts have the same tokens"] += 1
        else:
            found.kept.append(RowPair(best.row, worst.row, best.task))
    return found


def run_scores(path: Path, model: str, where: str | None, by: JudgedBy) -> Samples[ScoredRow]:
    """Return the rollouts of a run with how good they were; arguments as for ``run_pairs``."""
    judged = _judged(path, model, where, by)
    kept = [ScoredRow(one.row, one.value, one.task) for one in judged.kept]
    return Samples(kept, judged.left_out)


@dataclass(slots=True)
class _JudgedRollouts:
    kept: list[_Judged]
    left_out: Counter[str]


def _judged(path: Path, model: str, where: str | None, by: JudgedBy) -> _JudgedRollouts:
    found = _JudgedRollouts([], Counter[str]())
    with run_of_model(path, model) as run:
        values = _values(run, where or "", by)
        rows: dict[str, list[Json]] = defaultdict(list)
        for record in row_records(run, where or "", imitated=True):
            rows[record["rollout"]].append(record)
        held_out = withholds(run, where or "")
    without = sum(one not in rows for one in values)
    reason = "rollouts without an answer of a model that is sampled here"
    reason += ", or of held-out tasks (name purpose in --where to take them)" if held_out else ""
    found.left_out[reason] += without
    for rollout, records in rows.items():
        value = values.get(rollout)
        if value is None:
            found.left_out[f"rollouts without a {by}"] += 1
            continue
        if len(records) > 1:
            found.left_out["rows beside the longest of their rollout"] += len(records) - 1
        longest = max(records, key=lambda one: len(one["tokens"]))
        tokens, mask = longest["tokens"], longest["mask"]
        weights = [float(on) for on in mask]
        row = TrainingRow(tokens, mask, [0.0] * len(mask), weights)
        found.kept.append(_Judged(row, value, longest["group"], longest["task"]))
    return found


def _values(run: OpenRun, where: str, by: JudgedBy) -> dict[str, float | None]:
    """Return how good the rollouts were, by id."""
    rows = find_rollouts(run.index, Query(where, limit=-1)).rows
    value: Callable[[Json], float | None] = _of_people if by == "feedback" else _reward
    return {row["id"]: value(row) for row in rows}


def _reward(row: Json) -> float | None:
    return row["reward"]


def _of_people(row: Json) -> float | None:
    """Return the mean of what people judged a rollout by, such as ``human:helpful``."""
    rewards: Json = row["rewards"] or {}
    values = [value for name, value in rewards.items() if name.startswith("human:")]
    return fmean(values) if values else None
