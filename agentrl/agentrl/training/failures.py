"""Say what failed in a step or an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.training.session import RunError
from agentrl_tracer.schemas import AttemptState, Outcomes, Rollout, RolloutState
from agentrl_trainer.data.batch_assembly import StepBatch


def count_failures(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Count failed rollouts by the last line of their reason, most frequent first."""
    reasons = Counter(
        (rollout.reason or str(rollout.state)).strip().splitlines()[-1][:200]
        for rollout in rollouts
        if rollout.state is not RolloutState.SUCCEEDED
    )
    return dict(reasons.most_common())


def note_failed_rollouts(
    rollouts: Sequence[Rollout], what: str, note: Callable[[str], None]
) -> dict[str, int]:
    """Report the two most frequent failures of some ``what``; return the count of each."""
    problems = count_failures(rollouts)
    for reason, count in list(problems.items())[:2]:
        note(f"{count} of {len(rollouts)} {what} failed: {reason}")
    return problems


def report_step_failures(
    rollouts: Sequence[Rollout],
    batch: StepBatch,
    outcomes: Outcomes,
    *,
    note: Callable[[str], None],
    logs: Path,
) -> None:
    """Report what went wrong in a step.

    Args:
        logs: folder of the agents' output.

    Raises:
        RunError: every rollout of the step failed.
    """
    if words := describe_outcomes(outcomes):
        note(words)
    problems = note_failed_rollouts(rollouts, "rollouts", note)
    failed = sum(problems.values())
    if failed == len(rollouts):
        raise RunError(
            "every rollout of the step failed. "
            + "; ".join(f"{count}×: {reason}" for reason, count in problems.items())
            + f"\nThe agent's output is in {logs}"
        )
    if missing := sum(reward is None for reward in batch.rewards.values()) - failed:
        note(f"{missing} of {len(rollouts)} rollouts emitted no reward")
    if small := batch.shrunk():
        note(f"{small} of {len(batch.groups)} groups shrank below min_group: not trained")


def describe_outcomes(outcomes: Outcomes) -> str:
    """Return failed attempts and rewards given by policies in one line, or an empty string."""
    expected = (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
    failed = {name: count for name, count in outcomes.attempts.items() if name not in expected}
    parts: list[str] = []
    if failed:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(failed.items()))
        parts.append(f"{sum(failed.values())} attempts failed ({listed})")
    for policy, count in sorted(outcomes.policy_rewards.items()):
        parts.append(f"{count} got their reward from {policy}")
    return "; ".join(parts)
