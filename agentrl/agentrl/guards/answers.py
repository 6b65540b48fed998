"""Describe a step's answers: how long they are, how they vary, and whether length pays.

Alerts watch these metrics (``alerts``); docs/metrics.md lists them.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import StatisticsError, correlation, fmean

from agentrl_tracer.schemas import Call, CallState, Rollout

_MIN_TASKS = 4
"""Of fewer tasks, equal answers tell nothing."""


def answer_metrics(
    calls: Sequence[Call], rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]
) -> dict[str, float]:
    """Return the metrics of a step's answers by one adapter.

    Args:
        calls: those that the adapter answered.
        rewards: by rollout.
    """
    answers = [
        call
        for call in calls
        if call.state is CallState.COMPLETED and call.response_ids and call.rollout_id
    ]
    if not answers:
        return {}
    lengths = [len(call.response_ids) for call in answers]
    metrics = {
        "answers/tokens": fmean(lengths),
        "answers/cut_off": fmean(call.finish_reason == "length" for call in answers),
        "answers/entropy": -sum(sum(call.response_logprobs) for call in answers) / sum(lengths),
    }
    of_rollout = defaultdict[str, list[list[int]]](list)
    for call in answers:
        of_rollout[call.rollout_id or ""].append(call.response_ids)
    if len({one.task_id for one in rollouts if one.id in of_rollout}) >= _MIN_TASKS:
        said = Counter(str(texts) for texts in of_rollout.values())
        metrics["answers/repeated"] = said.most_common(1)[0][1] / len(of_rollout)
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for rollout in rollouts:
        reward, texts = rewards.get(rollout.id), of_rollout.get(rollout.id)
        if reward is not None and texts:
            groups[rollout.group_id].append((fmean(map(len, texts)), reward))
    pairs = [pair for group in groups.values() for pair in _centered(group)]
    if len(pairs) > 1:
        with contextlib.suppress(StatisticsError):  # all lengths, or all rewards, are equal
            lengths_of, rewards_of = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            metrics["answers/length_pays"] = correlation(lengths_of, rewards_of)
    return metrics


def _centered(group: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Subtract a group's means: tasks differ in length and reward for reasons of their own."""
    length, reward = fmean(pair[0] for pair in group), fmean(pair[1] for pair in group)
    return [(a - length, b - reward) for a, b in group]
