"""Evaluate held-out tasks while a run trains, and tell when it has reached its goal.

Evaluations are sampled and recorded like all rollouts, and never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.runs.metric_names import HELD_OUT, HELD_OUT_REWARD
from agentrl.timing import PhaseTimer
from agentrl.training.failures import note_failed_rollouts
from agentrl.training.metrics import seconds_row
from agentrl.training.rollout_queue import rollout_seed
from agentrl_tracer.schemas import Json, NewRollout, Purpose, Rollout, SkipReason
from agentrl_tracer.store import Store
from agentrl_trainer.data.rewards import rollout_rewards

if TYPE_CHECKING:
    from agentrl.training.run import TrainingRun


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


def evaluate_if_due(run: TrainingRun, step: int) -> None:
    """Run the held-out tasks after ``step``, if they are due and were not run before a resume."""
    config, display = run.config, run.display
    due = step % config.evaluation.every == 0 or step == run.steps
    if not run.eval_ids or not due:
        return
    if (known := run.metrics_log.held_out().get(step)) is not None:
        display.evaluated(step, known)
        return
    timer = PhaseTimer()
    with timer("evaluation"):
        rollouts = run.session.execute(
            plan_evaluation(
                run.eval_ids,
                step,
                config.evaluation.samples,
                config.run.seed,
                config.evaluation.temperature,
            ),
            lambda done, total: display.phase("evaluation", done, total),
        )
        accuracy, mean = _score(run.store, rollouts, config.evaluation.success_reward)
        if not config.rollouts.max_staleness:
            # What it leaves in the sampler's prefix cache would change the last bits of later
            # log-probs, and a run that is resumed here does not evaluate again.
            run.load_published(step)
    run.timer.add(timer)
    row = {"step": step, HELD_OUT: accuracy, HELD_OUT_REWARD: mean, **seconds_row(timer)}
    run.metrics_log.log(step, row)
    display.evaluated(step, accuracy)
    note_failed_rollouts(rollouts, "evaluations", display.note)


def reached_goal(run: TrainingRun) -> bool:
    """Tell whether the newest held-out accuracy has reached ``stop_at``."""
    goal, measured = run.config.evaluation.stop_at, run.metrics_log.held_out()
    return goal is not None and bool(measured) and measured[max(measured)] >= goal


def _score(store: Store, rollouts: Sequence[Rollout], success: float) -> tuple[float, float]:
    """Return accuracy and mean reward; a rollout without a reward is no success."""
    ids = [rollout.id for rollout in rollouts]
    calls = store.calls(rollout_ids=ids)
    store.settle(trained={}, skipped=dict.fromkeys((c.id for c in calls), SkipReason.EVALUATION))
    scores = rollout_rewards(rollouts, store.rewards(ids)).values()
    earned = [score for score in scores if score is not None]
    mean = sum(earned) / len(earned) if earned else math.nan
    return sum(score >= success for score in earned) / len(rollouts), mean
