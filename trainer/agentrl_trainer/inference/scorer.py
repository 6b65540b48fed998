"""Log-probs of given rows under the sampler's model, in between its steps.

Knows: the trainer's way of computing them, which this is; so a sampler's and a trainer's answer
agree. Does not know: adapters (those active count), threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from agentrl_trainer.data.packing import pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.logprobs import TokenLogprobs
from agentrl_trainer.models.loading import BaseModel

T = TypeVar("T")

_TOKENS = {"cpu": 4096}
_TOKENS_ELSEWHERE = 16384
"""Through the model at once."""


class Scorer:
    """``rows -> rows`` of log-probs of each token given those before it; 0 for the first."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._logprobs: TokenLogprobs | None = None

    def __call__(self, rows: Sequence[list[int]]) -> list[list[float]]:
        return self._apart(lambda: self._score(rows))

    def likeliest(self, row: list[int], count: int) -> list[list[tuple[int, float]]]:
        """(id, log-prob) of the ``count`` likeliest tokens in each one's place, best first, given
        those before it; none for the first."""
        return self._apart(lambda: self._likeliest(row, count))

    def _apart(self, score: Callable[[], T]) -> T:
        # Each part's: the towers of a multimodal model may not know what its language model does.
        found: list[Any] = [getattr(m, "config", None) for m in self._base.model.modules()]
        configs = {id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values()
        before = [(c, c._attn_implementation_internal) for c in configs]
        try:
            return score()
        finally:  # sampling has an attention of its own
            for config, attention in before:
                config._attn_implementation_internal = attention

    def _score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        # Made when first asked for: it tries out what the model allows.
        self._logprobs = self._logprobs or TokenLogprobs(self._base.model)
        found = [[0.0] * len(row) for row in rows]
        datums = [_scored(row) for row in rows]
        budget = _TOKENS.get(self._base.device.type, _TOKENS_ELSEWHERE)
        for batch in pack(datums, token_budget=budget, share=self._logprobs.why_padded is None):
            batch = batch.to(self._base.device)
            values = self._logprobs(batch).tolist()
            where = zip(batch.rows.tolist(), batch.columns.tolist(), values, strict=True)
            for row, column, value in where:
                found[batch.indices[row]][column + 1] = value
        return found

    def _likeliest(self, row: list[int], count: int) -> list[list[tuple[int, float]]]:
        self._logprobs = self._logprobs or TokenLogprobs(self._base.model)
        found: list[list[tuple[int, float]]] = [[] for _ in row]
        share = self._logprobs.why_padded is None
        for batch in pack([_scored(row)], token_budget=len(row), share=share):
            batch = batch.to(self._base.device)
            ids, values = self._logprobs.likeliest(batch, count)
            columns = zip(batch.columns.tolist(), ids.tolist(), values.tolist(), strict=True)
            for column, likeliest, logprobs in columns:
                found[column + 1] = list(zip(likeliest, logprobs, strict=True))
        return found


def _scored(row: list[int]) -> TrainingRow:
    blank = [0.0] * len(row)
    return TrainingRow(row, [False] + [True] * (len(row) - 1), blank, blank)
