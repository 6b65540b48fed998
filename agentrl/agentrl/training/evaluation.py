"""Evaluate held-out tasks while a run trains, and stop the run at its goal.

Evaluations are sampled and recorded like all rollouts, and never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agentrl.config.settings import TrainConfig
from agentrl.console.live import TrainDisplay
from agentrl.runs.metric_names import HELD_OUT, HELD_OUT_REWARD
from agentrl.timing import PhaseTimer
from agentrl.training.failures import note_failed_rollouts
from agentrl.training.metrics import seconds_row
from agentrl.training.metrics_log import MetricsLog
from agentrl.training.rollout_queue import rollout_seed
from agentrl.training.session import Session
from agentrl_tracer.schemas import Json, NewRollout, Purpose, Rollout
from agentrl_trainer.data.rewards import rollout_rewards
from agentrl_trainer.data.skip_reasons import evaluation_reasons


def plan_evaluation(
    task_ids: Sequence[str], step: int, samples: int, seed: int, temperature: float
) -> list[NewRollout]:
    """Plan ``samples`` rollouts a task, at this temperature whatever the agent asks for."""
    sampling: Json = {"force": {"temperature": temperature}}
    return [
        NewRollout(
            task_id=task_id,
            group_id=f"eval-{step}-{task_id}",
            purpose=Purpose.EVAL,
            step=step,
            index=index,
            seed=rollout_seed(seed, "eval", step, task_id, index),
            sampling=sampling,
        )
        for task_id in task_ids
        for index in range(samples)
    ]


class HeldOutEvaluation:
    """The held-out tasks of one run.

    Args:
        clock: of the run; the seconds of evaluations are added to it.
        republish: loads a step's adapters into the sampler again, which empties its prefix cache.
    """

    def __init__(
        self,
        config: TrainConfig,
        task_ids: Sequence[str],
        *,
        session: Session,
        display: TrainDisplay,
        metrics_log: MetricsLog,
        clock: PhaseTimer,
        steps: int,
        republish: Callable[[int], None],
    ) -> None:
        self._config = config
        self._task_ids = task_ids
        self._session = session
        self._display = display
        self._metrics_log = metrics_log
        self._clock = clock
        self._steps = steps
        self._republish = republish

    def evaluate_if_due(self, step: int) -> None:
        config = self._config
        due = step % config.eval_every == 0 or step == self._steps
        if not self._task_ids or not due:
            return
        if (known := self._metrics_log.held_out().get(step)) is not None:  # before a resume
            self._display.evaluated(step, known)
            return
        clock = PhaseTimer()
        with clock("evaluation"):
            plan = plan_evaluation(
                self._task_ids, step, config.eval_samples, config.seed, config.eval_temperature
            )
            rollouts = self._session.execute(
                plan, lambda done, total: self._display.phase("evaluation", done, total)
            )
            accuracy, mean = self._score(rollouts)
            if not config.max_staleness:
                # What it leaves in the sampler's prefix cache would change the last bits of later
                # log-probs, and a run that is resumed here does not evaluate again.
                self._republish(step)
        self._clock.add(clock)
        row = {"step": step, HELD_OUT: accuracy, HELD_OUT_REWARD: mean, **seconds_row(clock)}
        self._metrics_log.log(step, row)
        self._display.evaluated(step, accuracy)
        note_failed_rollouts(rollouts, "evaluations", self._display.note)

    def reached_goal(self) -> bool:
        goal, measured = self._config.stop_at, self._metrics_log.held_out()
        return goal is not None and bool(measured) and measured[max(measured)] >= goal

    def _score(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        """Return accuracy and mean reward; a rollout without a reward is no success."""
        store = self._session.store
        ids = [rollout.id for rollout in rollouts]
        calls = store.calls(rollout_ids=ids)
        store.settle(trained={}, skipped=evaluation_reasons(calls))
        scores = rollout_rewards(rollouts, store.rewards(ids)).values()
        earned = [score for score in scores if score is not None]
        successes = sum(score >= self._config.success_reward for score in earned)
        mean = sum(earned) / len(earned) if earned else math.nan
        return successes / len(rollouts), mean
