"""Agents of ``scripts/chaos.py``: each writes every answer that it received to a journal."""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from agentrl import emit_reward
from agentrl_tracer.context import current_rollout


def note(**line: Any) -> None:
    """Append a line to the journal in one write: a kill loses all of it or nothing."""
    rollout = current_rollout()
    assert rollout is not None
    line["attempt"] = rollout.attempt_id
    journal = os.open(os.environ["CHAOS_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(journal, (json.dumps(line) + "\n").encode())
    finally:
        os.close(journal)


def ask(n: int, model: str | None = None) -> int:
    """Return the length of the model's answer."""
    answer = OpenAI().chat.completions.create(
        model=model or os.environ["AGENTRL_MODEL"],
        messages=[{"role": "user", "content": f"Let's play a game. Say you are {n}."}],
        max_tokens=24,
    )
    text = answer.choices[0].message.content or ""
    note(id=answer.id, content=text)
    return len(text)


def finish(length: int) -> None:
    emit_reward(length / 10)
    note(end=True)


def one_adapter(task: dict[str, Any]) -> None:
    """Ask three times in turn."""
    finish(sum(ask(task["n"] + i) for i in range(3)))


def two_adapters(task: dict[str, Any]) -> None:
    """Ask two adapters at the same time, twice."""
    with ThreadPoolExecutor(2) as pool:
        asked = ["asker", "answerer"] * 2
        finish(sum(pool.map(lambda model: ask(task["n"], model), asked)))


async def asynchronous(task: dict[str, Any]) -> None:
    """Ask twice at the same time on the process's event loop."""
    lengths = await asyncio.gather(*(asyncio.to_thread(ask, task["n"] + i) for i in range(2)))
    finish(sum(lengths))


def ranks(task: dict[str, Any]) -> None:
    """Do as one adapter; two trainers compute the updates."""
    one_adapter(task)


ranks_sharded = ranks
gateways = one_adapter  # each runner asks one of two
