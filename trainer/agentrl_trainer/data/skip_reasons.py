"""Decide why a recorded call does not train: each rule that gives a ``SkipReason`` stands here.

The gateway and the store only mark what they alone can see as it happens: a call outside of any
rollout, a disconnected client, a call after its attempt was sealed, a gateway that died, a repeated
step. Such a mark stands (``Call.skip_reason``). All other reasons follow from these rules, which
know calls, rollouts and rewards, but no tensors and no store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from agentrl_tracer.schemas import Call, CallState, Rollout, RolloutState, SkipReason
from agentrl_trainer.data.off_policy import importance_weight, sampled_otherwise

OffPolicy = Literal["train", "weight", "skip"]


@dataclass(frozen=True, slots=True)
class SkipRules:
    """Which calls are left out although they could train."""

    skip_agents: tuple[str, ...] = ()
    """Patterns (``title``, ``summar*``) of the names of agents whose calls never train."""
    truncated: Literal["train", "skip"] = "train"
    """Whether to train on answers that were cut off at their token limit."""
    off_policy: OffPolicy = "train"
    """What to do with calls for which ``sampled_otherwise`` names a deviation: ``train`` on them as
    they are (biased), ``weight`` those whose importance weight is known and skip the others, or
    ``skip`` all."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What each call of a winning attempt is checked against."""

    max_length: int  # tokens, prompt and response together
    adapters: Collection[str] | None = None  # those in training; None: any
    oldest_version: int | None = None  # of an adapter; answers of older ones are stale
    rules: SkipRules = field(default_factory=SkipRules)


def call_reason(call: Call, limits: CallLimits) -> SkipReason | None:
    """Judge one call of a winning attempt by itself; None if it can train."""
    if call.skip_reason is not None:
        return call.skip_reason
    return next((reason for reason, applies in _CALL_RULES if applies(call, limits)), None)


def attempt_reasons(calls: Sequence[Call], limits: CallLimits) -> dict[str, SkipReason]:
    """Judge the calls of a winning attempt; calls that can train are missing from the result.

    A response with a choice that failed was never returned to its client, so its completed choices
    are skipped too (``sampler_error``).
    """
    failed = _failed_responses(calls)
    found = {call.id: call_reason(call, limits) for call in calls}
    for call in calls:
        if found[call.id] is None and call.response_id in failed:
            found[call.id] = SkipReason.SAMPLER_ERROR
    return {call: reason for call, reason in found.items() if reason is not None}


def losing_reason(call: Call, rollout: Rollout) -> SkipReason:
    """Judge a call of an attempt that did not win."""
    if rollout.state is RolloutState.SUCCEEDED:
        return call.skip_reason or SkipReason.FAILED_ATTEMPT
    return call.skip_reason or SkipReason.FAILED_ROLLOUT


def unassigned_reason(call: Call, reason: SkipReason, adapters: Collection[str]) -> SkipReason:
    """Refine the reason of a call that no adapter trains on: ``adapters`` may train on others'."""
    if call.adapter in adapters and reason is SkipReason.NOT_TRAINABLE_MODEL:
        return SkipReason.OTHER_AGENT
    return reason


# ---- groups


def group_reason(
    scored: int, min_group: int, *, compares: bool, teaches: bool
) -> SkipReason | None:
    """Judge a group of which ``scored`` members have a reward; None if it trains.

    ``compares``: the advantage's baseline is the rest of the group, so that one member alone
    carries no signal whatever ``min_group`` is. ``teaches``: some advantage is not 0.
    """
    if scored < (max(min_group, 2) if compares else 1):
        return SkipReason.SMALL_GROUP
    return None if teaches else SkipReason.ZERO_ADVANTAGE


def member_reason(
    advantage: float | None, group: SkipReason | None, *, compares: bool = True
) -> SkipReason | None:
    """Judge one member of a group; ``advantage`` None: it has no reward.

    Without a comparison (``reinforce``), a member whose reward is 0 teaches nothing by itself.
    """
    if advantage is None:
        return SkipReason.NO_REWARD
    if not compares and advantage == 0.0:
        return SkipReason.ZERO_ADVANTAGE
    return group


GROUP_REASONS = (SkipReason.SMALL_GROUP, SkipReason.ZERO_ADVANTAGE, SkipReason.NO_REWARD)


