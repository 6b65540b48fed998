"""The members of a group side by side, and where their tokens part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrl.config.algorithm_options import table_of
from agentrl.history.conversation import Message
from agentrl.history.divergence import Parting, partings, shared_length
from agentrl.history.rollout_table import Row, members
from agentrl.history.sources import OpenRun
from agentrl.history.vocabulary import Vocabulary
from agentrl.runs.token_records import read_call
from agentrl.ui.pages.call import Chat, chat_of, conversation, cut_message
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Call, Json
from agentrl_trainer.data.advantages import ESTIMATORS, CreditSettings, Scaling, group_advantages

router = APIRouter()
_SIDE_BY_SIDE = 16
_TOKENS = 120
"""Tokens of a member that are shown after the first different one, and as many before."""


@dataclass(frozen=True)
class Member:
    """A rollout and its longest call; ``advantage`` is what its tokens trained with on average, or
    None."""

    row: Row
    chat: Chat | None
    advantage: float | None
    parting: Parting
    before: str
    first: str
    after: str


@router.get("/runs/{name}/groups/{group_id:path}")
def group_page(request: Request, name: str, group_id: str, at: int = 0) -> Response:
    run = run_of(request, name)
    rows = members(run.index, group_id)
    if not rows:
        raise HTTPException(404, f"{name} has no group {group_id!r}, or it is not indexed yet")
    at = max(at, 0)
    shown = rows[at : at + _SIDE_BY_SIDE]
    row = run.current()
    calls = longest_calls(run, shown)
    vocabulary, fault = _vocabulary(request, row)
    known = [call for call in calls if call]
    sequences = [call.prompt_ids + call.response_ids for call in known]
    shared = shared_length(sequences)
    prompt = _shared_messages(known)
    return page(
        request, "group.html", run=row, group=group_id, rows=rows, at=at, per_page=_SIDE_BY_SIDE,
        computed=_computed(row, rows), shared=shared, fault=fault,
        is_loading=vocabulary is None and not fault,
        prompt=[cut_message(one) for one in prompt], shared_by=len(known) if len(known) > 1 else 0,
        rewards=sorted({name for one in rows for name in one["rewards"]} - {"reward"}),
        shared_text=_text(vocabulary, sequences[0][:shared]) if sequences else "",
        members=_members(run, shown, calls, shared, prompt, vocabulary),
    )  # fmt: skip


def longest_calls(run: OpenRun, rows: Sequence[Row]) -> list[Call | None]:
    """Return the longest call of each rollout, of the attempt that won or else the last one."""
    ids = [row["id"] for row in rows]
    attempts = {attempt.rollout_id: attempt.id for attempt in run.store.attempts(ids)}
    winners = {one.id: one.winner for one in run.store.rollouts(run.id, ids=ids) if one.winner}
    found = run.store.longest_calls([*(attempts | winners).values()])
    calls = {call.rollout_id: call for call in found}
    return [calls.get(one) for one in ids]


def _shared_messages(calls: Sequence[Call]) -> list[Message]:
    """Return the messages at the start that all conversations have."""
    all_said = [conversation(call) for call in calls]
    count = 0
    for said in zip(*all_said, strict=False):
        if any(one != said[0] for one in said):
            break
        count += 1
    return all_said[0][:count] if all_said else []


def _members(
    run: OpenRun, rows: Sequence[Row], calls: Sequence[Call | None], shared: int,
    prompt: Sequence[Message], vocabulary: Vocabulary | None,
) -> list[Member]:  # fmt: skip
    sequences = [call.prompt_ids + call.response_ids if call else [] for call in calls]
    found: list[Member] = []
    for row, call, ids, parting in zip(rows, calls, sequences, partings(sequences), strict=True):
        place = len(ids) if parting.place is None else parting.place
        start = max(shared, place - _TOKENS)
        pieces = ids[start:place], ids[place : place + 1], ids[place + 1 : place + 1 + _TOKENS]
        texts = [_text(vocabulary, piece) for piece in pieces]
        chat = chat_of(call, [prompt]) if call else None
        found.append(Member(row, chat, _trained_with(run, call), parting, *texts))
    return found


def _text(vocabulary: Vocabulary | None, ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) if vocabulary is None else vocabulary.text(ids)


def _trained_with(run: OpenRun, call: Call | None) -> float | None:
    if call is None or call.trained_step is None:
        return None
    seen = read_call(run.folder, call.trained_step, call.id)
    return None if seen is None or not len(seen.advantage) else float(seen.advantage.mean())


def _computed(run: Json, rows: Sequence[Row]) -> list[float | None]:
    """Return the advantages that the group's rewards give; None where the estimator needs more."""
    algorithm: Json = run["config"].get("algorithm") or {}
    estimator = algorithm.get("estimator", "grpo")
    how = ESTIMATORS.get(estimator)
    if how is None or how.whitens or rows[0]["purpose"] != "train":
        return [None] * len(rows)
    options: Json = algorithm.get(table_of(estimator)) or {}
    settings = CreditSettings(
        estimator=estimator,
        normalize_std=options.get("normalize_std", False),
        min_group=(run["config"].get("rollouts") or {}).get("min_group", 2),
        scaling=Scaling(options.get("std_ddof", 1), options.get("std_epsilon", 1e-6)),
    )
    return group_advantages([row["reward"] for row in rows], settings).advantages


def _vocabulary(request: Request, run: Json) -> tuple[Vocabulary | None, str]:
    """Return the run's vocabulary (None while it loads), and why it cannot be loaded."""
    try:
        found = request.app.state.vocabularies.of(run["config"])
    except (ValueError, OSError) as error:
        return None, str(error)
    return found, ""
