"""From the calls of one attempt to the token paths that train: the call graph.

Pure functions over recorded calls: no torch, no store, no models. A call *extends* another when its
prompt begins with that call's prompt and response, token by token. This makes a forest, one per
adapter, which is cut into chains from a root (or a fork) down to a leaf. Each chain is a
trajectory, and each sampled token trains in exactly one of them:

    A ── B ── C        trajectory 1: tokens of C, training A, B and C
     └── D             trajectory 2: tokens of D, training D (A is context here)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from agentrl_tracer.schemas import Call, CallState, SkipReason


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the response of one call lies in its trajectory: ``tokens[start:end]``."""

    call_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A root→leaf token path of one attempt's call graph, training one adapter.

    Invariants: the lists of tokens have one length, at most ``max_length``; position 0 is never
    masked; ``mask`` is true exactly on the union of ``turns``, which do not overlap and are in
    order.
    """

    adapter: str
    tokens: list[int]
    mask: list[bool]  # sampled tokens which train here
    logprobs: list[float]  # of the sampling policy; 0 where not masked
    versions: list[int]  # of the adapter that sampled the token; -1 where not masked
    turns: list[Turn]
    temperatures: list[float]
    """That the token was sampled at; 1 where not masked, or greedy: see ``temperature_of``."""

    @property
    def call_ids(self) -> list[str]:
        """The calls whose tokens train here."""
        return [turn.call_id for turn in self.turns]


@dataclass(frozen=True, slots=True)
class TrajectorySet:
    """Every call of the attempt is in the ``turns`` of one trajectory or in ``skipped``."""

    trajectories: list[Trajectory]
    skipped: dict[str, SkipReason]


OffPolicy = Literal["train", "weight", "skip"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What becomes of calls that could train, and perhaps should not.

    ``off_policy`` is about calls that were not sampled from the policy as the trainer computes it
    (``sampled_otherwise``). ``train``: they train as if they had been, which is biased; ``skip``:
    they do not; ``weight``: those whose importance weight is known (constrained ones) train with it
    (``importance``), the others do not.
    """

    skip_agents: tuple[str, ...] = ()  # patterns (title, summar*) of the calling agent's name
    truncated: Literal["train", "skip"] = "train"  # answers cut off at their token limit
    off_policy: OffPolicy = "train"


def sampled_otherwise(call: Call) -> str | None:
    """How the call's sampling differed from the policy at temperature 1; None if it did not.

    One of ``greedy`` (temperature 0), ``filtered`` (top-p, top-k), ``biased`` (logit_bias),
    ``constrained`` (a grammar). Log-probs are recorded of the policy at temperature 1 in any case,
    so ratios measure how far the policy moved, never this difference. Any other temperature is none
    of these: then the policy at that temperature is what trains (``temperature_of``).
    """
    params = call.params
    top_p, top_k = params.get("top_p"), params.get("top_k")
    if params.get("temperature") == 0:
        return "greedy"
    if (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0):
        return "filtered"
    if params.get("logit_bias"):
        return "biased"
    # Where the grammar forbade nothing that the policy wanted, nothing differed.
    mass = params.get("constrained_log_mass")
    if params.get("constrained") and (mass is None or mass < -1e-6):
        return "constrained"
    return None


def importance(call: Call) -> float | None:
    """policy / sampling distribution of the whole answer, at most 1; None where it is not known.

    Of a constrained answer it is the mass that the grammar left, the product over its tokens (see
    arXiv:2405.21047 on what masking does to the distribution): at temperature 1,
    the only one at which it is known.
    """
    kind, mass = sampled_otherwise(call), call.params.get("constrained_log_mass")
    if kind is None:
        return 1.0
    if temperature_of(call) != 1.0:
        return None
    return math.exp(min(mass, 0.0)) if kind == "constrained" and mass is not None else None


def temperature_of(call: Call) -> float:
    """At which the policy trains on this answer: the one it was sampled at; 1 where greedy."""
    return float(call.params.get("temperature") or 1.0)


