"""Log-probs of given rows under the sampler's model, between its steps.

Uses the trainer's ``TokenLogprobs``, so that the sampler and the trainer agree. The adapter that is
active counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from agentrl_trainer.data.packing import MicroBatch, pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.logprobs import TokenLogprobs
from agentrl_trainer.models.loading import BaseModel

_CPU_TOKENS, _GPU_TOKENS = 4096, 16384
"""Tokens in one forward."""


class Scorer:
    """``rows -> rows`` of log-probs of each token given the tokens before it; 0 for the first."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._logprobs: TokenLogprobs | None = None

    def __call__(self, rows: Sequence[list[int]]) -> list[list[float]]:
        found = [[0.0] * len(row) for row in rows]
        budget = _CPU_TOKENS if self._base.device.type == "cpu" else _GPU_TOKENS
        with self._trainer_attention() as logprobs:
            for batch in self._batches(rows, budget, logprobs):
                values = logprobs(batch).tolist()
                where = zip(batch.rows.tolist(), batch.columns.tolist(), values, strict=True)
                for row, column, value in where:
                    found[batch.indices[row]][column + 1] = value
        return found

    def likeliest(self, row: list[int], count: int) -> list[list[tuple[int, float]]]:
        """Return (id, log-prob) of the ``count`` likeliest tokens at each position given the
        tokens before it, best first; empty for the first position."""
        found: list[list[tuple[int, float]]] = [[] for _ in row]
        with self._trainer_attention() as logprobs:
            for batch in self._batches([row], len(row), logprobs):
                ids, values = logprobs.likeliest(batch, count)
                for column, some_ids, some in zip(
                    batch.columns.tolist(), ids.tolist(), values.tolist(), strict=True
                ):
                    found[column + 1] = list(zip(some_ids, some, strict=True))
        return found

    def _batches(
        self, rows: Sequence[list[int]], budget: int, logprobs: TokenLogprobs
    ) -> Iterator[MicroBatch]:
        training = [_training_row(row) for row in rows]
        for batch in pack(training, token_budget=budget, share=logprobs.why_padded is None):
            yield batch.to(self._base.device)

    @contextmanager
    def _trainer_attention(self) -> Iterator[TokenLogprobs]:
        """Run the trainer's forward, then restore the sampler's attention in every config: the
        towers of a multimodal model may not support what its language model does."""
        found: list[Any] = [getattr(m, "config", None) for m in self._base.model.modules()]
        configs = {id(c): c for c in found if isinstance(c, PreTrainedConfig)}.values()
        before = [(c, c._attn_implementation_internal) for c in configs]
        try:
            # Constructed at first use, because it tries out what the model allows.
            self._logprobs = self._logprobs or TokenLogprobs(self._base.model)
            yield self._logprobs
        finally:
            for config, attention in before:
                config._attn_implementation_internal = attention


def _training_row(row: list[int]) -> TrainingRow:
    blank = [0.0] * len(row)
    return TrainingRow(row, [False] + [True] * (len(row) - 1), blank, blank)
