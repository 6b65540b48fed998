"""Two agents play one game: a *messenger* passes a number on, an *impostor* claims to be it.

Only the messenger is told the number; the impostor sees only the messenger's words. One reward
counts for both. Each calls a model of its own name, so each trains its own adapter.

It uses only the OpenAI API and ``emit_reward``. Run it against any OpenAI endpoint:

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
    """Return 1 for "I am n" or "I'm n", 0.2 if the number is in the claim, else 0."""
    if re.search(rf"\bi('m| am) {n}\b", claim.lower()):
        return 1.0
    return 0.2 if re.search(rf"\b{n}\b", claim) else 0.0


if __name__ == "__main__":
    agent({"n": int(sys.argv[1]) if len(sys.argv) > 1 else 42})
