"""Export the rollouts of a run: whole, as chats to imitate, as pairs to prefer between, as rows.

``where`` of each function selects the rollouts; ConfigError says what is wrong with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.history.evaluations import split_of, success_reward
from agentrl.history.index import COLUMNS
from agentrl.history.rollout.conversation import asked, shown_before
from agentrl.history.rollout_table import Query, Row, find_rollouts
from agentrl.history.sources import OpenRun
from agentrl.runs.excerpts import json_line
from agentrl_proxy.protocols.conversion import chat_of_messages, chat_of_response
from agentrl_tracer.schemas import Call, CallState, Json, Purpose, SkipReason
from agentrl_trainer.data.rewards import by_rollout
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.training_row import to_training_row
from agentrl_trainer.data.trajectories import Trajectory, build_trajectories

_BATCH = 100  # rollouts whose calls are in memory


def rollout_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield the rollouts that match with their task and all their calls, in order of time."""
    splits = {Purpose.TRAIN: "train", Purpose.EVAL: split_of(run)}
    tasks = {purpose: run.store.tasks(run.id, split) for purpose, split in splits.items()}
    for batch in _batches(_rows(run, where)):
        calls = by_rollout(run.store.calls(rollout_ids=[row["id"] for row in batch]))
        for row in batch:
            yield row | {
                "data": tasks[Purpose(row["purpose"])][row["task"]],
                "calls": [asdict(call) for call in calls[row["id"]]],
            }


def chat_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield the conversations of successful rollouts: OpenAI's ``messages`` and ``tools``.

    Those of evaluations are left out unless ``where`` says something of ``purpose``.
    """
    rows = _rows(run, where, training_only(run, where), f"reward >= {success_reward(run)}")
    for batch in _batches(rows):
        for chats in _chats(run, batch).values():
            yield from chats


def pair_records(run: OpenRun, where: str) -> Iterator[Json]:
    """Yield the best and the worst rollout of each group as ``prompt``, ``chosen``, ``rejected``.

    The prompt is what both conversations begin with. Groups with equal rewards have no pair.
    Evaluations are left out as by ``chat_records``.
    """
    rows = _rows(run, where, training_only(run, where), "reward is not None", sort="group")
    for _, group in groupby(rows, key=lambda row: row["group"]):
        members = sorted(group, key=lambda row: row["reward"])
        worst, best = members[0], members[-1]
        if best["reward"] > worst["reward"]:
            chats = _chats(run, [best, worst])
            longest = [_longest(chats[one["id"]]) for one in (best, worst)]
            chosen, rejected = (chat["messages"] for chat in longest)
            tools = longest[0].get("tools")
            both = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
            shared = len(list(both))
            if 0 < shared < min(len(chosen), len(rejected)):
                yield {
                    "prompt": chosen[:shared],
                    "chosen": chosen[shared:],
                    "rejected": rejected[shared:],
                    "reward_chosen": best["reward"],
                    "reward_rejected": worst["reward"],
                    "rollouts": [best["id"], worst["id"]],
                } | ({"tools": tools} if tools else {})


_OF_A_STEP = (
    SkipReason.NO_REWARD, SkipReason.SMALL_GROUP, SkipReason.ZERO_ADVANTAGE, SkipReason.LEFT_OVER,
)  # fmt: skip
"""Why calls did not train in the step that they were made for; their tokens are good."""
_OF_RL = (
    *_OF_A_STEP, SkipReason.EVALUATION, SkipReason.NO_ROLLOUT, SkipReason.NOT_TRAINABLE_MODEL,
    SkipReason.OFF_POLICY, SkipReason.STALE, SkipReason.NON_FINITE, SkipReason.NON_FINITE_STEP,
)  # fmt: skip
"""Why calls did not train that may be imitated: not what the settings of the run exclude."""


def row_records(run: OpenRun, where: str, *, imitated: bool = False) -> Iterator[Json]:
    """Yield the rows of tokens that can train: ``TrainingRow`` without advantages.

    Evaluations are left out as by ``chat_records``.

    Args:
        imitated: yield also what only an imitation can train on: greedy answers, and those of the
            base model.
    """
    for batch in _batches(_rows(run, where, training_only(run, where))):
        ids = [row["id"] for row in batch]
        winners = [one.winner for one in run.store.rollouts(run.id, ids=ids) if one.winner]
        calls = by_rollout(run.store.calls(attempt_ids=winners))
        for row in batch:
            for path in paths_of(calls[row["id"]], imitated=imitated):
                made = to_training_row(path, dict.fromkeys(path.call_ids, 0.0))
                yield {
                    "rollout": row["id"],
                    "group": row["group"],
                    "task": f"{row['purpose']}-{row['task']}",
                    "reward": row["reward"],
                    "rewards": row["rewards"],
                    "adapter": made.adapter,
                    "calls": path.call_ids,
                    "tokens": made.tokens,
                    "mask": made.mask,
                    "logprobs": made.logprobs,
                }


def paths_of(calls: Sequence[Call], *, imitated: bool) -> list[Trajectory]:
    """Cut the calls of an attempt into token paths; ``imitated`` as for ``row_records``."""
    own: list[Call] = []
    for call in calls:
        if call.skip_reason in (_OF_RL if imitated else _OF_A_STEP):
            call = replace(call, skip_reason=None)
        if imitated and call.adapter is None and call.prompt_ids:
            call = replace(call, adapter=call.model, adapter_version=0)
        own.append(call)
    return build_trajectories(own, SkipRules(max_length=sys.maxsize)).trajectories


def _rows(run: OpenRun, *conditions: str, sort: str = "id") -> list[Row]:
    """Return the rollouts that meet all conditions; empty ones are left out."""
    where = " and ".join(f"({one})" for one in conditions if one.strip())
    return find_rollouts(run.index, Query(where, sort=sort, limit=-1)).rows


def training_only(run: OpenRun, where: str) -> str:
    """Leave out the evaluations of a training, whose tasks are held out, unless they are named."""
    left_out = run.row["kind"] == "train" and "purpose" not in where
    return 'purpose == "train"' if left_out else ""


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for at in range(0, len(rows), _BATCH):
        yield rows[at : at + _BATCH]


# ---- chats


def _chats(run: OpenRun, rows: Sequence[Row]) -> dict[str, list[Json]]:
    """Return the conversations of each rollout's winning attempt, as they ended."""
    ids = [row["id"] for row in rows]
    winners = [one.winner for one in run.store.rollouts(run.id, ids=ids) if one.winner]
    calls = by_rollout(run.store.calls(attempt_ids=winners))
    return {one: _conversations(calls[one]) for one in ids}


