"""The held-out tasks while a run trains: when they are due, what came of them, and its goal.

What it measures is sampled and recorded as everything else, and never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agentrl.config.commands import TrainConfig
from agentrl.console.live import TrainDisplay
from agentrl.runs.metric_names import HELD_OUT, HELD_OUT_REWARD
from agentrl.timing import PhaseTimer
from agentrl.training.metrics import seconds_row
from agentrl.training.metrics_log import Journal
from agentrl.training.session import Session, failures, plan_evaluation
from agentrl_tracer.schemas import Rollout, SkipReason
from agentrl_trainer.data.rewards import rollout_rewards


def greedy_note(samples: int, temperature: float) -> str | None:
    """Return the warning for several greedy samples of a task; None where they can differ."""
    if samples == 1 or temperature > 0:
        return None
    return (
        f"at temperature 0 the {samples} samples of a task differ only by what the agent or its "
        "environment draws; pass@k needs a higher one"
    )


class HeldOut:
    """``swap`` puts a step's adapters into the sampler, with an empty cache. ``clock`` is told what
    it took."""

    def __init__(
        self,
        config: TrainConfig,
        task_ids: Sequence[str],
        *,
        session: Session,
        display: TrainDisplay,
        journal: Journal,
        clock: PhaseTimer,
        steps: int,
        swap: Callable[[int], None],
    ) -> None:
        self._config = config
        self._task_ids = task_ids
        self._session = session
        self._display = display
        self._journal = journal
        self._clock = clock
        self._steps = steps
        self._swap = swap

    def evaluate_if_due(self, step: int) -> None:
        due = step % self._config.evaluation.every == 0 or step == self._steps
        if not self._task_ids or not due:
            return
        if (known := self._journal.held_out().get(step)) is not None:  # before it was resumed
            self._display.evaluated(step, known)
            return
        clock = PhaseTimer()
        with clock("evaluation"):
            rollouts = self._session.execute(
                plan_evaluation(
                    self._task_ids,
                    step,
                    self._config.evaluation.samples,
                    self._config.run.seed,
                    self._config.evaluation.temperature,
                ),
                lambda done, total: self._display.phase("evaluation", done, total),
            )
            accuracy, mean = self._score(rollouts)
            if not self._config.rollouts.max_staleness:
                # What it leaves in the sampler's prefix cache would change the last bits of what
                # follows, and a run that is resumed here does not evaluate again.
                self._swap(step)
        self._clock.add(clock)
        row = {"step": step, HELD_OUT: accuracy, HELD_OUT_REWARD: mean, **seconds_row(clock.spent)}
        self._journal.log(step, row)
        self._display.evaluated(step, accuracy)
        for reason, count in list(failures(rollouts).items())[:2]:
            self._display.note(f"{count} of {len(rollouts)} evaluations failed: {reason}")

    def reached_goal(self) -> bool:
        goal, measured = self._config.evaluation.stop_at, self._journal.held_out()
        return goal is not None and bool(measured) and measured[max(measured)] >= goal

    def _score(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        """Accuracy and mean reward; a rollout that failed or emitted nothing is no success."""
        store = self._session.store
        ids = [rollout.id for rollout in rollouts]
        calls = store.calls(rollout_ids=ids)
        store.settle(
            trained={}, skipped=dict.fromkeys((c.id for c in calls), SkipReason.EVALUATION)
        )
        scores = rollout_rewards(rollouts, store.rewards(ids)).values()
        earned = [score for score in scores if score is not None]
        successes = sum(score >= self._config.evaluation.success_reward for score in earned)
        mean = sum(earned) / len(earned) if earned else math.nan
        return successes / len(rollouts), mean
