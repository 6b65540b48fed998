"""Several judges together: the mean of their scores, and how far apart these are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from agentrl.config.errors import ConfigError
from agentrl.judge.base import Judge, Opinion

if TYPE_CHECKING:
    from agentrl.scoring.functions import ScoringContext
    from agentrl.scoring.trace import Trace


class Panel(Judge):
    """Scores with the mean of several judges.

    A judge that scores no member of a group (it is down, or its budget is spent) is left out for
    that group. A member that one of the others did not score gets no score: its mean would not
    compare with the other members'. ``disagreement`` is the mean of largest minus smallest score.
    """

    kind = "panel"

    def __init__(self, *judges: Judge, name: str = "panel") -> None:
        names = [judge.name for judge in judges]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(
                f"panel judge: judges = {', '.join(names) or 'none'}: must be two or more of "
                'different names; give equal ones name="..."'
            )
        super().__init__(name)
        self._judges = judges
        self._spreads: list[float] = []

    def connect(self, context: ScoringContext) -> None:
        super().connect(context)
        for judge in self._judges:
            judge.connect(context)

    async def opinions(self, traces: Sequence[Trace]) -> list[Opinion]:
        said = await asyncio.gather(*(judge.opinions(traces) for judge in self._judges))
        names = [judge.name for judge in self._judges]
        present = [any(one.score is not None for one in of_judge) for of_judge in said]
        self.tally.count("absent", present.count(False))
        judged = [_together(names, present, of_member) for of_member in zip(*said, strict=True)]
        spreads = [one.details["spread"] for one in judged if "spread" in one.details]
        self._spreads += spreads
        return judged

    def take_metrics(self) -> dict[str, float]:
        found = super().take_metrics()
        for judge in self._judges:
            found |= judge.take_metrics()
        if self._spreads:
            found[f"judge/{self.name}/disagreement"] = fmean(self._spreads)
            self._spreads.clear()
        return found


def _together(
    names: Sequence[str], present: Sequence[bool], opinions: Sequence[Opinion]
) -> Opinion:
    """Return what the judges that are present say of one member together."""
    by_judge = dict(zip(names, opinions, strict=True))
    scores = [one.score for one, here in zip(opinions, present, strict=True) if here]
    given = [score for score in scores if score is not None]
    found = Opinion(
        why="; ".join(f"{name}: {one.why}" for name, one in by_judge.items() if one.why),
        details={"judges": {name: one.score for name, one in by_judge.items()}},
        calls=[call for one in opinions for call in one.calls],
        cost=sum(one.cost for one in opinions),
    )
    if given and len(given) == len(scores):
        found.score = fmean(given)
        found.details["spread"] = max(given) - min(given)
    return found
