"""Rows of models whose past is no rectangle of keys: each row with a cache of the model's own.

State spaces, linear attention, convolutions, keys of several shapes and position biases cannot be
cut at some token, and rows of unlike lengths cannot be masked in one batch. So rows are computed
one by one, as ``generate`` would, and a row copies another's past whole or not at all: for
siblings of one prompt, and for a conversation's next turn.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from agentrl_trainer.inference.kv_cache import Part, Rows
from agentrl_trainer.inference.prefix_cache import KVPool, Stored
from agentrl_trainer.models.loading import BaseModel

_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""What models call their caches, in their outputs and among their arguments."""
_FIXED_COST = 256
"""Tokens that the part of a state which does not grow with the row is charged in the pool."""
_FEW = 8
"""Up to this many tokens, single steps are quicker than recomputing the row."""


class Past(Enum):
    """What a model's own cache can take."""

    CHUNKS = "any number of tokens at once"
    STEPS = "one token at once"
    NONE = "nothing: the whole row is recomputed for each token"


@dataclass(slots=True)
class RowState(Stored):
    """What a model remembers of ``tokens``."""

    overhead = _FIXED_COST
    tokens: list[int] = field(default_factory=list[int])
    name: str = ""
    cache: Any = None

    def copied(self) -> RowState:
        return RowState(list(self.tokens), self.name, copy.deepcopy(self.cache))


class StateRows(Rows):
    """A state per row; ``rows`` and ``time`` are what the pool is charged."""

    parts = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.states: list[RowState] = []

    def append(self, owner: Any) -> int:
        row = super().append(owner)
        self.states[row:] = [RowState()]
        return row

    def move(self, row: int, to: int) -> None:
        self.owners[to], self.states[to] = self.owners[row], self.states[row]

    def load(self, row: int, source: Stored, length: int) -> None:
        assert isinstance(source, RowState)
        assert len(source.tokens) == length
        self.states[row] = source.copied()

    def peek(self, row: int, length: int) -> RowState:
        return self.states[row]

    def scrub(self, row: int) -> None:
        self.states[row] = RowState()

    def _reallocate(self, rows: int, time: int) -> None:
        del self.states[len(self.owners) :]


class RowByRowForward:
    """The model on its own cache, one row at a time, as far as ``past`` says it can be used.

    Applies to every causal model, with one of the three values of ``past``.

    Raises:
        ValueError: rounding in half precision would hide that a recurrent model loses its state.
    """

    def __init__(self, base: BaseModel, options: dict[str, Any], past: Past) -> None:
        if past is Past.CHUNKS and base.dtype != torch.float32:
            layers = DynamicCache(config=base.model.config).layers
            if any(not isinstance(layer, DynamicLayer) for layer in layers):
                raise ValueError("rounding could hide that it forgets its state")
        self._base = base
        self._options = options
        self.past = past

    ragged = False
    takes_stems = False

    def new_rows(self, pool: KVPool, *_stem: object) -> Rows:
        return StateRows(pool)

    def __call__(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        return [self._logits(part) for part in parts]

    def _logits(self, part: Part) -> torch.Tensor:
        states, chunks = cast(StateRows, part.rows).states, part.chunks
        assert [len(state.tokens) for state in states[: len(chunks)]] == part.starts
        pairs = zip(states, chunks, strict=False)
        logits = torch.stack([self._advance(state, chunk) for state, chunk in pairs])
        return logits if part.wanted is None else logits[part.wanted]

    def _advance(self, state: RowState, chunk: list[int]) -> torch.Tensor:
        """Append ``chunk`` to the state's tokens; returns logits ``[vocab]`` after it."""
        caches = self.past is not Past.NONE
        steps = self.past is Past.STEPS and bool(state.tokens)
        whole = [*state.tokens, *chunk]
        parts = [[token] for token in chunk] if steps else [chunk]
        if not caches or (steps and len(chunk) > _FEW):
            state.cache, parts = None, [whole]
        output: Any = None
        for part in parts:
            ids = torch.tensor([part], device=self._base.device)
            known = {state.name: state.cache} if state.cache is not None else {}
            output = self._base.model(input_ids=ids, use_cache=caches, **known, **self._options)
            if caches:
                state.name = next((n for n in _CACHES if getattr(output, n, None) is not None), "")
                if not state.name:
                    raise ValueError("it returns no cache to continue from")
                state.cache = getattr(output, state.name)
        state.tokens = whole
        return output.logits[0, -1]

    @cached_property
    def bytes_per_token(self) -> int:
        """The fixed part of a state is spread over ``_FIXED_COST`` tokens."""
        state = RowState()
        sizes: list[int] = []
        with torch.inference_mode():
            for _ in range(2):
                self._advance(state, [0] * 16)
                sizes.append(tensor_bytes(state.cache))
        each = max(0, sizes[1] - sizes[0]) // 16
        fixed = max(0, sizes[1] - 32 * each)
        return max(self._base.dtype.itemsize, each + -(-fixed // _FIXED_COST))


def tensor_bytes(cache: Any) -> int:
    """Return the bytes of all tensors in a cache, whatever its class."""
    copies: dict[int, Any] = {}
    copy.deepcopy(cache, copies)
    return sum(x.nbytes for x in copies.values() if isinstance(x, torch.Tensor))
