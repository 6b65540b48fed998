"""Print games of the clumsy player as chats, a line each.

    python examples/twenty_questions/games.py > games.jsonl

They are full games about training nouns.
"""

import json
import random

from agent import SMALL_FULL, conversation
from clumsy import game
from cyclopts import run


def main(games: int = 800) -> None:
    rng = random.Random(0)
    for _ in range(games):
        messages = conversation(SMALL_FULL, game(rng, simple=False))[:-1]
        print(json.dumps({"messages": messages}))


if __name__ == "__main__":
    run(main)
