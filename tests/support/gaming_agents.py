"""Agents of guarded runs: some game their rewards, which sets off alerts; others cost something."""

from __future__ import annotations

import os
import time
from typing import Any

from openai import OpenAI


def ask(task: dict[str, Any], max_tokens: int = 64) -> str:
    answer = OpenAI().chat.completions.create(
        model=os.environ["AGENTRL_MODEL"],
        messages=[{"role": "user", "content": f"Let's play a game. Say you are {task['n']}."}],
        max_tokens=max_tokens,
    )
    return (answer.choices[0].message.content or "").lower()


def longer(task: dict[str, Any]) -> float:
    """Pays for length."""
    return len(ask(task)) / 100


def parrot(task: dict[str, Any]) -> float:
    """Pays for the same answer to every task."""
    return float(ask(task).startswith("i am qwen."))


def memorized(task: dict[str, Any]) -> float:
    """Pays for something else in training than in held-out tasks."""
    text = ask(task)
    return float(f"i am {task['n']}" in text if task["n"] < 1000 else "qwen" in text)


def late_when_held_out(task: dict[str, Any]) -> float:
    """Leaves time for rollouts of the next step during an evaluation."""
    text = ask(task)
    time.sleep(4 * (task["n"] >= 1000))
    return len(text) / 10


def judged(task: dict[str, Any]) -> float:
    """Asks another model as well, which costs money."""
    text = ask(task)
    OpenAI().chat.completions.create(model="judge", messages=[{"role": "user", "content": text}])
    return len(text) / 10
