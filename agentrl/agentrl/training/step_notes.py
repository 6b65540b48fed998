"""What went wrong in a step, in words: for whoever looks on, or as the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.training.session import RunError, failures, outcomes_in_words
from agentrl_tracer.schemas import Outcomes, Rollout
from agentrl_trainer.data.batch_assembly import StepBatch


def note_failures(
    rollouts: Sequence[Rollout],
    batch: StepBatch,
    outcomes: Outcomes,
    *,
    note: Callable[[str], None],
    logs: Path,
) -> None:
    """Raises RunError where every rollout of the step failed; ``logs`` says more then."""
    problems = failures(rollouts)
    if words := outcomes_in_words(outcomes):
        note(words)
    for reason, count in list(problems.items())[:2]:
        note(f"{count} of {len(rollouts)} rollouts failed: {reason}")
    if sum(problems.values()) == len(rollouts):
        raise RunError(
            "every rollout of the step failed. "
            + "; ".join(f"{count}×: {reason}" for reason, count in problems.items())
            + f"\nThe agent's output is in {logs}"
        )
    missing = sum(reward is None for reward in batch.rewards.values()) - sum(problems.values())
    if missing:
        note(f"{missing} of {len(rollouts)} rollouts emitted no reward")
    if small := batch.shrunk():
        note(f"{small} of {len(batch.groups)} groups shrank below min_group: not trained")
