"""Rows of models whose past is no rectangle of keys: each row with a cache of the model's own.

Knows: the caches that transformers' models make for themselves. Does not know: requests, sampling.

State spaces, linear attention, convolutions, keys of several shapes, position biases: what such a
model remembers of a row cannot be cut at some token, and a batch of rows of unlike lengths cannot
be masked. So rows are computed one by one, as ``generate`` would, and a row takes over another's
past whole or not at all: for siblings of one prompt, and for a conversation's next turn.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from agentrl_trainer.inference.kv_cache import Budget, Rows, Stored

_PAST = ("past_key_values", "cache_params", "state", "mems")
"""What models call their caches, in their outputs and among their arguments."""
FIXED = 256
"""Tokens which what does not grow with the row is reckoned at, in the budget."""
_FEW = 8
"""Tokens up to which steps are quicker than the whole row anew."""


class Past(Enum):
    """What a model's own cache is good for."""

    CHUNKS = "any number of tokens at once"
    STEPS = "one token at once"
    NONE = "nothing: the whole row is computed for each token"


@dataclass(slots=True)
class State(Stored):
    """What a model remembers of ``tokens``."""

    tokens: list[int] = field(default_factory=list[int])
    name: str = ""
    cache: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def cost(self) -> int:
        return len(self) + FIXED

    def usable(self, length: int) -> int:
        return len(self) if len(self) <= length else 0

    def copied(self) -> State:
        return State(list(self.tokens), self.name, copy.deepcopy(self.cache))


class StateRows(Rows):
    """``count`` states; ``rows`` and ``time`` are what they are reckoned at in the budget."""

    parts = False

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self._size = (0, 0)
        self.states: list[State] = []

    @property
    def rows(self) -> int:
        return self._size[0]

    @property
    def time(self) -> int:
        return self._size[1]

    def append(self) -> int:
        row = super().append()
        self.states[row] = State()
        return row

    def move(self, row: int, to: int, length: int) -> None:
        self.states[to], self.states[row] = self.states[row], State()

    def load(self, row: int, source: Stored, length: int) -> None:
        assert isinstance(source, State)
        assert len(source) == length
        self.states[row] = source.copied()

    def peek(self, row: int, length: int) -> State:
        return self.states[row]

    def export(self, row: int, length: int) -> State:
        return self.states[row].copied()

    def scrub(self, row: int) -> None:
        self.states[row] = State()

    def _resize(self, rows: int, time: int) -> None:
        self._budget.used += rows * time - self.rows * self.time
        self._size = (rows, time)
        self.states = [*self.states[: self.count], *(State() for _ in range(rows - self.count))]


def advance(model: Any, state: State, chunk: list[int], past: Past, options: dict[str, Any]) -> Any:
    """Logits ``[vocab]`` after ``chunk``, which comes behind the state's tokens."""
    whole = [*state.tokens, *chunk]
    parts = [chunk]
    if past is Past.NONE or (past is Past.STEPS and len(state) and len(chunk) > _FEW):
        state.cache, parts = None, [whole]
    elif past is Past.STEPS and len(state):
        parts = [[token] for token in chunk]
    output: Any = None
    for part in parts:
        ids = torch.tensor([part], device=model.device)
        known = {state.name: state.cache} if state.cache is not None else {}
        output = model(input_ids=ids, use_cache=past is not Past.NONE, **known, **options)
        if past is not Past.NONE:
            state.name = next((n for n in _PAST if getattr(output, n, None) is not None), "")
            if not state.name:
                raise ValueError("it gives no cache that it could go on from")
            state.cache = getattr(output, state.name)
    state.tokens = whole
    return output.logits[0, -1]
