"""The rollouts of a step, and the processes that run them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.field_types import Count, Positive, Table, Whole, read_place
from agentrl_tracer.schemas import MAX_REWARD

Policy = Literal["retry", "drop"] | Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class RunnerSettings(Table):
    """The processes that run the agent."""

    runners: Annotated[int, Field(ge=1, le=1024)] = 8
    """Worker processes that run the agent; ray:16 is 16 on Ray. By default 8. Where the agent is
    Python code in forked processes and the model is not agentrl-tiny, 16 for each core, at most 64,
    and no more than rollouts and memory allow. The command prints the number and why."""
    runners_on: Literal["here", "ray"] = "here"
    """Run them on this machine, or as actors of a Ray cluster."""
    concurrency: Count = 1
    """Rollouts of an async agent that a process runs at a time; they share its modules."""
    rollouts_per_process: Count = 1
    """Rollouts that a process runs in turn. 1 starts a fresh process for each; more is faster."""
    timeout: Positive = 300
    """Seconds after which an attempt is killed."""
    lease: Annotated[float, Field(ge=1)] = 15
    """Seconds without a heartbeat after which a runner counts as lost."""
    on_error: Policy = "retry"
    """When the agent raises: retry, drop the rollout, or assign a reward."""
    on_timeout: Policy = "drop"
    """When an attempt times out: retry, drop it, or assign a reward."""
    on_missing_reward: Policy = "drop"
    """When an attempt emits no reward: retry, drop it, or assign a reward."""
    max_attempts: Count = 3
    """Attempts per rollout, the first included."""
    log_mib: Annotated[int, Field(ge=1, le=65536)] = 4
    """MiB of output that an attempt's log keeps: its beginning and its end."""
    max_calls_per_rollout: Count | None = None
    """Model calls that one attempt may make; by default no limit."""
    max_tokens_per_rollout: Count | None = None
    """Tokens, prompts included, that one attempt may use."""

    @model_validator(mode="before")
    @classmethod
    def _read_place(cls, given: Any) -> Any:
        """Read ``runners = "ray:16"`` as 16 runners on Ray, and ``"ray"`` as the default number."""
        return read_place(given, "runners")


class RolloutSettings(RunnerSettings):
    """The rollouts of a training step, and how they are executed."""

    batch_size: Count = 16
    """Tasks per step."""
    group_size: Count = 4
    """Rollouts per task, compared with each other."""
    min_group: Count = 2
    """Scored rollouts below which a group is skipped."""
    max_staleness: Whole = 0
    """Steps that rollouts may run ahead of the updates. Above 0 both run at the same time, and
    trained tokens are up to so many adapter versions old."""
    stale: Literal["correct", "drop", "wait"] | None = None
    """With max_staleness, for a group that would get older than that: the step waits for it (wait,
    the default), drops its older answers (drop), or trains on them (correct)."""
    resample_zero_variance: Whole = 0
    """Rounds in which groups with equal rewards are replaced by groups of further tasks, until the
    step has its batch (DAPO's dynamic sampling)."""


class SingleRunnerSettings(RunnerSettings):
    runners: Annotated[int, Field(ge=1, le=1)] = 1
    """Always 1."""
    on_error: Policy = "drop"
    """When the agent raises: drop, retry, or a reward."""
