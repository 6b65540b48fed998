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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from agentrl_tracer.schemas import Call, CallState, Rollout, RolloutState, SkipReason
from agentrl_trainer.data.off_policy import importance_weight, sampled_otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipRules:
    """What each call of a winning attempt is checked against."""

    max_length: int  # tokens of a trajectory, and of a call's prompt and response together
    adapters: Collection[str] | None = None  # those in training; None: any
    oldest_version: int | None = None  # of an adapter; answers of older ones are stale
    skip_agents: tuple[str, ...] = ()
    """Patterns (``title``, ``summar*``) of the names of agents whose calls never train."""
    truncated: Literal["train", "skip"] = "train"
    """Whether to train on answers that were cut off at their token limit."""
    off_policy: Literal["train", "weight", "skip"] = "train"
    """What to do with calls for which ``sampled_otherwise`` names a deviation: ``train`` on them as
    they are (biased), ``weight`` those whose importance weight is known and skip the others, or
    ``skip`` all."""


def call_reason(call: Call, rules: SkipRules) -> SkipReason | None:
    """Judge one call of a winning attempt by itself; None if it can train."""
    if call.skip_reason is not None:
        return call.skip_reason
    return next((reason for reason, applies in _CALL_RULES if applies(call, rules)), None)


def attempt_reasons(calls: Sequence[Call], rules: SkipRules) -> dict[str, SkipReason]:
    """Judge the calls of a winning attempt; calls that can train are missing from the result.

    A response with a choice that failed was never returned to its client, so its completed choices
    are skipped too (``sampler_error``). A client's retry may complete the missing choice in a call
    of its own.
    """
    completed: dict[tuple[str, int], bool] = {}
    for call in calls:
        choice = (call.response_id, call.choice)
        completed[choice] = completed.get(choice, False) or call.state is CallState.COMPLETED
    failed = {response for (response, _), done in completed.items() if not done}
    found: dict[str, SkipReason] = {}
    for call in calls:
        reason = call_reason(call, rules)
        if reason is None and call.response_id in failed:
            reason = SkipReason.SAMPLER_ERROR
        if reason is not None:
            found[call.id] = reason
    return found


def losing_reason(call: Call, rollout: Rollout) -> SkipReason:
    """Judge a call of an attempt that did not win."""
    won = rollout.state is RolloutState.SUCCEEDED
    return call.skip_reason or (SkipReason.FAILED_ATTEMPT if won else SkipReason.FAILED_ROLLOUT)


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


REFUSED_STEP = {
    "non_finite": SkipReason.NON_FINITE_STEP,  # the loss or a gradient was not finite
    "not_supported": SkipReason.OFF_POLICY,  # the service cannot express how rows were sampled
}
"""Why the calls of a step that was not applied do not train."""


# ---- rules for one call


def _malformed(call: Call) -> bool:
    if len(call.response_ids) != len(call.response_logprobs) or call.adapter_version is None:
        return True
    if not call.prompt_ids:  # the first token of a trajectory has no log-prob
        return True
    if any(not 0 <= token < 2**31 for ids in (call.prompt_ids, call.response_ids) for token in ids):
        return True
    # Rounding may leave a log-prob just above 0. NaN fails the comparison, so it is caught too.
    return not all(-math.inf < logprob <= 1e-3 for logprob in call.response_logprobs)


def _off_policy(call: Call, rules: SkipRules) -> bool:
    return (rules.off_policy == "skip" and sampled_otherwise(call) is not None) or (
        rules.off_policy == "weight" and importance_weight(call) is None
    )


_CALL_RULES: tuple[tuple[SkipReason, Callable[[Call, SkipRules], bool]], ...] = (
    # The first rule that applies gives the reason: wrong owner, then unfinished, then unusable,
    # then usable but outside the limits.
    (
        SkipReason.NOT_TRAINABLE_MODEL,
        lambda call, rules: (
            call.adapter is None
            or (rules.adapters is not None and call.adapter not in rules.adapters)
        ),
    ),
    (
        SkipReason.OTHER_AGENT,
        lambda call, rules: any(fnmatchcase(call.agent or "", one) for one in rules.skip_agents),
    ),
    # Calls are judged after their attempt was sealed: one that is still open came too late.
    (SkipReason.LATE_CALL, lambda call, _: call.state is CallState.OPEN),
    (SkipReason.CLIENT_DISCONNECTED, lambda call, _: call.state is CallState.CANCELLED),
    (SkipReason.SAMPLER_ERROR, lambda call, _: call.state is CallState.ERROR),
    (SkipReason.EMPTY_RESPONSE, lambda call, _: not call.response_ids),
    (SkipReason.MALFORMED_RECORD, lambda call, _: _malformed(call)),
    (
        SkipReason.TOO_LONG,
        lambda call, rules: len(call.prompt_ids) + len(call.response_ids) > rules.max_length,
    ),
    (
        SkipReason.STALE,
        lambda call, rules: (
            rules.oldest_version is not None
            and call.adapter_version is not None
            and call.adapter_version < rules.oldest_version
        ),
    ),
    (
        SkipReason.TRUNCATED,
        lambda call, rules: rules.truncated == "skip" and call.finish_reason == "length",
    ),
    (SkipReason.OFF_POLICY, _off_policy),
)
