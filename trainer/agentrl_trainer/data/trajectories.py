"""Cut the calls of one attempt into trajectories: the token paths that train.

Pure functions over recorded calls: no torch, no store, no models. A call *extends* another when its
prompt begins with that call's prompt and response, token by token. This makes a forest for each
adapter, which is cut into chains from a root (or a fork) down to a leaf. Each chain is a
trajectory, and each sampled token trains in exactly one of them:

    A ── B ── C        trajectory 1: tokens of C, training A, B and C
     └── D             trajectory 2: tokens of D, training D (A is context here)
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl_tracer.schemas import Call, SkipReason
from agentrl_trainer.data.skip_reasons import SkipRules, attempt_reasons, temperature_of


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A root→leaf path of one attempt's call graph, training one adapter.

    Each call's prompt begins with the tokens of the call before it, so the last call holds all
    tokens. The responses of ``calls`` train here; all other tokens are context.
    """

    adapter: str
    calls: list[Call]

    @property
    def call_ids(self) -> list[str]:
        return [call.id for call in self.calls]

    @property
    def tokens(self) -> list[int]:
        return self.calls[-1].prompt_ids + self.calls[-1].response_ids

    def spread(self, values: Mapping[str, float], elsewhere: float = 0.0) -> list[float]:
        """Return a column parallel to ``tokens``: each call's value, by id, at its response."""
        column = [elsewhere] * len(self.tokens)
        for call in self.calls:
            start, count = len(call.prompt_ids), len(call.response_ids)
            column[start : start + count] = [values.get(call.id, elsewhere)] * count
        return column


class TrajectorySet(NamedTuple):
    """Each call of the attempt is in the ``calls`` of one trajectory or in ``skipped``."""

    trajectories: list[Trajectory]
    skipped: dict[str, SkipReason]


def build_trajectories(calls: Sequence[Call], rules: SkipRules) -> TrajectorySet:
    """Cut the call graph of one attempt into trajectories. The order of ``calls`` has no effect."""
    skipped = attempt_reasons(calls, rules)
    kept: defaultdict[tuple[str, float], list[Call]] = defaultdict(list)
    for call in sorted(calls, key=call_order):
        if call.id not in skipped and call.adapter is not None:
            kept[call.adapter, temperature_of(call) if rules.one_temperature else 1.0].append(call)
    # Tokens of other adapters and of skipped calls are context: they stand in later prompts.
    trajectories = [
        Trajectory(adapter, chain)
        for (adapter, _), own in sorted(kept.items())
        for chain in _chains(own, _parents(own))
    ]
    return TrajectorySet(trajectories, skipped)


def call_order(call: Call) -> tuple[int, int, str]:
    """Sort key: the order in which an attempt made its calls."""
    return call.seq, call.choice, call.id


def _parents(calls: Sequence[Call]) -> list[int | None]:
    """Find for each call the index of the longest call it extends; of equals, the first."""
    # Packed ids: bytes.startswith is a memcmp that stops at the first difference and copies
    # nothing, so trying all pairs stays cheap for hundreds of calls with long prompts.
    prompts = [array("i", call.prompt_ids).tobytes() for call in calls]
    answers = [array("i", call.response_ids).tobytes() for call in calls]
    wholes = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    longest_first = sorted(range(len(calls)), key=lambda i: (-len(wholes[i]), i))
    # No cycles: responses are not empty, so a parent is always shorter than its child.
    return [
        next((i for i in longest_first if prompt.startswith(wholes[i])), None) for prompt in prompts
    ]


def _chains(calls: Sequence[Call], parents: Sequence[int | None]) -> list[list[Call]]:
    """Cut the forest into root→leaf chains: at a fork, the first child continues the chain."""
    continued_by: dict[int, int] = {}
    for child, parent in enumerate(parents):
        if parent is not None:
            continued_by.setdefault(parent, child)
    chains: list[list[Call]] = []
    for start in sorted(set(range(len(calls))) - set(continued_by.values())):
        path = [start]
        while path[-1] in continued_by:
            path.append(continued_by[path[-1]])
        chains.append([calls[at] for at in path])
    return chains
