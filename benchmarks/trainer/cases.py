"""The rows both sides learn from. Plain Python: runs in agentrl's venv and in TRL's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import groupby

MODEL = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
"""A Qwen3 with random weights: how long it takes does not depend on what they say."""
RANK = 16


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    completion: list[int]
    trained: list[bool]  # of the completion: false where the environment speaks
    advantage: float


def groups(count: int, size: int, prompt: int, answer: int, vocabulary: int) -> list[Row]:
    """``count`` prompts with ``size`` answers each."""
    draw = random.Random(0)
    rows: list[Row] = []
    for _ in range(count):
        shared = _ids(draw, prompt, vocabulary)
        for _ in range(size):
            answered = _ids(draw, answer, vocabulary)
            rows.append(Row(shared, answered, [True] * answer, draw.gauss(0, 1)))
    return rows


def agent(
    size: int, system: int, turns: int, observed: int, acted: int, vocabulary: int
) -> list[Row]:
    """One group of rollouts. All share the system prompt; then the environment and the model take
    turns, and every turn extends the tokens of the one before: one row for each rollout."""
    draw = random.Random(0)
    shared = _ids(draw, system, vocabulary)
    rows: list[Row] = []
    for _ in range(size):
        completion: list[int] = []
        trained: list[bool] = []
        for _ in range(turns):
            completion += _ids(draw, observed + acted, vocabulary)
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


CASES = {
    "4x8, 64+64": lambda: groups(4, 8, 64, 64, 2048),
    "8x8, 512+32": lambda: groups(8, 8, 512, 32, 2048),
    "agent, a row per rollout": lambda: agent(8, 600, 12, 20, 12, 2048),
    "agent, a row per call": lambda: by_call(agent(8, 600, 12, 20, 12, 2048)),
    "vocabulary of 151,936": lambda: groups(2, 8, 64, 64, 151_936),
}


def vocabulary(case: str) -> int:
    return 151_936 if case.startswith("vocabulary") else 2048


def _ids(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]
