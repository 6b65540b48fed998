"""Guess the number: the policy may guess three times, and is told higher or lower.

Of the numbers 1 to 7, halving finds each. Each question names the range that is left.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/self_play/guess.py 5
"""

import os
import sys

from openai import OpenAI

from agentrl import emit_reward

LAST, GUESSES = 7, 3


def agent(task: dict) -> None:
    low, high, guesses = 1, LAST, []
    while len(guesses) < GUESSES and task["secret"] not in guesses:
        answer = OpenAI().chat.completions.create(
            model=os.environ.get("AGENTRL_MODEL", "gpt-4o-mini"),
            messages=[{"role": "user", "content": question(low, high)}],
            max_tokens=4,
        )
        said = (answer.choices[0].message.content or "").strip()
        guesses.append(guess := int(said) if said in possible(low, high) else None)
        if guess is not None:
            low, high = (guess + 1, high) if guess < task["secret"] else (low, guess - 1)
    emit_reward(task["secret"] in guesses)
    print(f"{task['secret']}: {guesses}")


def question(low: int, high: int) -> str:
    return f"Guess a number from {low} to {high}."


def possible(low: int, high: int) -> list[str]:
    return [str(number) for number in range(low, high + 1)]


if __name__ == "__main__":
    agent({"secret": int(sys.argv[1]) if len(sys.argv) > 1 else 5})
