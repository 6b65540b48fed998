"""The table of a run's rollouts, and the rollouts of one task across steps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agentrl.config.errors import ConfigError
from agentrl.history.evaluations import task_data
from agentrl.history.rollout.conversation import Message, answered
from agentrl.history.rollout.trace import longest_calls
from agentrl.history.rollout_table import NAMES, Page, Query, Row, find_rollouts, of_task
from agentrl.history.sources import OpenRun
from agentrl.ui.views import page, run_of
from agentrl_tracer.schemas import Purpose

router = APIRouter()
_PER_PAGE = 50
_COLUMNS = {
    "step": "Step", "task": "Rollout", "status": "Status", "reward": "Reward",
    "feedback": "Feedback", "attempts": "Attempts", "calls": "Calls",
    "prompt_tokens": "Prompt tokens", "tokens": "Sampled tokens", "seconds": "Took",
    "started_at": "Started", "agent": "Agent", "error": "Error",
}  # fmt: skip


@router.get("/runs/{name}/rollouts")
def rollouts_page(
    request: Request, name: str, where: str = "", search: str = "", sort: str = "", at: int = 0
) -> Response:
    run = run_of(request, name)
    query = Query(where, search, sort, _PER_PAGE, max(at, 0))
    fault = None
    try:
        found = find_rollouts(run.index, query)
    except ConfigError as error:
        found, fault = Page([], 0), str(error)
    held, there = run.index.progress()
    return page(
        request, "rollouts.html", run=run.current(), columns=_columns(found), found=found,
        query=query, fault=fault, held=held, there=there, names=NAMES,
    )  # fmt: skip


@router.get("/runs/{name}/tasks/{purpose}/{index}")
def task_page(
    request: Request,
    name: str,
    purpose: Purpose,
    index: Annotated[int, Path(ge=0, le=2**31)],
    at: int = 0,
) -> Response:
    """Show how the answer to one task changed."""
    run = run_of(request, name)
    task = task_data(run, purpose, index)
    if task is None:
        raise HTTPException(404, f"{name} has no task {purpose} {index}")
    found = of_task(run.index, purpose.value, index, _PER_PAGE, max(at, 0))
    return page(
        request, "task.html", run=run.current(), purpose=purpose, index=index, task=task,
        found=found, at=max(at, 0), per_page=_PER_PAGE, answers=_answers(run, found.rows),
    )  # fmt: skip


def _columns(found: Page) -> dict[str, str]:
    """Return the names of the columns; rewards besides the plain one follow their sum."""
    rewards = sorted({name for row in found.rows for name in row["rewards"]} - {"reward"})
    columns: dict[str, str] = {}
    for name, title in _COLUMNS.items():
        if name != "feedback" or any(row["feedback"] for row in found.rows):
            columns[name] = title
        if name == "reward":
            columns |= {f"rewards.{reward}": reward for reward in rewards}
    return columns


def _answers(run: OpenRun, rows: list[Row]) -> dict[str, Message]:
    """Return the answer that ends each rollout's longest conversation, by rollout."""
    calls = longest_calls(run.store, run.id, [row["id"] for row in rows])
    found = zip(rows, calls, strict=True)
    answers = {row["id"]: answered(call.response) for row, call in found if call}
    return {rollout: answer for rollout, answer in answers.items() if answer}
