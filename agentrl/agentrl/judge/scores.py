"""Judges that give numbers: relative to the group in one request, or each member by a rubric."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.judge.base import ModelJudge, Opinion
from agentrl.judge.conversations import Conversations
from agentrl_tracer.schemas import Json

_STANDARDS = """\
- Reaching the goal scores well above not reaching it.
- Reaching it with fewer detours scores higher.
- Small differences get close scores, large ones get distant scores.
- Progress towards a goal that was missed earns something."""


class Relative(ModelJudge):
    """Compares the members of a group in one request, and scores each from 0 to 1.

    The method is that of ART's RULER (https://art.openpipe.ai/fundamentals/ruler): what all
    conversations begin with is given once, and only the differences of the scores matter.
    """

    kind = "relative"

    def __init__(self, model: str, rubric: str | None = None, **options: Any) -> None:
        """See ``ModelJudge`` for the options."""
        super().__init__(model, rubric or _STANDARDS, **options)

    async def _judge(self, said: Conversations, group: str) -> list[Opinion]:
        task = (
            "Several agents were given the same goal. Compare their conversations, and give each "
            f"a score from 0 to 1, by its number.\n{self._instructions}"
        )
        keys = [str(at) for at in range(1, len(said.shown) + 1)]
        scores, opinion = await self._ask(
            task, said.numbered(), self._scores_schema(keys), self._read_scores(keys), group
        )
        if scores is None:
            return [opinion] * len(keys)
        judged = [replace(opinion, score=score, why=why) for score, why in scores]
        self._count_ties(judged)
        return judged


class Rubric(ModelJudge):
    """Scores each member alone by weighted criteria.

    The reward is the weighted sum of the criteria's scores (0 to 1 each), divided by the sum of
    the positive weights: 1 where every good criterion is met. Negative weights are penalties.

    Args:
        criteria: the weight of each criterion's text.
        options: see ``ModelJudge``.
    """

    kind = "rubric"

    def __init__(self, model: str, criteria: Mapping[str, float], **options: Any) -> None:
        self._criteria = dict(criteria)
        self._whole = sum(weight for weight in self._criteria.values() if weight > 0)
        if not self._whole:
            raise ConfigError(f"rubric judge: criteria = {criteria}: no weight is above 0")
        super().__init__(model, "", **options)

    async def _judge(self, said: Conversations, group: str) -> list[Opinion]:
        asked = (self._one(conversation, group) for conversation in said.shown)
        judged = await asyncio.gather(*asked)
        self._count_ties(judged)
        return judged

    async def _one(self, conversation: Sequence[Json], group: str) -> Opinion:
        task = (
            "Judge an agent's conversation. Give each criterion, by its number, a score from 0 "
            "(not met at all) to 1 (fully met)."
        )
        keys = {str(at): text for at, text in enumerate(self._criteria, 1)}
        data = {"criteria": keys, "conversation": conversation}
        scores, opinion = await self._ask(
            task, data, self._scores_schema([*keys]), self._read_scores([*keys]), group
        )
        if scores is None:
            return opinion
        weighted = zip(self._criteria.values(), scores, strict=True)
        opinion.score = sum(weight * score for weight, (score, _) in weighted) / self._whole
        opinion.details["criteria"] = {
            text: {"score": score, "why": why}
            for text, (score, why) in zip(self._criteria, scores, strict=True)
        }
        return opinion
