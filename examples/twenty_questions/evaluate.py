"""Play 20 Questions over the data set and print the win rates, without agentrl.

The environment names the OpenAI endpoint (see ``agent.py``), for instance a trained
adapter behind ``agentrl serve``, with the offline answerer beside it:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none PLAYER_MODEL=policy \\
    ANSWERER_BASE_URL=http://127.0.0.1:8765/v1 ANSWERER_MODEL=answerer \\
    python answerer.py -- python evaluate.py --simple --repeat 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent import FULL, SIMPLE, SMALL_FULL, SMALL_SIMPLE, Rules, play

HERE = Path(__file__).parent
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Result:
    """One finished game."""

    split: str
    category: str
    noun: str
    won: bool
    turns: int


def nouns(file: Path, per_category: int | None) -> list[dict[str, str]]:
    """Return the rows of a file, or the first few of every category."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    seen: dict[str, int] = defaultdict(int)
    chosen: list[dict[str, str]] = []
    for row in rows:
        seen[row["category"]] += 1
        if per_category is None or seen[row["category"]] <= per_category:
            chosen.append(row)
    return chosen


async def evaluate(
    splits: Iterable[str], rules: Rules, *, repeat: int, per_category: int | None, parallel: int
) -> list[Result]:
    """Play every noun ``repeat`` times; a game that fails raises and is not a loss."""
    at_once = asyncio.Semaphore(parallel)

    async def one(split: str, row: dict[str, str]) -> Result:
        async with at_once:
            game = await play(row, rules)
        print(f"{row['noun']}: {'won' if game.won else 'lost'} in {len(game.turns)}", flush=True)
        return Result(split, row["category"], row["noun"], game.won, len(game.turns))

    prefix = "simple_" if rules.names_category else ""
    games = [
        (split, row)
        for split in splits
        for row in nouns(HERE / f"{prefix}{split}.jsonl", per_category) * repeat
    ]
    return await asyncio.gather(*(one(split, row) for split, row in games))


def table(results: list[Result]) -> str:
    """Return a table of win rates by category and split, and the mean length of won games."""
    lines = [f"{'':<12}" + "".join(f"{split:>18}" for split in SPLITS)]
    for category in [*sorted({r.category for r in results}), None]:
        line = f"{category or 'all':<12}"
        for split in SPLITS:
            games = [r for r in results if r.split == split and category in (r.category, None)]
            won = sum(r.won for r in games)
            rate = f"{won / len(games):.0%} ({won}/{len(games)})" if games else "-"
            line += f"{rate:>18}"
        lines.append(line)
    wins = [r.turns for r in results if r.won]
    if wins:
        lines.append(f"mean questions of a won game: {sum(wins) / len(wins):.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Win rates of 20 Questions.")
    parser.add_argument("--simple", action="store_true", help="three questions, the category")
    parser.add_argument("--small", action="store_true", help="the prompts of real*.toml")
    parser.add_argument("--split", choices=SPLITS, help="only this one")
    parser.add_argument("--repeat", type=int, default=1, help="games per noun")
    parser.add_argument("--per-category", type=int, help="only so many nouns of each category")
    parser.add_argument("--parallel", type=int, default=4, help="games at once")
    parser.add_argument("--json", type=Path, help="write every game to this file, as JSON lines")
    args = parser.parse_args()
    simple, full = (SMALL_SIMPLE, SMALL_FULL) if args.small else (SIMPLE, FULL)
    results = asyncio.run(
        evaluate(
            [args.split] if args.split else SPLITS,
            simple if args.simple else full,
            repeat=args.repeat,
            per_category=args.per_category,
            parallel=args.parallel,
        )
    )
    if args.json:
        args.json.write_text("".join(json.dumps(vars(result)) + "\n" for result in results))
    print(table(results), file=sys.stdout)


if __name__ == "__main__":
    main()
