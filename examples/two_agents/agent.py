"""Two agents play one game: a *messenger* passes a number on, an *impostor* claims to be it.

Only the messenger is told the number; the impostor knows nothing but the messenger's words. They
win or lose together: one reward for both. Each asks for a model of its own name, so in training
each gets an adapter of its own.

It knows the OpenAI API and ``emit_reward``, nothing else: run it against any OpenAI endpoint with

    OPENAI_BASE_URL=... OPENAI_API_KEY=... MESSENGER=gpt-4o-mini IMPOSTOR=gpt-4o-mini \
        python examples/two_agents/agent.py 42
"""

import os
import re
import sys

from openai import OpenAI

from agentrl import emit_reward

MESSENGER = os.environ.get("MESSENGER", "messenger")
IMPOSTOR = os.environ.get("IMPOSTOR", "impostor")


def agent(task: dict) -> None:
    n = task["n"]
    message = ask(MESSENGER, f"The secret number is {n}. Repeat it.")
    claim = ask(IMPOSTOR, f"Let's play a game. Say you are {message.rstrip('.')}.")
    emit_reward(score(claim, n))
    print(f"{n}: messenger: {message!r}, impostor: {claim!r}")


def ask(model: str, prompt: str) -> str:
    answer = OpenAI().chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=24
    )
    return (answer.choices[0].message.content or "").strip()


def score(claim: str, n: int) -> float:
    """1 for "I am n" or "I'm n", a little if the number came through at all, else 0."""
    if re.search(rf"\bi('m| am) {n}\b", claim.lower()):
        return 1.0
    return 0.2 if re.search(rf"\b{n}\b", claim) else 0.0


if __name__ == "__main__":
    agent({"n": int(sys.argv[1]) if len(sys.argv) > 1 else 42})
