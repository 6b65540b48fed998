"""The training loop: roll out, learn, publish, evaluate, until the steps are done.

It runs over the client API, whose backends are this machine and Tinker.

The checkpoint is the last word on a step. Verdicts are written before it, the step's row of metrics
is in it, and the new adapter is published after it. A resumed run undoes what came after its newest
checkpoint (``TrainingRun.restore``). The row is logged last, with the seconds that all of this
took; a run that died before logs the checkpoint's row when it is resumed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from agentrl.config.algorithm import update_settings
from agentrl.runs.summary import Summary
from agentrl.timing import PhaseTimer
from agentrl.training.evaluation import evaluate_if_due, reached_goal
from agentrl.training.metrics import report_step_failures, seconds_row, step_row
from agentrl.training.run import TrainingRun
from agentrl_tracer.schemas import Purpose, SkipReason
from agentrl_trainer.client import AdamParams, RefusedRows
from agentrl_trainer.data.batch_assembly import StepBatch
from agentrl_trainer.learner.step_stats import StepStats


def train(run: TrainingRun) -> Summary:
    """Train to the end.

    Raises:
        RunError: nothing can be rolled out, for a reason the message gives.
    """
    step = run.restore()
    run.begin(step)
    publish(run, step)
    run.timer.spent["start"] = time.perf_counter() - run.session.started
    evaluate_if_due(run, step)
    while step < run.steps and not reached_goal(run):
        step += 1
        train_step(run, step)
        evaluate_if_due(run, step)
    return run.finish(step)


def train_step(run: TrainingRun, step: int) -> None:
    """Sample groups of rollouts, compute advantages, update each adapter, publish its version."""
    timer, parts = PhaseTimer(), PhaseTimer()
    with timer("rollouts"):
        taken = run.queue.take(step, partial(run.display.phase, "rollouts"))
    ahead = run.queue.under_way if taken.metrics["groups/ahead"] else None
    run.display.phase("learning", ahead=ahead)
    with timer("update"):
        calls, batches = run.records.assemble(step, taken.rollouts)
        passes = {
            name: update(run, step, name, batch, parts)
            for name, batch in batches.by_adapter.items()
        }
        whole = batches.whole()
        run.store.settle(trained=dict.fromkeys(whole.trained, step), skipped=whole.skipped)
    outcomes = run.store.outcomes(run.run_id, step=step, purpose=Purpose.TRAIN)
    report_step_failures(run, taken.rollouts, whole, outcomes)
    row = step_row(step, taken, calls, batches, passes, outcomes, run.records.staleness)
    row |= {"learning_rate": run.learning_rate(step), **seconds_row(timer), **seconds_row(parts)}
    with timer("checkpoint"):
        run.checkpoint(step, row)
    with timer("publish"):
        publish(run, step)
    row |= seconds_row(timer)
    run.metrics_log.log(step, row)
    run.timer.add(timer)
    run.display.step(row, run.store.accounting(run.run_id))


def update(
    run: TrainingRun, step: int, name: str, batch: StepBatch, timer: PhaseTimer
) -> list[StepStats]:
    """Update one adapter; return the statistics of each epoch, the first before any update.

    Returns nothing for an empty batch, and for one that the backend cannot learn from, which is
    refused. The last epoch may not have been applied (``skipped_non_finite``).
    """
    passes: list[StepStats] = []
    if not batch.rows:
        return passes
    client = run.clients[name]
    adam = AdamParams(run.learning_rate(step), grad_clip_norm=run.config.learning.max_grad_norm)
    how = update_settings(run.config)
    # What depends on the policy before the update: references, values, advantages of GAE.
    with timer("prepare"):
        try:
            batch.rows = run.result(client.prepare(batch.rows, how))
        except RefusedRows as why:
            run.display.note(f"{name}: nothing of step {step} was trained on: {why}")
            batch.refuse(SkipReason.OFF_POLICY)
            return passes
    for epoch in range(how.epochs):
        with timer("forward_backward"):
            # Normalized by the tokens of the whole step.
            added = client.forward_backward(
                batch.rows, how.loss, how.loss_config, normalize_by=None, logprobs=False
            )
            seen = run.result(added).stats
        with timer("optimizer"):
            stepped = run.result(client.optim_step(adam)).metrics
        refused = bool(seen.skipped_non_finite or stepped.get("skipped_non_finite"))
        norm = stepped.get("grad_norm")  # not every service returns it
        passes.append(replace(seen, grad_norm=norm, skipped_non_finite=refused))
        if refused:
            run.display.note("the loss or gradient was not finite: the step was not applied")
            if not epoch:
                batch.refuse(SkipReason.NON_FINITE_STEP)
            break
    return passes


def publish(run: TrainingRun, step: int) -> None:
    """Save each adapter as version ``step``, and make it the one that answers."""
    for name, client in run.clients.items():
        saved = client.save_weights_for_sampler(run.folder.adapter_version(name, step))
        run.saved[name] = run.result(saved).path
    run.load_published(step)
