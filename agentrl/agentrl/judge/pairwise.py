"""A judge that compares two members at a time; the rate of wins is the score."""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.judge.base import ModelJudge, Opinion, object_of
from agentrl.judge.conversations import Conversations

_TIE = "tie"


class Pairwise(ModelJudge):
    """Lets the members of a group compete in pairs: wins and half of the ties, by comparisons.

    Args:
        rubric: what makes an answer better.
        opponents: how many others each member meets, at least; by default all. The members stand
            in a shuffled ring and meet their neighbors.
        options: see ``ModelJudge``.
    """

    kind = "pairwise"

    def __init__(
        self, model: str, rubric: str = "", *, opponents: int | None = None, **options: Any
    ) -> None:
        if opponents is not None and opponents < 1:
            raise ConfigError(
                f"pairwise judge: opponents = {opponents}: must be above 0, or left out"
            )
        super().__init__(model, rubric, **options)
        self._opponents = opponents

    async def _judge(self, said: Conversations, group: str) -> list[Opinion]:
        pairs = _pairs(len(said.shown), self._opponents)
        games = await asyncio.gather(*(self._compare(said, pair, group) for pair in pairs))
        judged = [Opinion(why="every other conversation equals it") for _ in said.shown]
        if not pairs:
            judged[0].score = 0.5
        for pair, (won, opinion) in zip(pairs, games, strict=True):
            for place, result in zip(pair, (won, None if won is None else 1 - won), strict=True):
                mine = judged[place]
                mine.calls += opinion.calls
                mine.cost += opinion.cost
                mine.why = opinion.why
                if result is not None:
                    mine.details.setdefault("games", []).append([result, opinion.why])
        for one in judged:
            if results := [result for result, _ in one.details.get("games", ())]:
                one.score = sum(results) / len(results)
                one.why = f"{one.score * len(results):g} of {len(results)}"
        return judged

    async def _compare(
        self, said: Conversations, pair: tuple[int, int], group: str
    ) -> tuple[float | None, Opinion]:
        """Return 1 if the first wins, 0 if the second does, else 0.5; None: no judgment."""
        task = (
            "Two agents were given the same goal. Which conversation is better? Answer with its "
            f'number, or with "{_TIE}" if they are equally good.\n{self._instructions}'
        )
        results = {"1": 1.0, "2": 0.0, _TIE: 0.5}
        better = {"better": {"type": "string", "enum": [*results]}}

        def read(answer: Any) -> tuple[float, str]:
            return results[answer["better"]], str(answer.get("explanation", ""))

        found, opinion = await self._ask(
            task, said.numbered(*pair), object_of(self.explanation() | better), read, group
        )
        if found is None:
            return None, opinion
        won, opinion.why = found
        self.tally.count("ties", won == results[_TIE])
        return won, opinion


def _pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return who meets whom; each is first about as often as second."""
    if opponents is None or opponents >= count - 1:
        every = combinations(range(count), 2)
        return [(a, b) if (a + b) % 2 else (b, a) for a, b in every]
    steps = range(1, (opponents + 1) // 2 + 1)
    ring = ((at, (at + step) % count) for step in steps for at in range(count))
    return list({frozenset(pair): pair for pair in ring}.values())
