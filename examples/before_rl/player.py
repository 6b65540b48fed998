"""Play along: say the number that the task gives. Once with its true reward, once without any."""

import os

from openai import OpenAI

from agentrl import emit_reward


def unrewarded(task: dict) -> str:
    answer = OpenAI().chat.completions.create(
        model=os.environ["AGENTRL_MODEL"],
        messages=[{"role": "user", "content": f"Let's play a game. Say you are {task['n']}."}],
        max_tokens=32,
    )
    return answer.choices[0].message.content or ""


def rewarded(task: dict) -> None:
    emit_reward(plays_along(unrewarded(task), task["n"]))


def plays_along(answer: str, n: int) -> float:
    return float(any(f"{i_am} {n}" in answer.lower() for i_am in ("i am", "i'm")))