def count_group_reasons(groups: Iterable[Sequence[SkipReason | None]]) -> Counter[SkipReason]:
    """Count the groups of which no member trains, by one reason each.

    A member without a reward left its group; why the others do not train is the group's reason.
    """
    return Counter(
        next((reason for reason in GROUP_REASONS if reason in members), SkipReason.NO_REWARD)
        for members in groups
        if None not in members
    )


# ---- whole steps


def evaluation_reasons(calls: Iterable[Call]) -> dict[str, SkipReason]:
    """Judge the calls of evaluation rollouts, which never train."""
    return {call.id: SkipReason.EVALUATION for call in calls}


def left_over_reasons(calls: Iterable[Call]) -> dict[str, SkipReason]:
    """Judge the calls of rollouts that the run ended before a step took them."""
    return {call.id: SkipReason.LEFT_OVER for call in calls}


def refused_reasons(
    call_ids: Iterable[str], why: Literal["non_finite", "not_supported"]
) -> dict[str, SkipReason]:
    """Judge the calls of a step that was not applied.

    ``non_finite``: the loss or a gradient was not finite. ``not_supported``: the training service
    cannot express how the rows were sampled.
    """
    reason = SkipReason.NON_FINITE_STEP if why == "non_finite" else SkipReason.OFF_POLICY
    return dict.fromkeys(call_ids, reason)


# ---- rules for one call


def _wrong_adapter(call: Call, limits: CallLimits) -> bool:
    return call.adapter is None or (
        limits.adapters is not None and call.adapter not in limits.adapters
    )


def _malformed(call: Call, limits: CallLimits) -> bool:
    if len(call.response_ids) != len(call.response_logprobs) or call.adapter_version is None:
        return True
    if not call.prompt_ids:  # the first token of a trajectory has no log-prob
        return True
    if any(not 0 <= token < 2**31 for ids in (call.prompt_ids, call.response_ids) for token in ids):
        return True
    # Rounding may leave a log-prob just above 0. NaN fails the comparison, so it is caught too.
    return not all(-math.inf < logprob <= 1e-3 for logprob in call.response_logprobs)


def _stale(call: Call, limits: CallLimits) -> bool:
    oldest, version = limits.oldest_version, call.adapter_version
    return oldest is not None and version is not None and version < oldest


def _off_policy(call: Call, limits: CallLimits) -> bool:
    how = limits.rules.off_policy
    return (how == "skip" and sampled_otherwise(call) is not None) or (
        how == "weight" and importance_weight(call) is None
    )


_CALL_RULES: tuple[tuple[SkipReason, Callable[[Call, CallLimits], bool]], ...] = (
    # The first rule that applies gives the reason: wrong owner, then unfinished, then unusable,
    # then usable but outside the limits.
    (SkipReason.NOT_TRAINABLE_MODEL, _wrong_adapter),
    (
        SkipReason.OTHER_AGENT,
        lambda call, limits: any(
            fnmatchcase(call.agent or "", pattern) for pattern in limits.rules.skip_agents
        ),
    ),
    # Calls are judged after their attempt was sealed: one that is still open came too late.
    (SkipReason.LATE_CALL, lambda call, _: call.state is CallState.OPEN),
    (SkipReason.CLIENT_DISCONNECTED, lambda call, _: call.state is CallState.CANCELLED),
    (SkipReason.SAMPLER_ERROR, lambda call, _: call.state is CallState.ERROR),
    (SkipReason.EMPTY_RESPONSE, lambda call, _: not call.response_ids),
    (SkipReason.MALFORMED_RECORD, _malformed),
    (
        SkipReason.TOO_LONG,
        lambda call, limits: len(call.prompt_ids) + len(call.response_ids) > limits.max_length,
    ),
    (SkipReason.STALE, _stale),
    (
        SkipReason.TRUNCATED,
        lambda call, limits: limits.rules.truncated == "skip" and call.finish_reason == "length",
    ),
    (SkipReason.OFF_POLICY, _off_policy),
)


def _failed_responses(calls: Sequence[Call]) -> set[str]:
    """Find response ids with a choice that no call completed.

    A client's retry may complete the missing choice in a call of its own.
    """
    completed: dict[tuple[str, int], bool] = {}
    for call in calls:
        choice = (call.response_id, call.choice)
        completed[choice] = completed.get(choice, False) or call.state is CallState.COMPLETED
    return {response for (response, _), done in completed.items() if not done}
