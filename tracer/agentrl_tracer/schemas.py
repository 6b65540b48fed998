"""Define the records of a run: rollout, attempt, call, span, reward, adapter version.

Imports the standard library only. Times are seconds since the Unix epoch (float); span times are
nanoseconds (int), as in OTLP.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Json = dict[str, Any]

MAX_REWARD = 1e9
"""Largest absolute value of a reward. Sums and squares of such rewards are finite in float32."""
GREEDY_BELOW = 0.01
"""Temperatures below this are greedy, which is 0: logits divided by them may overflow."""


def new_id(prefix: str = "") -> str:
    """Return 24 hexadecimal digits: nanoseconds since 1970, then 32 random bits, as in UUIDv7.

    Time-ordered ids keep rows of one moment together in the indexes: a commit writes fewer pages.
    """
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"


class Purpose(StrEnum):
    """Why a rollout is executed."""

    TRAIN = "train"
    EVAL = "eval"


class _State(StrEnum):
    @property
    def shown(self) -> str:  # to readers, success is a matter of rewards
        return "completed" if self == "succeeded" else self.value


class RolloutState(_State):
    """``queued → running → succeeded | failed | cancelled``; a retry goes back to ``queued``."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(_State):
    """The state of one try of a rollout. Every state but ``running`` is final: sealed."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    ERROR = "error"  # the agent raised, or its command exited non-zero
    TIMEOUT = "timeout"  # killed at its time limit
    INFRASTRUCTURE = "infrastructure"  # the gateway or sampler failed it, not the agent
    LOST = "lost"  # its runner stopped heartbeating and the lease ran out
    CANCELLED = "cancelled"  # its rollout is no longer needed
    NO_REWARD = "no_reward"  # ended well without a reward, and the policy retries


class CallState(StrEnum):
    """``open`` from the moment a request is accepted; the rest are final."""

    OPEN = "open"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # the client disconnected; the partial answer is kept
    ERROR = "error"  # the sampler failed


class SkipReason(StrEnum):
    """Why a recorded call did not train. Every call that did not train has exactly one."""

    EVALUATION = "evaluation"  # made by an evaluation rollout
    NO_ROLLOUT = "no_rollout"  # made outside any rollout (operator key)
    NO_REWARD = "no_reward"  # the rollout emitted none; missing is not zero
    REFUSED_REWARD = "refused_reward"  # one of its rewards is no number that can train
    FAILED_ATTEMPT = "failed_attempt"  # its attempt did not win
    FAILED_ROLLOUT = "failed_rollout"  # no attempt of its rollout succeeded
    CLIENT_DISCONNECTED = "client_disconnected"
    SAMPLER_ERROR = "sampler_error"  # of this or another choice: the client got no answer
    GATEWAY_LOST = "gateway_lost"  # the gateway died between accepting and answering it
    LATE_CALL = "late_call"  # finished after its attempt was sealed
    NOT_TRAINABLE_MODEL = "not_trainable_model"  # answered by no adapter in training
    OTHER_AGENT = "other_agent"  # its adapter trains on other agents' calls
    MALFORMED_RECORD = "malformed_record"  # lengths of tokens and log-probs disagree
    EMPTY_RESPONSE = "empty_response"
    TOO_LONG = "too_long"
    TRUNCATED = "truncated"  # cut off at its token limit, and settings exclude such answers
    OFF_POLICY = "off_policy"  # sampled at another temperature, filtered, biased or constrained
    SMALL_GROUP = "small_group"  # its group shrank below the minimum size
    ZERO_ADVANTAGE = "zero_advantage"  # every rollout of the group earned the same
    NON_FINITE = "non_finite"  # its log-probs, loss or gradient: the rest of the step trained
    NON_FINITE_STEP = "non_finite_step"  # the whole optimizer step was refused
    STALE = "stale"  # sampled by an adapter version that is too old
    SUPERSEDED = "superseded"  # a resumed run repeated its step
    LEFT_OVER = "left_over"  # rolled out ahead, and the run ended before a step used it


@dataclass(frozen=True, slots=True)
class NewRollout:
    """One execution of the agent to queue."""

    task_id: str
    group_id: str
    purpose: Purpose
    step: int
    index: int  # position in its group, from 0
    seed: int  # every sampling seed inside the rollout derives from it
    sampling: Json = field(default_factory=dict[str, Any])
    """Defaults for requests that do not set them themselves: temperature, max_tokens, ..."""


@dataclass(frozen=True, slots=True)
class Policies:
    """What follows a failure: ``retry`` (a new attempt), ``drop``, or a number (the reward).

    ``max_attempts`` bounds the retries of all three together. A rollout whose last attempt failed
    has failed. One whose last attempt emitted no reward has succeeded and does not train.
    """

    on_error: str | float = "retry"
    on_timeout: str | float = "drop"
    on_missing_reward: str | float = "drop"
    max_attempts: int = 3
    max_infrastructure_retries: int = 20


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt leased to a runner, and its key."""

    rollout_id: str
    attempt_id: str
    attempt_number: int  # from 1
    run_id: str
    purpose: Purpose
    step: int
    task_id: str
    task: Json
    key: str  # the attempt's secret; only its hash is stored
    lease_expires_at: float