def _conversations(calls: Sequence[Call]) -> list[Json]:
    """Return a chat for each call that no later one continues; where the attempt called models that
    are sampled here, of their calls only."""
    done = [call for call in calls if call.state is CallState.COMPLETED]
    done = [call for call in done if call.prompt_ids] or done
    chats = [chat for call in done if (chat := chat_of(call))]
    said = [asked(chat) for chat in chats]
    return [
        chat
        for at, chat in enumerate(chats)
        if shown_before(said[at], said[at + 1 :]) < len(said[at])
    ]


def chat_of(call: Call) -> Json | None:
    """Return a call as a chat; None for completions, and for what only a provider understands."""
    convert = {"resp_": chat_of_response, "msg_": chat_of_messages}
    prefix = call.response_id.partition("_")[0] + "_"
    try:
        request = convert.get(prefix, dict)(call.request or {})
        answer = (call.response or {})["choices"][0]["message"]
        messages = [*request["messages"], {"role": "assistant", **answer}]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
    return {"messages": messages} | ({"tools": request["tools"]} if request.get("tools") else {})


def _longest(chats: Sequence[Json]) -> Json:
    return max(chats, key=lambda chat: len(chat["messages"]), default={"messages": []})


# ---- Parquet


def check_parquet(path: Path | None) -> Path:
    """Return the file to write.

    Raises:
        ConfigError: there is none, or pyarrow is not installed.
    """
    if path is None:
        raise ConfigError("output: parquet needs a file, for instance --output rollouts.parquet")
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError("format: parquet needs pyarrow: pip install pyarrow") from error
    return path


def write_parquet(records: Iterable[Json], path: Path) -> int:
    """Write rollouts as a table, with what has no column type of its own as JSON; count them."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    kinds: dict[str, Any] = {"TEXT": pa.string(), "INTEGER": pa.int64(), "REAL": pa.float64()}
    columns = {name: kinds[kind.split()[0]] for name, kind in COLUMNS.items()}
    schema = pa.schema(columns | dict.fromkeys(("data", "calls"), pa.string()))
    written, waiting = 0, map(_as_texts, records)
    with parquet.ParquetWriter(str(path), schema) as writer:
        while batch := list(islice(waiting, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            written += len(batch)
    return written


def _as_texts(record: Json) -> Json:
    return {
        name: json_line(value) if isinstance(value, list | dict) else value
        for name, value in record.items()
    }