def token_versions(call: Call) -> list[int]:
    """Of the adapter, for each sampled token; -1 where it is not known.

    ``params["versions"]`` has ``[first token, version]`` of each stretch of an answer in whose
    middle the adapter was swapped; without it ``adapter_version`` holds for the whole.
    """
    version = -1 if call.adapter_version is None else call.adapter_version
    versions = [version] * len(call.response_ids)
    for start, own in call.params.get("versions") or ():
        versions[start:] = [-1 if own is None else own] * (len(versions) - start)
    return versions


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call is screened against. ``adapters`` None: whichever adapter answered trains."""

    max_length: int  # tokens, prompt and response together
    adapters: Collection[str] | None = None
    oldest_version: Mapping[str, int] | None = None  # by adapter
    rules: Rules = field(default_factory=Rules)


def _malformed(call: Call) -> bool:
    if len(call.response_ids) != len(call.response_logprobs) or call.adapter_version is None:
        return True
    if not call.prompt_ids:  # the first token of a path has no log-probability
        return True
    if any(not 0 <= token < 2**31 for ids in (call.prompt_ids, call.response_ids) for token in ids):
        return True
    # A log-prob a hair above 0 is rounding. NaN fails the comparison, so it is caught as well.
    return not all(-math.inf < logprob <= 1e-3 for logprob in call.response_logprobs)


def _foreign(call: Call, limits: Limits) -> bool:
    return call.adapter is None or (
        limits.adapters is not None and call.adapter not in limits.adapters
    )


def _stale(call: Call, limits: Limits) -> bool:
    oldest = (limits.oldest_version or {}).get(call.adapter or "")
    return oldest is not None and call.adapter_version is not None and call.adapter_version < oldest


def _other_agent(call: Call, limits: Limits) -> bool:
    return any(fnmatchcase(call.agent or "", one) for one in limits.rules.skip_agents)


def _truncated(call: Call, limits: Limits) -> bool:
    return limits.rules.truncated == "skip" and call.finish_reason == "length"


def _off_policy(call: Call, limits: Limits) -> bool:
    how = limits.rules.off_policy
    return (how == "skip" and sampled_otherwise(call) is not None) or (
        how == "weight" and importance(call) is None
    )


# The first row that applies is the call's one reason. Read it from "not ours to train" through
# "never finished" and "unusable" to "usable, but out of bounds".
_SCREEN: tuple[tuple[SkipReason, Callable[[Call, Limits], bool]], ...] = (
    (SkipReason.NOT_TRAINABLE_MODEL, _foreign),
    (SkipReason.OTHER_AGENT, _other_agent),
    # Calls are judged once their attempt is sealed, so one still open was not done by then.
    (SkipReason.LATE_CALL, lambda call, _: call.state is CallState.OPEN),
    (SkipReason.CLIENT_DISCONNECTED, lambda call, _: call.state is CallState.CANCELLED),
    (SkipReason.SAMPLER_ERROR, lambda call, _: call.state is CallState.ERROR),
    (SkipReason.EMPTY_RESPONSE, lambda call, _: not call.response_ids),
    (SkipReason.MALFORMED_RECORD, lambda call, _: _malformed(call)),
    (
        SkipReason.TOO_LONG,
        lambda call, limits: len(call.prompt_ids) + len(call.response_ids) > limits.max_length,
    ),
    (SkipReason.STALE, _stale),
    (SkipReason.TRUNCATED, _truncated),
    (SkipReason.OFF_POLICY, _off_policy),
)


def judge(
    call: Call,
    *,
    max_length: int,
    adapters: Collection[str] | None = None,
    oldest_version: Mapping[str, int] | None = None,
    rules: Rules | None = None,
) -> SkipReason | None:
    """Why this call of a winning attempt cannot train, by itself; None if it can.

    What the gateway already knew (a client's retry, a late call, one it lost) stands on the record.
    What its fellow choices say of it, ``build_trajectories`` knows.
    """
    if call.skip_reason is not None:
        return call.skip_reason
    limits = Limits(max_length, adapters, oldest_version, rules or Rules())
    return next((reason for reason, applies in _SCREEN if applies(call, limits)), None)


def build_trajectories(
    calls: Sequence[Call],
    *,
    max_length: int,
    adapters: Collection[str] | None = None,
    oldest_version: Mapping[str, int] | None = None,
    rules: Rules | None = None,
) -> TrajectorySet:
    """Cut the call graph of one attempt into trajectories. The order of ``calls`` has no effect.

    An answer of several choices of which one was never made was not given: its client was told of a
    failure, and acted on none of them. The whole ones are skipped as well (sampler_error).
    """
    if len({call.attempt_id for call in calls}) > 1:
        raise ValueError("calls of several attempts: a trajectory belongs to one attempt")
    if len({call.id for call in calls}) < len(calls):
        raise ValueError("two calls share an id")

    ordered = sorted(calls, key=lambda call: (call.seq, call.choice, call.id))
    not_given = _not_given(calls)
    skipped: dict[str, SkipReason] = {}
    kept: dict[str, list[Call]] = {}
    for call in ordered:
        reason = judge(
            call,
            max_length=max_length,
            adapters=adapters,
            oldest_version=oldest_version,
            rules=rules,
        )
        if reason is None and call.response_id in not_given:
            reason = SkipReason.SAMPLER_ERROR
        if reason is not None:
            skipped[call.id] = reason
        elif call.adapter is not None:  # always so: judge refuses the base model
            kept.setdefault(call.adapter, []).append(call)

    # One forest per adapter. What other adapters (or skipped calls) said is in the prompts of the
    # calls that follow, so it is context there without further ado.
    trajectories = [
        _trajectory(adapter, chain)
        for adapter in sorted(kept)
        for chain in _chains(kept[adapter], _parents(kept[adapter]))
    ]
    return TrajectorySet(trajectories, skipped)


def _not_given(calls: Sequence[Call]) -> set[str]:
    """The ids of responses with a choice that no call completed. A retry of the same response
    completes what is missing, in calls of its own."""
    made: dict[tuple[str, int], bool] = {}
    for call in calls:
        choice = (call.response_id, call.choice)
        made[choice] = made.get(choice, False) or call.state is CallState.COMPLETED
    return {response for (response, _), completed in made.items() if not completed}


def _parents(calls: Sequence[Call]) -> list[int | None]:
    """For each call, the index of the longest one it extends; of equals, the first."""
    # Packed ids: bytes.startswith is a memcmp that stops at the first difference and copies
    # nothing, so trying all pairs stays cheap for hundreds of calls with long prompts.
    prompts = [array("i", call.prompt_ids).tobytes() for call in calls]
    wholes = [
        prompt + array("i", call.response_ids).tobytes()
        for prompt, call in zip(prompts, calls, strict=True)
    ]
    longest_first = sorted(range(len(calls)), key=lambda i: (-len(wholes[i]), i))
    # No call can extend itself or form a cycle: responses are not empty, so a parent is shorter.
    return [
        next((i for i in longest_first if prompt.startswith(wholes[i])), None) for prompt in prompts
    ]


def _chains(calls: Sequence[Call], parents: Sequence[int | None]) -> list[list[Call]]:
    """Cut the forest into root→leaf chains: at a fork, the first child continues the chain."""
    continued_by: dict[int, int] = {}
    for child, parent in enumerate(parents):
        if parent is not None:
            continued_by.setdefault(parent, child)
    continuations = set(continued_by.values())

    chains: list[list[Call]] = []
    for start in range(len(calls)):
        if start in continuations:
            continue
        chain, at = [], start
        while True:
            chain.append(calls[at])
            if at not in continued_by:
                break
            at = continued_by[at]
        chains.append(chain)
    return chains


def _trajectory(adapter: str, chain: Sequence[Call]) -> Trajectory:
    """The last call's tokens hold all the others'; each call of the chain marks its own."""
    leaf = chain[-1]
    tokens = [*leaf.prompt_ids, *leaf.response_ids]
    mask = [False] * len(tokens)
    logprobs = [0.0] * len(tokens)
    versions = [-1] * len(tokens)
    temperatures = [1.0] * len(tokens)
    turns: list[Turn] = []
    for call in chain:
        start = len(call.prompt_ids)
        end = start + len(call.response_ids)
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = call.response_logprobs
        versions[start:end] = token_versions(call)
        temperatures[start:end] = [temperature_of(call)] * (end - start)
        turns.append(Turn(call.id, start, end))
    return Trajectory(adapter, tokens, mask, logprobs, versions, turns, temperatures)
