"""The agent of examples/hello, which emits no reward: judges compare its answers."""

import os
import sys

from openai import OpenAI


def agent(task: dict) -> None:
    answer = OpenAI().chat.completions.create(
        model=os.environ.get("AGENTRL_MODEL", "gpt-4o-mini"),
        messages=[{"role": "user", "content": f"Let's play a game. Say you are {task['n']}."}],
        max_tokens=32,
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    agent({"n": int(sys.argv[1]) if len(sys.argv) > 1 else 42})
