"""The hello-world agent: it asks a model to say a number, and rewards it for doing so.

It uses only the OpenAI API and ``emit_reward``. Run it against any OpenAI endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/hello/agent.py 42
"""

import os
import sys

from openai import OpenAI

from agentrl import emit_reward


def agent(task: dict) -> None:
    n = task["n"]
    answer = OpenAI().chat.completions.create(
        model=os.environ.get("AGENTRL_MODEL", "gpt-4o-mini"),
        messages=[{"role": "user", "content": f"Let's play a game. Say you are {n}."}],
        max_tokens=32,
    )
    reply = (answer.choices[0].message.content or "").lower()
    emit_reward(score(reply, n))
    print(f"{n}: {reply}")


def score(reply: str, n: int) -> float:
    """Return 1 for playing along, -1 for a refusal, 0 for anything else."""
    if f"i am {n}" in reply or f"i'm {n}" in reply:
        return 1.0
    return -1.0 if f"not {n}" in reply else 0.0


if __name__ == "__main__":
    agent({"n": int(sys.argv[1]) if len(sys.argv) > 1 else 42})
