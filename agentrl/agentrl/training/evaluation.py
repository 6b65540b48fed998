"""Evaluate held-out tasks while a run trains; success rates and pass@k with confidence intervals.

Evaluations are sampled and recorded like all rollouts, and never trained on.

Tasks are the independent units: they are what was drawn, and samples of one task resemble one
another. Intervals that count samples as independent are too narrow (Miller 2024, "Adding Error Bars
to Evals", arXiv:2411.00640, clustered standard errors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance
from typing import TYPE_CHECKING

from agentrl.config.settings import EvaluationSettings
from agentrl.runs.best_adapter import keep_best
from agentrl.runs.metric_names import HELD_OUT
from agentrl.timing import PhaseTimer
from agentrl.training.metrics import note_failed_rollouts, seconds_row
from agentrl.training.rollout_queue import rollout_seed
from agentrl.training.unasked import note_unasked
from agentrl_tracer.schemas import NewRollout, Purpose, SkipReason
from agentrl_trainer.data.rewards import rollout_rewards

if TYPE_CHECKING:
    from agentrl.training.loop import TrainingRun

_Z95 = NormalDist().inv_cdf(0.975)


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
    if (known := run.metrics_log.held_out().get(step)) is not None:
        display.evaluated(step, known)
        return
    timer = PhaseTimer()
    with timer("evaluation"):
        # A run with one runner can be resumed to the last bit: it makes one thing at a time.
        overlaps = run.config.rollouts.runners > 1 and not last and step < run.steps
        if overlaps:
            run.queue.queue_up_to(step + 1)
        rollouts = run.session.execute(
            plan_evaluation(run.eval_ids, step, how, run.config.run.seed),
            lambda done, total: display.phase("evaluation", done, total),
        )
        ids = [rollout.id for rollout in rollouts]
        calls = run.session.skip_calls(ids, SkipReason.EVALUATION)
        scores = rollout_rewards(rollouts, run.store.rewards(ids))
        if not overlaps and not run.config.rollouts.max_staleness:
            # What it leaves in the sampler's prefix cache would change the last bits of later
            # log-probs, and a run that is resumed here does not evaluate again.
            run.load_published(step)
    run.timer.add(timer)
    earned = [score for score in scores.values() if score is not None]
    # A rollout without a reward is no success.
    accuracy = sum(score >= how.success_reward for score in earned) / len(rollouts)
    mean = fmean(earned) if earned else math.nan
    row = {"step": step, HELD_OUT: accuracy, "eval/reward": mean, **seconds_row(timer)}
    run.guards.after_evaluation(row, calls)
    run.metrics_log.log(step, row)
    if run.guards.best == step:
        keep_best(run.folder, run.config.trained, step)
    display.evaluated(step, accuracy)
    note_failed_rollouts(rollouts, "evaluations", display.note)
    asked = {call.attempt_id for call in calls if call.adapter in run.config.trained}
    unasked = [r for r in rollouts if scores[r.id] is not None and r.winner not in asked]
    note_unasked(run, unasked, len(rollouts), "evaluations")


def wilson(rate: float, trials: float) -> tuple[float, float]:
    """Return the 95 % score interval of a success rate (Wilson 1927, "Probable inference").

    Unlike mean ± 1.96 standard errors it stays within 0..1, and is right for few trials and for
    rates near 0 and 1. ``trials`` may be an effective number, hence a fraction.
    """
    weight = _Z95**2 / trials
    center = (rate + weight / 2) / (1 + weight)
    half = _Z95 * math.sqrt(rate * (1 - rate) / trials + weight / (4 * trials)) / (1 + weight)
    # At a rate of 0 or 1, rounding may leave the rate a hair outside of its own interval.
    return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def task_interval(values: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of tasks' values in 0..1, each of ``samples`` samples.

    Wilson's interval, where each task counts as m (1 - m) / s² trials and m is the
    mean of the values and s² their variance (Kish 1965, "Survey Sampling": effective sample size;
    for the score interval: Korn & Graubard 1998). That is 1 where each task has one outcome;
    samples that disagree within tasks raise it, up to ``samples``.

    m and s² include two more tasks, one all right and one all wrong, so that a few tasks that
    agree are not taken for certain: of 24 tasks with all samples right the interval is that of 24
    of 24, 86 % to 100 %, where the standard error would be 0. In simulations (some
    are tests) it covers the true value in 95 % or more of evaluations, down to 10 tasks, where mean
    ± 1.96 standard errors falls below 80 % near 0 and 1. With one outcome per task it dips as
    Wilson's does, to about 90 % where fewer than one failure (or success) is to be expected.
    """
    smoothed = [*values, 0.0, 1.0]
    mean = fmean(smoothed)
    worth = min(mean * (1 - mean) / pvariance(smoothed, mean), samples)
    return wilson(fmean(values), len(values) * worth)


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Estimate, without bias, the chance that one of ``k`` ≤ ``samples`` samples succeeds.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", equation 1.
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)
