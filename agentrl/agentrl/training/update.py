"""Update one adapter from a step's rows: what the learner computes, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentrl.timing import PhaseTimer
from agentrl.training.setup.algorithm import update_settings
from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.client import AdamParams, RefusedRows, TrainingClient
from agentrl_trainer.data.batch_assembly import SeenRow, StepBatch
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.step_stats import StepStats

if TYPE_CHECKING:
    from agentrl.training.run import TrainingRun


def update(
    run: TrainingRun, step: int, name: str, batch: StepBatch, timer: PhaseTimer
) -> list[StepStats]:
    """Update one adapter; return the statistics of each epoch, the first before any update.

    Returns nothing for an empty batch, and for one that the backend cannot learn from, which is
    refused. The last epoch may not have been applied (``skipped_non_finite``).
    """
    if not batch.rows:
        return []
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
            return []
    passes: list[StepStats] = []
    for epoch in range(how.epochs):
        seen, logprobs = _epoch(run, client, batch.rows, adam, timer, logprobs=not epoch)
        if seen.skipped_non_finite:
            kept = run.result(client.finite_rows(batch.rows, how.loss, how.loss_config))
            if 0 < len(kept) < (count := len(batch.rows)):
                run.display.note(
                    f"{name}: {count - len(kept)} of {count} rows of step {step} are left out, for "
                    "log-probs, a loss or a gradient that is not finite"
                )
                batch.keep_rows(kept, None if epoch else SkipReason.NON_FINITE)
                seen, logprobs = _epoch(run, client, batch.rows, adam, timer, logprobs=not epoch)
        passes.append(seen)
        if seen.skipped_non_finite:
            run.display.note("the loss or gradient was not finite: the step was not applied")
            if not epoch:
                batch.refuse(SkipReason.NON_FINITE_STEP)
            break
        if not epoch:
            batch.first_pass = list(map(SeenRow, batch.rows, batch.calls_of_rows, logprobs))
    return passes


def _epoch(
    run: TrainingRun,
    client: TrainingClient,
    rows: Sequence[TrainingRow],
    adam: AdamParams,
    timer: PhaseTimer,
    *,
    logprobs: bool,
) -> tuple[StepStats, list[NDArray[np.float32]]]:
    """Make one optimizer step. If anything in it is not finite, nothing is changed.

    Returns its statistics and, with ``logprobs``, the log-probs before it: [tokens - 1] a row.
    """
    how = update_settings(run.config)
    with timer("forward_backward"):
        # Normalized by the tokens of the whole step.
        added = client.forward_backward(
            rows, how.loss, how.loss_config, normalize_by=None, logprobs=logprobs
        )
        done = run.result(added)
    with timer("optimizer"):
        stepped = run.result(client.optim_step(adam)).metrics
    refused = bool(done.stats.skipped_non_finite or stepped.get("skipped_non_finite"))
    norm = stepped.get("grad_norm")  # not every service returns it
    seen = replace(done.stats, grad_norm=norm, skipped_non_finite=refused)
    return seen, [one["logprobs"] for one in done.loss_fn_outputs]
