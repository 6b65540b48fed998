"""Nim by self-play: one policy plays both sides, and each side has a reward of its own.

Players take 1 to 3 stones in turn; who takes the last one wins, and who answers anything else
loses. ``emit_reward(1, agent="white")`` counts for white's calls only, which are compared with
white's in the other games of the group. In tasks with ``perfect`` black never errs. So an
evaluation measures how often the policy makes no mistake from positions that it can win.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/self_play/nim.py 7
"""

import os
import random
import sys

from openai import OpenAI

from agentrl import emit_reward

SIDES = ("white", "black")


def agent(task: dict) -> None:
    pile, turn, played = task["pile"], 0, []
    winner = None
    while winner is None:
        side, other = SIDES[turn % 2], SIDES[(turn + 1) % 2]
        perfect = task.get("perfect") and side == "black"
        taken = best(pile) if perfect else ask(side, pile)
        played.append(f"{side} {taken}")
        pile, turn = pile - (taken or 0), turn + 1
        if taken is None or pile == 0:
            winner = other if taken is None else side
    if task.get("perfect"):
        emit_reward(winner == "white")
    else:
        for side in SIDES:
            emit_reward(1 if side == winner else -1, agent=side)
    print(f"{task['pile']}: {', '.join(played)}: {winner} wins")


def ask(side: str, pile: int) -> int | None:
    """Return the model's move; None if it is not legal."""
    answer = OpenAI().chat.completions.create(
        model=os.environ.get("AGENTRL_MODEL", "gpt-4o-mini"),
        messages=[{"role": "user", "content": question(pile)}],
        max_tokens=4,
        extra_headers={"x-agentrl-agent": side},
    )
    said = (answer.choices[0].message.content or "").strip()
    return int(said) if said in legal(pile) else None


def question(pile: int) -> str:
    return f"{pile} stones. Take 1, 2 or 3?"


def legal(pile: int) -> list[str]:
    return [str(taken) for taken in range(1, min(pile, 3) + 1)]


def best(pile: int) -> int:
    """Leave a multiple of 4 if possible."""
    return pile % 4 or random.randint(1, min(pile, 3))


if __name__ == "__main__":
    agent({"pile": int(sys.argv[1]) if len(sys.argv) > 1 else 7})
