"""The agent of ``memory.py``: it asks for an answer that no end of text cuts short."""

from __future__ import annotations

import random

from openai import OpenAI

from agentrl import emit_reward


def agent(task: dict) -> None:
    OpenAI().chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": task["prompt"]}],
        max_tokens=task["answer"],
        logit_bias={str(token): -100 for token in task["ends"]},
    )
    emit_reward(random.SystemRandom().random())  # so that every rollout trains
