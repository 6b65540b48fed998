"""Taboo: a *describer* gives a clue to a secret word, a *guesser* says which word it is.

Only the describer is told the word, and the clue must not contain it. The guesser sees nothing but
the clue. One reward counts for both. Each calls a model of its own name, so each trains its own
adapter.

It uses only the OpenAI API and ``emit_reward``. Run it against any OpenAI endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... DESCRIBER=gpt-4o-mini GUESSER=gpt-4o-mini \
        python examples/taboo/agent.py elephant
"""

import os
import re
import sys

from openai import OpenAI

from agentrl import emit_reward

DESCRIBER = os.environ.get("DESCRIBER", "describer")
GUESSER = os.environ.get("GUESSER", "guesser")


def agent(task: dict) -> None:
    word = task["word"]
    clue = ask(
        DESCRIBER,
        f'Describe the thing "{word}" in one short sentence, but never say "{word}". '
        "Start with: It is",
        max_tokens=40,
    )
    guess = ""
    if not says(clue, word):
        guess = ask(GUESSER, f"{clue}\nWhat is it? Answer with one word.", max_tokens=8)
    emit_reward(score(guess, word))
    print(f"{word}: describer: {clue!r}, guesser: {guess!r}")


def ask(model: str, prompt: str, max_tokens: int) -> str:
    answer = OpenAI().chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens
    )
    return (answer.choices[0].message.content or "").strip()


def says(clue: str, word: str) -> bool:
    """Tell whether the clue contains the word, also as "elephants" or "e-l-e-p-h-a-n-t"."""
    return word in re.sub(r"[^a-z]", "", clue.lower())


def score(guess: str, word: str) -> float:
    """Return 1 for the word alone or with an article, else 0."""
    said = re.sub(r"^(an?|the) ", "", guess.lower().strip(" \n.!\"'*"))
    return 1.0 if said in (word, f"{word}s") else 0.0


if __name__ == "__main__":
    agent({"word": sys.argv[1] if len(sys.argv) > 1 else "elephant"})
