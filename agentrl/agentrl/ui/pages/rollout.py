"""One rollout: its trace on a time axis, its calls as conversations, its output. And the rollouts
of a group side by side."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from agentrl.config.errors import ConfigError
from agentrl.config.setting_names import recorded
from agentrl.config.settings.algorithm import table_of
from agentrl.history.evaluations import task_data
from agentrl.history.index import task_index
from agentrl.history.rollout.conversation import Message, conversation
from agentrl.history.rollout.tokens import shared_length
from agentrl.history.rollout.trace import (
    Node,
    count_tokens,
    earned_by_name,
    log_end,
    longest_calls,
    read_trace,
    verdict_of,
)
from agentrl.history.rollout.vocabulary import Vocabulary
from agentrl.history.rollout_table import (
    Beside,
    Query,
    Row,
    beside_in,
    beside_in_table,
    beside_in_task,
    members,
)
from agentrl.history.sources import OpenRun
from agentrl.runs.token_records import read_call
from agentrl.ui.pages.call import Chat, chat_of, shown_length
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Attempt, Call, Rollout, RolloutState
from agentrl_trainer.data.advantages import ESTIMATORS, CreditSettings, Scaling, group_advantages
from agentrl_trainer.data.rewards import rollout_reward

router = APIRouter()
_ROWS = 500
"""Rows of the trace that a page shows."""
_CALLS, _CHARACTERS = 20, 100_000
"""Calls, and characters of their messages, that a page shows at once; the rest on demand."""
_SIDE_BY_SIDE = 16
_TOKENS = 160
"""Tokens of a member that are shown around the first that no other has."""


@router.get("/runs/{name}/rollouts/{rollout_id}")
def rollout_page(
    request: Request, name: str, rollout_id: str,
    where: str = "", search: str = "", sort: str = "", at: int = -1,
) -> Response:  # fmt: skip
    run = run_of(request, name)
    rollout = _rollout(run, rollout_id)
    trace = read_trace(run.store, rollout, bodies=False)
    rows, span_s = _rows(trace.roots)
    table = Query(where, search, sort, offset=at)
    return page(
        request, "rollout.html", run=run.current(), rollout=rollout,
        task=task_data(run, rollout.purpose, task_index(rollout)),
        task_index=task_index(rollout), reward=rollout_reward(rollout, trace.rewards),
        rewards=earned_by_name(rollout, trace.rewards),
        verdicts=Counter(verdict_of(call) or "no verdict yet" for call in trace.calls),
        tokens=count_tokens(trace.calls), rows=rows[:_ROWS], more_rows=len(rows) - _ROWS,
        span_s=span_s, calls=_chats(run, trace.calls),
        logs=[(attempt, *_log_end(run, attempt)) for attempt in trace.attempts], table=table,
        beside=_beside(run, rollout, table),
        is_live=rollout.state in (RolloutState.QUEUED, RolloutState.RUNNING),
    )  # fmt: skip


@router.get("/runs/{name}/rollouts/{rollout_id}/log/{number}")
def log(request: Request, name: str, rollout_id: str, number: int) -> Response:
    """Send the output of an attempt as a file of text."""
    run = run_of(request, name)
    for attempt in run.store.attempts([_rollout(run, rollout_id).id]):
        path = _log_path(run, attempt)
        if attempt.number == number and path.is_file():
            kind = "text/plain; charset=utf-8"
            return FileResponse(path, media_type=kind, filename=f"{rollout_id}-{number}.txt")
    raise HTTPException(404, f"attempt {number} of {rollout_id} has no log here")


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


def _rows(roots: Sequence[Node]) -> tuple[list[tuple[int, Node, float, float]], float]:
    """Return the records top-down, each with its depth and the place and width of its bar on an
    axis from 0 to 100, and the seconds that the axis spans."""
    nodes = [placed for root in roots for placed in root.walk()]
    start = min((node.start for _, node in nodes), default=0.0)
    end = max((node.end or node.start for _, node in nodes), default=0.0)
    scale = 100 / ((end - start) or 1)
    rows = [
        (depth, node, (node.start - start) * scale, ((node.end or end) - node.start) * scale)
        for depth, node in nodes
    ]
    return rows, end - start


def _chats(run: OpenRun, calls: Sequence[Call]) -> list[tuple[Call, Chat | None]]:
    """Return each call with its messages; None for those that the page fetches on demand."""
    found: list[tuple[Call, Chat | None]] = []
    earlier: list[list[Message]] = []
    shown = 0
    for call in calls:
        fits = len(earlier) < _CALLS and shown < _CHARACTERS
        whole = run.store.call(call.id) if fits else None
        chat = chat_of(whole, earlier) if whole else None
        found.append((call, chat))
        if whole and chat:
            earlier.append(conversation(whole))
            shown += sum(map(shown_length, chat.asked))
    return found


def _log_path(run: OpenRun, attempt: Attempt) -> Path:
    """Return where the run's folder has the log: it may have been moved since."""
    return run.folder.logs / Path(attempt.log or "none").name