@dataclass(frozen=True, slots=True)
class AttemptRef:
    """The attempt that a key belongs to."""

    run_id: str
    rollout_id: str
    attempt_id: str
    state: AttemptState
    purpose: Purpose
    seed: int
    sampling: Json


@dataclass(frozen=True, slots=True)
class Call:
    """One sampled answer to one request; ``n > 1`` makes ``n`` calls.

    Invariant: ``len(response_logprobs) == len(response_ids)``; log-probs are natural logs under
    the policy at temperature 1, before top-p and top-k, as the trainer recomputes them.
    """

    id: str  # unique: ``response_id``, ``response_id#i`` for choice i, ``#i@seq`` if sampled again
    response_id: str  # the id the client saw
    choice: int
    run_id: str | None
    rollout_id: str | None
    attempt_id: str | None
    seq: int  # order of acceptance within the attempt, from 0
    agent: str | None
    model: str  # as requested
    adapter: str | None  # None: the base model
    adapter_version: int | None
    state: CallState
    prompt_ids: list[int]
    response_ids: list[int]  # stop token included
    response_logprobs: list[float]
    finish_reason: str | None
    params: Json
    request: Json | None  # on the wire
    response: Json | None  # as a chat completion, whatever the protocol; of streams, too
    error: str | None
    trace_id: str | None  # hex, from traceparent
    span_id: str | None
    started_at: float
    ended_at: float | None
    trained_step: int | None = None
    skip_reason: SkipReason | None = None

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Prompt and sampled tokens. For a provider's model what it reported, for all choices in
        the row of the first; None if it did not."""
        said = self.params.get("usage")
        if self.prompt_ids or not (said or "usage_unknown" in self.params):
            return len(self.prompt_ids), len(self.response_ids)
        if self.choice and said:
            return 0, 0
        return said and (said.get("prompt_tokens") or 0, said.get("completion_tokens") or 0)


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that a client retry may repeat."""

    call: Call
    continued: bool  # a later prompt of its attempt begins with its tokens


