"""Agents for the tests: each does one thing that real agents do, or suffer from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

from openai import BadRequestError, OpenAI

from agentrl import emit_reward


def ask(n: int, model: str | None = None, **more: Any) -> str:
    answer = OpenAI().chat.completions.create(
        model=model or os.environ["AGENTRL_MODEL"],
        messages=[{"role": "user", "content": f"Let's play a game. Say you are {n}."}],
        max_tokens=32,
        **more,
    )
    return (answer.choices[0].message.content or "").lower()


def mixed(task: dict[str, Any]) -> None:
    """Rewards by the length of the answer, so that groups differ from the first step on."""
    emit_reward(len(ask(task["n"])) / 10)


def warm(task: dict[str, Any]) -> None:
    """Sets a temperature of its own."""
    emit_reward(len(ask(task["n"], temperature=0.7)) / 10)


def two_models(task: dict[str, Any]) -> None:
    """Asks two adapters, and is rewarded for both answers together."""
    emit_reward(sum(len(ask(task["n"], model=name)) for name in ("asker", "answerer")) / 10)


def sides(task: dict[str, Any]) -> None:
    """Two sides of one policy, with opposite rewards."""
    white, black = (
        len(ask(task["n"], extra_headers={"x-agentrl-agent": side})) for side in ("white", "black")
    )
    emit_reward((white - black) / 10, agent="white")
    emit_reward((black - white) / 10, agent="black")


def dull(task: dict[str, Any]) -> None:
    """Of every second task all rollouts earn the same."""
    text = ask(task["n"])
    emit_reward(1.0 if task["n"] % 2 else len(text) / 10)


def unpaid(task: dict[str, Any]) -> None:
    """Earns nothing."""
    ask(task["n"])
    emit_reward(0.0)


def thankless(task: dict[str, Any]) -> None:
    """Emits no reward."""
    ask(task["n"])


def slow(task: dict[str, Any]) -> None:
    """Takes long enough to be killed on the way."""
    first = ask(task["n"])
    time.sleep(0.6)
    emit_reward(len(first + ask(task["n"])) / 10)


def troubled(task: dict[str, Any]) -> None:
    """Fails in many ways: raises, forgets the reward, calls another model, rewards nothing, never
    asks; asks and earns what no sampler and no trainer can compute."""
    n = task["n"]
    kind = n % 1000
    if kind == 5:
        emit_reward(100.0)
        return
    text = ask(n)
    if kind == 0:
        raise RuntimeError(f"cannot cope with {n}")
    if kind == 1:
        return
    if kind == 2:
        ask(n, model="agentrl-tiny")
    if kind == 3:
        emit_reward(0.0)
        return
    if kind == 6:
        ask(n, temperature=1e-40)
    if kind == 7:
        with contextlib.suppress(BadRequestError):
            ask(n, extra_body={"top_k": 2**63})
    emit_reward(1e308 if kind == 8 else len(text) / 10)


async def asynchronous(task: dict[str, Any]) -> float:
    """Returns its reward, and prints its task and its process."""
    reply = await asyncio.to_thread(ask, task["n"])
    print(task["n"], os.getpid())  # noqa: T201
    return len(reply) / 10


def always_broken(task: dict[str, Any]) -> None:
    raise LookupError("no such luck")
