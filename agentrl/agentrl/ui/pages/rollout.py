"""One rollout: its trace on a time axis, its calls as conversations, its logs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from agentrl.config.errors import ConfigError
from agentrl.history.conversation import Message
from agentrl.history.index import task_index
from agentrl.history.rollout_table import (
    Beside,
    Query,
    beside_in,
    beside_in_table,
    beside_in_task,
    members,
)
from agentrl.history.sources import OpenRun
from agentrl.history.trace import (
    AttemptTrace,
    Node,
    attempt_traces,
    attributes_of,
    exceptions_of,
    note_of,
    verdict_of,
)
from agentrl.ui.pages.call import Chat, chat_of, conversation
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Attempt, Call, Reward, Rollout, RolloutState, Span
from agentrl_trainer.data.rewards import rollout_reward, winning_rewards

router = APIRouter()
_ROWS = 500
"""Rows of the trace that a page shows."""
_CALLS, _CHARACTERS = 20, 200_000
"""Calls, and characters of their messages, that a page shows at once; the rest on demand."""
_LOG_LINES, _LOG_BYTES, _LINE = 20, 64_000, 2_000


@dataclass(frozen=True)
class TraceRow:
    """A record in the trace. ``x`` and ``width`` place its bar on an axis from 0 to 100."""

    kind: str
    depth: int
    record: Any
    seconds: float | None
    x: float
    width: float
    attributes: Sequence[tuple[str, str]] = ()
    note: tuple[str, str] | None = None
    exceptions: Sequence[str] = ()
    verdict: str | None = None


@dataclass(frozen=True)
class LogEnd:
    """The last lines of an attempt's log; ``lines`` is None where the log is not here."""

    attempt: Attempt
    lines: list[str] | None
    size: int
    """In bytes, of the whole log."""
    is_cut: bool


@router.get("/runs/{name}/rollouts/{rollout_id}")
def rollout_page(
    request: Request, name: str, rollout_id: str,
    where: str = "", search: str = "", sort: str = "", at: int = -1,
) -> Response:  # fmt: skip
    run = run_of(request, name)
    rollout = _rollout(run, rollout_id)
    traces = attempt_traces(run.store, rollout, bodies=False)
    rewards = [reward for trace in traces for reward in trace.rewards]
    earned: dict[str, float] = {}
    for reward in winning_rewards(rollout, rewards):
        earned[reward.name] = earned.get(reward.name, 0.0) + reward.value
    calls = [call for trace in traces for call in trace.calls]
    rows, left_out, span_s = _rows(traces)
    table = Query(where, search, sort, offset=at)
    return page(
        request, "rollout.html", run=run.current(), rollout=rollout, traces=traces,
        task=run.store.task(run.id, rollout.purpose, task_index(rollout)),
        task_index=task_index(rollout), reward=rollout_reward(rollout, rewards), rewards=earned,
        verdicts=Counter(verdict_of(call) or "no verdict yet" for call in calls),
        tokens=[sum(counts) for counts in zip(*(one.tokens for one in traces), strict=True)],
        rows=rows, more_rows=left_out, span_s=span_s, calls=_chats(run, calls),
        logs=[_log_end(run, trace.attempt) for trace in traces], table=table,
        beside=_beside(run, rollout, table),
        is_live=rollout.state in (RolloutState.QUEUED, RolloutState.RUNNING),
    )  # fmt: skip


@router.get("/runs/{name}/rollouts/{rollout_id}/log/{number}")
def log(request: Request, name: str, rollout_id: str, number: int) -> Response:
    """Send the output of an attempt as a file of text."""
    run = run_of(request, name)
    attempts = run.store.attempts([_rollout(run, rollout_id).id])
    paths = [_log_path(run, attempt) for attempt in attempts if attempt.number == number]
    if not paths or paths[0] is None:
        raise HTTPException(404, f"attempt {number} of {rollout_id} has no log here")
    kind = "text/plain; charset=utf-8"
    return FileResponse(paths[0], media_type=kind, filename=f"{rollout_id}-{number}.txt")


def _rollout(run: OpenRun, rollout_id: str) -> Rollout:
    found = run.store.rollouts(run.id, ids=[rollout_id])
    if not found:
        raise HTTPException(404, f"{rollout_id!r} is no rollout of {run.name}")
    return found[0]


def _beside(run: OpenRun, rollout: Rollout, table: Query) -> list[Beside]:
    found: list[Beside | None] = []
    if table.offset >= 0:
        with contextlib.suppress(ConfigError):  # of a link that was written by hand
            found.append(beside_in_table(run.index, table, rollout.id))
    group = [row["id"] for row in members(run.index, rollout.group_id)]
    if rollout.id in group:  # else not indexed yet
        found.append(beside_in(group, rollout.id, "group"))
    found.append(beside_in_task(run.index, rollout))
    return [one for one in found if one and (one.before or one.after)]


def _rows(traces: Sequence[AttemptTrace]) -> tuple[list[TraceRow], int, float]:
    """Return the rows of the trace, how many are left out, and the seconds that its axis spans."""
    nodes = [placed for trace in traces for placed in trace.tree.walk()]
    times = [at for _, node in nodes for at in (node.start, node.end) if at is not None]
    start, end = min(times, default=0.0), max(times, default=0.0)
    scale = 100 / (end - start) if end > start else 0.0
    rows = [_row(depth, node, start, end, scale) for depth, node in nodes[:_ROWS]]
    return rows, len(nodes) - len(rows), end - start


def _row(depth: int, node: Node, start: float, end: float, scale: float) -> TraceRow:
    record = node.record
    until = end if node.end is None else node.end
    x, width = (node.start - start) * scale, max((until - node.start) * scale, 0.4)
    kind = type(record).__name__.lower()
    took = None if node.end is None or isinstance(record, Reward) else node.end - node.start
    place = (min(depth, 12), record, took, round(min(x, 99.6), 2), round(width, 2))
    match record:
        case Span():
            note = note_of(record)
            parts = attributes_of(record), note, exceptions_of(record)
            return TraceRow("note" if note else kind, *place, *parts)
        case Call():
            return TraceRow(kind, *place, verdict=verdict_of(record))
        case _:
            return TraceRow(kind, *place)


def _chats(run: OpenRun, calls: Sequence[Call]) -> list[tuple[Call, Chat | None]]:
    """Return each call with its messages; None for those that the page fetches on demand."""
    found: list[tuple[Call, Chat | None]] = []
    earlier: list[list[Message]] = []
    shown = 0
    for call in calls:
        whole = None
        if len(earlier) < _CALLS and shown < _CHARACTERS:
            whole = run.store.call(call.id)
        if whole is None:
            found.append((call, None))
            continue
        chat = chat_of(whole, earlier)
        earlier.append(conversation(whole))
        shown += sum(said.length for said in chat.asked)
        found.append((call, chat))
    return found


def _log_path(run: OpenRun, attempt: Attempt) -> Path | None:
    """Return where the run's folder has the log: it may have been moved since."""
    path = run.folder.logs / Path(attempt.log).name if attempt.log else None
    return path if path and path.is_file() else None


def _log_end(run: OpenRun, attempt: Attempt) -> LogEnd:
    path = _log_path(run, attempt)
    if path is None:
        return LogEnd(attempt, None, 0, False)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LOG_BYTES, 0))
        lines = file.read().decode(errors="replace").splitlines()
    is_cut = size > _LOG_BYTES or len(lines) > _LOG_LINES or any(len(x) > _LINE for x in lines)
    return LogEnd(attempt, [line[:_LINE] for line in lines[-_LOG_LINES:]], size, is_cut)