def _log_end(run: OpenRun, attempt: Attempt) -> tuple[list[str] | None, int]:
    """Return the last lines of an attempt's log (None where it is not here), and its size."""
    try:
        return log_end(_log_path(run, attempt))
    except OSError:
        return None, 0


# ---- a group


@router.get("/runs/{name}/groups/{group_id:path}")
def group_page(request: Request, name: str, group_id: str, at: int = 0) -> Response:
    run = run_of(request, name)
    rows = members(run.index, group_id)
    if not rows:
        raise HTTPException(404, f"{name} has no group {group_id!r}, or it is not indexed yet")
    at = max(at, 0)
    shown = rows[at : at + _SIDE_BY_SIDE]
    computed = _advantages(run, rows)[at : at + _SIDE_BY_SIDE]
    calls = longest_calls(run.store, run.id, [row["id"] for row in shown])
    tokens = [call.prompt_ids + call.response_ids if call else [] for call in calls]
    known = [ids for ids in tokens if ids]
    shared = shared_length(known)
    prompt = _shared_messages([conversation(call) for call in calls if call])
    vocabulary: Vocabulary = request.app.state.vocabularies.of(run.row["config"])
    return page(
        request, "group.html", run=run.current(), group=group_id, rows=rows, at=at,
        per_page=_SIDE_BY_SIDE, vocabulary=vocabulary, prompt=prompt, known=len(known),
        rewards=sorted({name for row in rows for name in row["rewards"]} - {"reward"}),
        shared=shared, shared_text=vocabulary.text(known[0][:shared]) if known else "",
        members=list(zip(
            shown, map(partial(_advantage, run), calls, computed),
            [call and chat_of(call, [prompt]) for call in calls],
            _parted(tokens, shared, vocabulary), strict=True,
        )),
    )  # fmt: skip


def _shared_messages(chats: Sequence[Sequence[Message]]) -> list[Message]:
    """Return the messages at the start that all conversations have."""
    alike = takewhile(lambda said: all(one == said[0] for one in said), zip(*chats, strict=False))
    return [said[0] for said in alike]


def _parted(
    tokens: Sequence[Sequence[int]], shared: int, vocabulary: Vocabulary
) -> list[tuple[int, list[str]]]:
    """Return the place where each member's text begins, after the shared tokens, and the text
    before its first token that no other member has there, that token, and what follows."""
    found: list[tuple[int, list[str]]] = []
    whole = [np.array(ids) for ids in tokens]
    for at, ids in enumerate(tokens):
        others = [*whole[:at], *whole[at + 1 :]]
        place = max((shared_length([whole[at], other]) for other in others), default=0)
        start = max(shared, place - _TOKENS // 2)
        pieces = ids[start:place], ids[place : place + 1], ids[place + 1 : start + _TOKENS]
        found.append((start, [vocabulary.text(piece) for piece in pieces]))
    return found


def _advantage(run: OpenRun, call: Call | None, computed: float | None) -> float | None:
    """Return the mean over the call's trained tokens, or else what was computed of the rewards."""
    seen = read_call(run.folder, call) if call else None
    return computed if seen is None else float(seen.advantage.mean())


def _advantages(run: OpenRun, rows: Sequence[Row]) -> list[float | None]:
    """Return what the group's rewards give; None where that is not what is compared."""
    config = run.row["config"]
    estimator = recorded(config, "algorithm.estimator", "grpo")
    how = ESTIMATORS.get(estimator)
    adapters = recorded(config, "adapters", {}).values()
    # Agents and adapters with rewards of their own; rollouts that did not ask the model.
    apart = len(adapters) > 1 or any(one.get("rewards") is not None for one in adapters)
    apart |= any(":" in name.removeprefix("human:") for row in rows for name in row["rewards"])
    apart |= not all(row["tokens"] for row in rows if row["status"] == "completed")
    if how is None or how.whitens or apart or rows[0]["purpose"] != "train":
        return [None] * len(rows)
    options = recorded(config, f"algorithm.{table_of(estimator)}", {})
    settings = CreditSettings(
        estimator=estimator,
        normalize_std=options.get("normalize_std", False),
        min_group=recorded(config, "rollouts.min_group", 2),
        scaling=Scaling(options.get("std_ddof", 1), options.get("std_epsilon", 1e-6)),
    )
    return group_advantages([row["reward"] for row in rows], settings).advantages
