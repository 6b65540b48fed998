"""The rows both sides learn from. Plain Python: runs in agentrl's environment and in TRL's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

RANK = 16
VOCABULARY = 49_152
"""Of SmolLM2. Tokens are drawn below this in every case: how long it takes does not depend on what
they say."""


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    completion: list[int]
    trained: list[bool]  # of the completion: false where the environment speaks
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def groups(count: int, size: int, prompt: int, answer: int) -> list[Row]:
    """``count`` prompts with ``size`` answers each."""
    draw = random.Random(0)
    rows: list[Row] = []
    for _ in range(count):
        shared = _ids(draw, prompt)
        for _ in range(size):
            rows.append(Row(shared, _ids(draw, answer), [True] * answer, draw.gauss(0, 1)))
    return rows


def agent(size: int, system: int, turns: int, observed: int, acted: int) -> list[Row]:
    """One group of rollouts. All share the system prompt; then the environment and the model take
    turns, and every turn extends the tokens of the one before: one row for each rollout."""
    draw = random.Random(0)
    shared = _ids(draw, system)
    rows: list[Row] = []
    for _ in range(size):
        completion: list[int] = []
        trained: list[bool] = []
        for _ in range(turns):
            completion += _ids(draw, observed + acted)
            trained += [False] * observed + [True] * acted
        rows.append(Row(shared, completion, trained, draw.gauss(0, 1)))
    return rows


def by_call(rows: list[Row]) -> list[Row]:
    """The same rollouts as calls: each model turn a row of its own, with all before it as prompt.

    This is how a trainer sees an agent if it does not merge calls into trajectories.
    """
    calls: list[Row] = []
    for row in rows:
        start = 0
        for trained, run in groupby(row.trained):
            end = start + len(list(run))
            if trained:
                prompt = row.prompt + row.completion[:start]
                answer = row.completion[start:end]
                calls.append(Row(prompt, answer, [True] * len(answer), row.advantage))
            start = end
    return calls


@dataclass(frozen=True)
class Case:
    rows: Callable[[], list[Row]]
    goal: float | None = None
    """Times TRL's trained tokens a second."""
    as_calls: bool = False
    """TRL gets the rows' calls, agentrl the rows: its trajectories merge them."""
    vocabulary: int = VOCABULARY


CASES = {
    "8x8, 64+64": Case(lambda: groups(8, 8, 64, 64), goal=1.8),
    "8x8, 512+128": Case(lambda: groups(8, 8, 512, 128), goal=3.2),
    "agent": Case(lambda: agent(8, 600, 6, 64, 64), goal=6.0, as_calls=True),
    "2x8, 64+64, vocabulary of 151,936": Case(lambda: groups(2, 8, 64, 64), vocabulary=151_936),
    "smoke": Case(lambda: agent(4, 60, 2, 16, 16), as_calls=True),
}


def trl_rows(case: Case) -> list[Row]:
    return by_call(case.rows()) if case.as_calls else case.rows()


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]
