"""The judges: relative to the group, by a rubric, in pairs, and several together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.config.errors import ConfigError
from agentrl.judge.base import Conversation, Judge, ModelJudge, Opinion, numbered

if TYPE_CHECKING:
    from agentrl.scoring.functions import ScoringContext
    from agentrl.scoring.trace import Trace

_STANDARDS = """\
- Reaching the goal scores well above not reaching it.
- Reaching it with fewer detours scores higher.
- Small differences get close scores, large ones get distant scores.
- Progress towards a goal that was missed earns something."""
_RESULTS = {"1": 1.0, "2": 0.0, "tie": 0.5}


class Relative(ModelJudge):
    """Compares the members of a group in one request, and scores each from 0 to 1.

    The method is that of ART's RULER (https://art.openpipe.ai/fundamentals/ruler): what all
    conversations begin with is given once, and only the differences of the scores matter.
    """

    def __init__(self, model: str, rubric: str | None = None, **options: Any) -> None:
        """See ``ModelJudge`` for the options."""
        super().__init__(model, rubric or _STANDARDS, **options)

    async def _judge(self, shown: Sequence[Conversation], group: str) -> list[Opinion]:
        task = (
            "Several agents were given the same goal. Compare their conversations, and give each "
            f"a score from 0 to 1, by its number.\n{self._instructions}"
        )
        scores, opinion = await self._ask_scores(task, numbered(shown), len(shown), group)
        judged = [replace(opinion, score=score, why=why) for score, why in scores]
        return judged or [opinion] * len(shown)


class Rubric(ModelJudge):
    """Scores each member alone by weighted criteria.

    The reward is the weighted sum of the criteria's scores (0 to 1 each), divided by the sum of
    the positive weights: 1 where every good criterion is met. Negative weights are penalties.

    Args:
        criteria: the weight of each criterion's text.
        options: see ``ModelJudge``.
    """

    def __init__(self, model: str, criteria: Mapping[str, float], **options: Any) -> None:
        self._criteria = dict(criteria)
        self._whole = sum(weight for weight in self._criteria.values() if weight > 0)
        if not self._whole:
            raise ConfigError(f"rubric judge: criteria = {criteria}: no weight is above 0")
        super().__init__(
            model,
            "Judge an agent's conversation. Give each criterion, by its number, a score from 0 "
            "(not met at all) to 1 (fully met).",
            **options,
        )

    async def _judge(self, shown: Sequence[Conversation], group: str) -> list[Opinion]:
        return await asyncio.gather(*(self._one(conversation, group) for conversation in shown))

    async def _one(self, conversation: Conversation, group: str) -> Opinion:
        criteria = {str(at): text for at, text in enumerate(self._criteria, 1)}
        data = {"criteria": criteria, "conversation": conversation}
        scores, opinion = await self._ask_scores(self._instructions, data, len(criteria), group)
        if scores:
            weighted = [
                w * score for w, (score, _) in zip(self._criteria.values(), scores, strict=True)
            ]
            opinion.score = sum(weighted) / self._whole
            named = zip(self._criteria, scores, strict=True)
            opinion.details["criteria"] = {t: {"score": x, "why": why} for t, (x, why) in named}
        return opinion


class Pairwise(ModelJudge):
    """Lets the members of a group compete in pairs: wins and half of the ties, by comparisons.

    Args:
        rubric: what makes an answer better.
        opponents: how many others each member meets, at least; by default all. The members stand
            in a shuffled ring and meet their neighbors.
        options: see ``ModelJudge``.
    """

    def __init__(
        self, model: str, rubric: str = "", *, opponents: int | None = None, **options: Any
    ) -> None:
        super().__init__(model, rubric, **options)
        self._opponents = opponents

    async def _judge(self, shown: Sequence[Conversation], group: str) -> list[Opinion]:
        pairs = _pairs(len(shown), self._opponents)
        if not pairs:
            return [Opinion(0.5, "every other conversation equals it")]
        games = await asyncio.gather(
            *(self._compare([shown[at] for at in pair], group) for pair in pairs)
        )
        judged = [Opinion(details={"games": []}) for _ in shown]
        for pair, game in zip(pairs, games, strict=True):
            for place in pair:
                mine, won = judged[place], game.score
                mine.calls, mine.cost = mine.calls + game.calls, mine.cost + game.cost
                mine.why = game.why
                if won is not None:
                    mine.details["games"].append([won if place == pair[0] else 1 - won, game.why])
        for one in judged:
            if results := [result for result, _ in one.details["games"]]:
                one.score = fmean(results)
                one.why = f"{sum(results):g} of {len(results)}"
        return judged

    async def _compare(self, two: Sequence[Conversation], group: str) -> Opinion:
        """Return an opinion that scores 1 if the first wins, 0 if the second does, else 0.5."""
        task = (
            "Two agents were given the same goal. Which conversation is better? Answer with its "
            f'number, or with "tie" if they are equally good.\n{self._instructions}'
        )
        properties = self._explained("better", {"type": "string", "enum": [*_RESULTS]})
        found, opinion = await self._ask(task, numbered(two), properties, group)
        if found:
            opinion.score = _RESULTS[found["better"]]
            opinion.why = found.get("explanation", "")
        return opinion


def _pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return who meets whom in a ring; each is first about as often as second."""
    met = min(opponents or count, count - 1)
    steps = range(1, (met + 1) // 2 + 1)
    ring = ((at, (at + step) % count) for step in steps for at in range(count))
    return list({frozenset(pair): pair for pair in ring}.values())


class Panel(Judge):
    """Scores with the mean of several judges.

    A judge that scores no member of a group (it is down, or its budget is spent) is left out for
    that group. A member that one of the others did not score gets no score: its mean would not
    compare with the other members'. ``disagreement`` is the mean of largest minus smallest score.
    """

    def __init__(self, *judges: Judge, name: str = "panel") -> None:
        if len({judge.name for judge in judges}) < max(len(judges), 2):
            raise ConfigError(
                'panel judge: it needs two judges or more of different names; give them name="..."'
            )
        super().__init__(name)
        self._judges = judges
        self._spreads: list[float] = []

    @property
    def judges(self) -> list[Judge]:
        return [self, *(one for judge in self._judges for one in judge.judges)]

    def connect(self, context: ScoringContext) -> None:
        super().connect(context)
        for judge in self._judges:
            judge.connect(context)

    async def opinions(self, traces: Sequence[Trace]) -> list[Opinion]:
        said = await asyncio.gather(*(judge.opinions(traces) for judge in self._judges))
        present = sum(any(one.score is not None for one in of_judge) for of_judge in said)
        self._count("absent", len(said) - present)
        return [self._together(present, of_member) for of_member in zip(*said, strict=True)]

    def _together(self, present: int, said: Sequence[Opinion]) -> Opinion:
        """Return what the judges say of one member, which all that are present must score."""
        names = [judge.name for judge in self._judges]
        reasons = [f"{name}: {one.why}" for name, one in zip(names, said, strict=True) if one.why]
        scores = [one.score for one in said]
        found = Opinion(
            why="; ".join(reasons), details={"judges": dict(zip(names, scores, strict=True))},
            calls=[call for one in said for call in one.calls], cost=sum(one.cost for one in said),
        )  # fmt: skip
        given = [score for score in scores if score is not None]
        if given and len(given) == present:
            found.score, spread = fmean(given), max(given) - min(given)
            found.details["spread"] = spread
            self._spreads.append(spread)
        return found

    def take_metrics(self) -> dict[str, float]:
        found = super().take_metrics()
        for judge in self._judges:
            found |= judge.take_metrics()
        if self._spreads:
            found[f"judge/{self.name}/disagreement"] = fmean(self._spreads)
            self._spreads.clear()
        return found
