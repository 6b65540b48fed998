"""The rollouts that all sides sample and train on. Plain Python: runs in every environment."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = 49_152
"""Of SmolLM2. Random tokens: how long it takes does not depend on what they say."""
RANK = 16


@dataclass(frozen=True)
class Shape:
    """Rollouts that begin with the same tokens; each call adds a result and an answer."""

    rollouts: int
    calls: int
    shared: int
    result: int  # tokens of a tool's result before each answer, the task before the first
    answer: int

    @property
    def unique(self) -> int:
        return self.shared + self.rollouts * self.calls * (self.result + self.answer)

    @property
    def unshared(self) -> int:
        """Tokens of a row for each call, with all before it."""
        turn = self.result + self.answer
        rows = [self.shared + turn * call for call in range(1, self.calls + 1)]
        return self.rollouts * sum(rows)


SHAPES = {
    "full": Shape(rollouts=8, calls=12, shared=4000, result=100, answer=100),
    "smoke": Shape(rollouts=2, calls=3, shared=128, result=16, answer=16),
}


def shared_tokens(shape: Shape) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(VOCABULARY) for _ in range(shape.shared)]


def results(shape: Shape, rollout: int) -> list[list[int]]:
    """The tool results of a rollout."""
    draw = random.Random(rollout + 1)
    return [[draw.randrange(VOCABULARY) for _ in range(shape.result)] for _ in range(shape.calls)]


@dataclass(frozen=True)
class Row:
    """A whole rollout: the shared tokens, then results and answers in turn."""

    prompt: list[int]
    completion: list[int]
    trained: list[bool]
    advantage: float


def rows(shape: Shape) -> list[Row]:
    draw = random.Random(1000)
    found: list[Row] = []
    for rollout in range(shape.rollouts):
        completion: list[int] = []
        trained: list[bool] = []
        for result in results(shape, rollout):
            completion += result + [draw.randrange(VOCABULARY) for _ in range(shape.answer)]
            trained += [False] * shape.result + [True] * shape.answer
        found.append(Row(shared_tokens(shape), completion, trained, draw.gauss(0, 1)))
    return found


def by_call(shape: Shape) -> list[Row]:
    """The same as calls: each answer a row of its own, with all before it as prompt."""
    calls: list[Row] = []
    for row in rows(shape):
        for call in range(shape.calls):
            end = (call + 1) * (shape.result + shape.answer)
            start = end - shape.answer
            answer = row.completion[start:end]
            prompt = row.prompt + row.completion[:start]
            calls.append(Row(prompt, answer, [True] * len(answer), row.advantage))
    return calls