@dataclass(frozen=True, slots=True)
class Span:
    """An OpenTelemetry span. Ids are lower-case hex: 32 digits for traces, 16 for spans."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: str  # unset | ok | error
    attributes: Json
    events: list[Json]
    resource: Json
    rollout_id: str | None = None
    attempt_id: str | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """A number earned in a rollout. ``key``, usually the span id, makes delivery idempotent.

    A value that ``is_reward`` refuses is kept as it was emitted, and its rollout does not train.
    """

    attempt_id: str
    rollout_id: str
    name: str
    value: float
    key: str
    span_id: str | None = None
    response_id: str | None = None
    explanation: str | None = None
    agent: str | None = None  # it counts for the calls of this agent (role) only; None: for all
    created_at: float = field(default_factory=time.time)


def is_reward(value: float) -> bool:
    """Return whether a number can train: finite, and within ``MAX_REWARD``."""
    return -MAX_REWARD <= value <= MAX_REWARD


REWARD_RANGE = f"a reward is a number from -{MAX_REWARD:.0f} to {MAX_REWARD:.0f}"

POLICY_REWARD_KEY = "policy"
"""``Reward.key`` of a policy's reward, which stands instead of emitted ones."""
HUMAN_REWARD_KEY = "human"
"""``Reward.key`` of a reward made from feedback; it counts where a configuration names it."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What one person thinks of a rollout, or of one call. Later feedback replaces none."""

    run_id: str | None  # None: of a call without a run
    rollout_id: str | None
    call_id: str | None  # None: of the whole rollout
    name: str  # of what is judged: the reward is ``human:NAME``
    author: str
    thumb: int | None = None  # 1 or -1
    score: float | None = None
    label: str | None = None
    comment: str | None = None
    created_at: float = field(default_factory=time.time)
    id: str = field(default_factory=new_id)

    @property
    def value(self) -> float | None:
        """The score, else the thumb; None where only words were given."""
        return self.thumb if self.score is None else self.score


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Counts of how rollouts went, without zeros."""

    rollouts: dict[str, int]  # by RolloutState
    attempts: dict[str, int]  # by AttemptState
    policy_rewards: dict[str, int]  # by policy: on_error, on_timeout, on_missing_reward

    def metrics(self) -> dict[str, float]:
        """Return failures with zeros: ``rollouts/failed``, ``attempts/timeout``, ..."""
        not_failures = (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
        failures = [state for state in AttemptState if state not in not_failures]
        policies = ("on_error", "on_timeout", "on_missing_reward")
        return {
            "rollouts/failed": self.rollouts.get(RolloutState.FAILED, 0),
            **{f"attempts/{state}": self.attempts.get(state, 0) for state in failures},
            **{f"rewards/{policy}": self.policy_rewards.get(policy, 0) for policy in policies},
        }


@dataclass(frozen=True, slots=True)
class Rollout:
    id: str
    run_id: str
    task_id: str
    group_id: str
    purpose: Purpose
    step: int
    index: int
    seed: int
    state: RolloutState
    reason: str | None  # why it failed
    attempts: int
    winner: str | None  # the attempt that succeeded
    created_at: float
    started_at: float | None
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class Attempt:
    id: str
    rollout_id: str
    number: int
    state: AttemptState
    runner: str
    error: str | None
    log: str | None  # path of the captured stdout and stderr
    started_at: float
    ended_at: float | None


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    run_id: str
    name: str
    version: int
    path: str
    step: int
    created_at: float


@dataclass(frozen=True, slots=True)
class PromptKinds:
    """How the prompts of some rollouts began, which all have the same counts."""

    kinds: Counter[str]  # of one rollout
    rollouts: int
    example: str  # the id of one of them


@dataclass(frozen=True, slots=True)
class Accounting:
    """The sum that must hold: ``proxied == recorded == trained + sum(skipped) + pending``.

    ``proxied`` is the gateways' count of accepted answers, kept apart from the recorded rows.
    ``pending`` counts calls without a verdict; after a step it is zero.
    """

    proxied: int
    recorded: int
    trained: int
    skipped: dict[str, int]
    pending: int

    @property
    def adds_up(self) -> bool:
        total = self.trained + sum(self.skipped.values()) + self.pending
        return self.proxied == self.recorded == total


@dataclass(frozen=True, slots=True)
class Verified:
    """The sums that a run's transactions kept, and the same counted from its calls."""

    kept: Accounting
    counted: Accounting

    @property
    def fault(self) -> str | None:
        """What does not add up; None: everything does."""
        if not self.counted.adds_up:
            return (
                f"the gateways counted {self.counted.proxied} calls, and the store holds "
                f"{self.counted.recorded}"
            )
        if self.kept != self.counted:
            return f"the kept sums are {self.kept}, but its calls count {self.counted}"
        return None
