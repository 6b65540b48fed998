"""Evaluate held-out tasks while a run trains.

Evaluations are sampled and recorded like all rollouts, and never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from agentrl.config.settings.evaluation import EvaluationSettings
from agentrl.runs.best_adapter import held_out_of, keep_best
from agentrl.runs.metric_names import HELD_OUT
from agentrl.timing import PhaseTimer
from agentrl.training.metrics import note_failed_rollouts, seconds_row
from agentrl.training.queue.rollout_queue import rollout_seed
from agentrl.training.unasked import note_unasked
from agentrl_tracer.schemas import NewRollout, Purpose, SkipReason
from agentrl_trainer.data.rewards import rollout_rewards

if TYPE_CHECKING:
    from agentrl.training.run import TrainingRun


def plan_evaluation(
    task_ids: Sequence[str], step: int, how: EvaluationSettings, seed: int
) -> list[NewRollout]:
    """Plan the rollouts of each task, at ``how.temperature`` whatever the agent asks for."""
    return [
        NewRollout(
            task_id,
            f"eval-{step}-{task_id}",
            Purpose.EVAL,
            step,
            index,
            seed=rollout_seed(seed, "eval", step, at, index),
            sampling={"force": {"temperature": how.temperature}},
        )
        for at, task_id in enumerate(task_ids)
        for index in range(how.samples)
    ]


def evaluate_if_due(run: TrainingRun, step: int, *, last: bool = False) -> None:
    """Run the held-out tasks after ``step``, if they are due and were not run before a resume.

    Args:
        last: the run ends here, before its last step.
    """
    how, display = run.config.evaluation, run.display
    if not run.eval_ids or (step % how.every and step != run.steps and not last):
        return
    if (known := held_out_of(run.folder).get(step)) is not None:
        display.evaluated(step, known)
        return
    timer = PhaseTimer()
    with timer("evaluation"):
        # A run with one runner can be resumed to the last bit: it makes one thing at a time.
        overlaps = run.config.rollouts.runners > 1 and not last and step < run.steps
        overlaps = overlaps and not run.guards.budget.why_no_step()
        if overlaps:
            run.queue.queue_up_to(step + 1)
        rollouts = run.session.execute(
            plan_evaluation(run.eval_ids, step, how, run.config.run.seed),
            lambda done, total: display.phase("evaluation", done, total),
        )
        run.scorer.score(rollouts, partial(display.phase, "rewards"))
        ids = [rollout.id for rollout in rollouts]
        calls = run.session.skip_calls(ids, SkipReason.EVALUATION)
        scores = rollout_rewards(rollouts, run.store.rewards(ids))
        if not overlaps and not run.config.rollouts.max_staleness:
            # What it leaves in the sampler's prefix cache would change the last bits of later
            # log-probs, and a run that is resumed here does not evaluate again.
            run.publish(step)
    run.timer.add(timer)
    earned = [score for score in scores.values() if score is not None]
    # A rollout without a reward is no success.
    accuracy = sum(score >= how.success_reward for score in earned) / len(rollouts)
    mean = fmean(earned) if earned else math.nan
    row = {"step": step, HELD_OUT: accuracy, "eval/reward": mean, **seconds_row(timer)}
    row |= {f"eval/{name}": value for name, value in run.scorer.take_metrics().items()}
    run.guards.after_evaluation(row, calls)
    run.metrics_log.log(step, row)
    if run.guards.best == step:
        keep_best(run.folder, run.config.trained, step)
    display.evaluated(step, accuracy)
    note_failed_rollouts(rollouts, "evaluations", display.note)
    if unpaid := sum(one.winner is not None and scores[one.id] is None for one in rollouts):
        display.note(f"{unpaid} of {len(rollouts)} evaluations have no reward")
    asked = {call.attempt_id for call in calls if call.adapter in run.config.trained}
    unasked = [r for r in rollouts if scores[r.id] is not None and r.winner not in asked]
    note_unasked(run, unasked, len(rollouts), "evaluations")
