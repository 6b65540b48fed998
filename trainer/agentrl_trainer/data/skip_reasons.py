"""Decide why a recorded call does not train: each rule that gives a ``SkipReason`` stands here.

The gateway and the store only mark what they alone can see as it happens: a call outside of any
rollout, a disconnected client, a call after its attempt was sealed, a gateway that died, a repeated
step. Such a mark stands (``Call.skip_reason``). The loop gives the reason of a step that was not
applied (``StepBatch.refuse``), ``adapter_split`` that of a call of another agent,
``Session.skip_calls`` that of rollouts that no step trains on. All other reasons follow from these
rules, which know calls, rollouts and rewards, but no tensors and no store.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from agentrl_tracer.schemas import GREEDY_BELOW, Call, CallState, Rollout, RolloutState, SkipReason


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
    one_temperature: bool = False
    """Whether the calls of a trajectory must have one sampling temperature, as with verl."""


def call_reason(call: Call, rules: SkipRules) -> SkipReason | None:
    """Judge one call of a winning attempt by itself; None if it can train.

    The first rule that applies gives the reason: wrong owner, then unfinished, then unusable, then
    usable but outside the limits.
    """
    if call.skip_reason is not None:
        return call.skip_reason
    if call.adapter is None or (rules.adapters is not None and call.adapter not in rules.adapters):
        return SkipReason.NOT_TRAINABLE_MODEL
    if any(fnmatchcase(call.agent or "", pattern) for pattern in rules.skip_agents):
        return SkipReason.OTHER_AGENT
    if call.state is not CallState.COMPLETED:
        return _UNFINISHED[call.state]
    if not call.response_ids:
        return SkipReason.EMPTY_RESPONSE
    if call.adapter_version is None or _malformed(call):
        return SkipReason.MALFORMED_RECORD
    if len(call.prompt_ids) + len(call.response_ids) > rules.max_length:
        return SkipReason.TOO_LONG
    if rules.oldest_version is not None and call.adapter_version < rules.oldest_version:
        return SkipReason.STALE
    if rules.truncated == "skip" and call.finish_reason == "length":
        return SkipReason.TRUNCATED
    if (rules.off_policy == "skip" and sampled_otherwise(call) is not None) or (
        rules.off_policy == "weight" and importance_weight(call) is None
    ):
        return SkipReason.OFF_POLICY
    return None


_UNFINISHED = {
    # Calls are judged after their attempt was sealed: one that is still open came too late.
    CallState.OPEN: SkipReason.LATE_CALL,
    CallState.CANCELLED: SkipReason.CLIENT_DISCONNECTED,
    CallState.ERROR: SkipReason.SAMPLER_ERROR,
}


def _malformed(call: Call) -> bool:
    # Without a prompt, the first token of a trajectory has no log-prob.
    if not call.prompt_ids or len(call.response_ids) != len(call.response_logprobs):
        return True
    if any(not 0 <= one < 2**31 for ids in (call.prompt_ids, call.response_ids) for one in ids):
        return True
    # Rounding may leave a log-prob just above 0. NaN fails the comparison, so it is caught too.
    return not all(-math.inf < logprob <= 1e-3 for logprob in call.response_logprobs)


def attempt_reasons(calls: Sequence[Call], rules: SkipRules) -> dict[str, SkipReason]:
    """Judge the calls of a winning attempt; calls that can train are missing from the result.

    A response with a choice that failed was never returned to its client, so its completed choices
    are skipped too (``sampler_error``). A client's retry may complete the missing choice in a call
    of its own.
    """
    choices = {(call.response_id, call.choice) for call in calls}
    done = {(c.response_id, c.choice) for c in calls if c.state is CallState.COMPLETED}
    failed = {response for response, _ in choices - done}
    reasons = {call.id: call_reason(call, rules) for call in calls}
    lost = {call.id: SkipReason.SAMPLER_ERROR for call in calls if call.response_id in failed}
    return lost | {call: reason for call, reason in reasons.items() if reason is not None}


def losing_reason(call: Call, rollout: Rollout) -> SkipReason:
    """Judge a call of an attempt that did not win."""
    won = rollout.state is RolloutState.SUCCEEDED
    return call.skip_reason or (SkipReason.FAILED_ATTEMPT if won else SkipReason.FAILED_ROLLOUT)


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
"""Why no member of a group trains: the first of these that a member has. A member without a reward
left its group, so why the others do not train comes first."""


# ---- how sampling differed from the policy that trains


def sampled_otherwise(call: Call) -> str | None:
    """Name how sampling deviated from the policy at its temperature; None if it did not.

    One of ``greedy`` (temperature 0, or below ``GREEDY_BELOW``), ``filtered`` (top-p, top-k),
    ``biased`` (logit_bias) and ``constrained`` (a grammar that forbade something). Log-probs are
    recorded of the policy at temperature 1 in each case, so importance ratios never contain this
    deviation.
    """
    params = call.params
    top_p, top_k = params.get("top_p"), params.get("top_k")
    if _temperature(call) < GREEDY_BELOW:
        return "greedy"
    if (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0):
        return "filtered"
    if params.get("logit_bias"):
        return "biased"
    mass = params.get("constrained_log_mass")
    if params.get("constrained") and (mass is None or mass < -1e-6):
        return "constrained"
    return None


def importance_weight(call: Call) -> float | None:
    """Compute policy / sampling distribution of the whole answer, at most 1; None if unknown.

    For a constrained answer at temperature 1 it is the probability mass that the grammar left, the
    product over the answer's tokens (arXiv:2405.21047).
    """
    kind, mass = sampled_otherwise(call), call.params.get("constrained_log_mass")
    if kind is None:
        return 1.0
    if kind != "constrained" or mass is None or temperature_of(call) != 1.0:
        return None
    return math.exp(min(mass, 0.0))


def temperature_of(call: Call) -> float:
    """Return the temperature that the answer was sampled at, and trains at; 1 for greedy ones."""
    temperature = _temperature(call)
    return 1.0 if temperature < GREEDY_BELOW else temperature


def _temperature(call: Call) -> float:
    temperature = call.params.get("temperature")
    return 1.0 if temperature is None else float(temperature)


def token_versions(call: Call) -> list[int]:
    """Return the adapter version of each sampled token; -1 where unknown.

    ``params["versions"]`` holds ``[first token, version]`` for each stretch of an answer during
    which the adapter was swapped. Without it ``adapter_version`` holds for all tokens.
    """
    version = -1 if call.adapter_version is None else call.adapter_version
    versions = [version] * len(call.response_ids)
    for start, own in call.params.get("versions") or ():
        versions[start:] = [-1 if own is None else own] * (len(versions) - start)
    return versions
