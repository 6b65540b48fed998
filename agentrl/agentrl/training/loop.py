"""The training loop: roll out, learn, publish, evaluate, until the steps are done.

``TrainingRun`` wires the parts of a run, and begins, checkpoints, resumes and ends it.

It runs over the client API, whose backends are this machine and Tinker.

The checkpoint is the last word on a step. Verdicts are written before it, the step's row of metrics
is in it, and the new adapter is published after it. A resumed run undoes what came after its newest
checkpoint (``TrainingRun.restore``). The row is logged last, with the seconds that all of this
took; a run that died before logs the checkpoint's row when it is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.config.checks import greedy_note
from agentrl.config.commands import TrainConfig
from agentrl.config.loading import steps_of
from agentrl.console.live import TrainDisplay
from agentrl.findings import StepNotes, thought_marks
from agentrl.guards.budget import BudgetSpentError
from agentrl.guards.run_guards import Guards
from agentrl.process_privacy import private_files
from agentrl.runs import token_records
from agentrl.runs.best_adapter import held_out_of
from agentrl.runs.folder import strict
from agentrl.runs.metric_names import REWARD
from agentrl.runs.summary import Ending, Summary
from agentrl.scoring.functions import RewardFunction
from agentrl.timing import PhaseTimer
from agentrl.training.algorithm import update_settings
from agentrl.training.clients import create_clients
from agentrl.training.evaluation import evaluate_if_due
from agentrl.training.metrics import PrefixHits, report_step_failures, seconds_row, step_row
from agentrl.training.resume import verify_in_background
from agentrl.training.rollout_queue import RolloutQueue
from agentrl.training.session import RunError, Session
from agentrl.training.step_records import StepRecords
from agentrl.training.summarize import summarize
from agentrl.training.tracking.metrics_log import MetricsLog
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Json, Purpose, SkipReason
from agentrl_trainer.client import AdamParams, APIFuture, RefusedRows, TrainingClient
from agentrl_trainer.client.types import SavedPath
from agentrl_trainer.data.batch_assembly import SeenRow, StepBatch
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.optimizers import schedule_factor
from agentrl_trainer.learner.step_stats import StepStats

T = TypeVar("T")


@private_files()
def train(run: TrainingRun) -> Summary:
    """Train to the end.

    Raises:
        RunError: nothing can be rolled out, for a reason the message gives.
    """
    try:
        step = run.restore()
        run.begin(step)
        run.save_versions(step)
        run.load_published(step)
        run.timer.spent["start"] = time.perf_counter() - run.session.started
        ended: Ending | None = None
        try:
            evaluate_if_due(run, step)
            while step < run.steps and (ended := run.guards.why_end()) is None:
                train_step(run, step + 1)
                step += 1
                evaluate_if_due(run, step)
            if ended and ended.evaluates and step not in run.guards.held_out:
                evaluate_if_due(run, step, last=True)
        except BudgetSpentError as spent:
            ended = Ending(*spent.args)
            run.give_up_after(step)
        return run.finish(step, ended)
    except KeyboardInterrupt:
        run.metrics_log.close(killed=True)  # the process ends without its trackers' own hooks
        raise


def train_step(run: TrainingRun, step: int) -> None:
    """Sample groups of rollouts, compute advantages, update each adapter, publish its version."""
    timer, parts = PhaseTimer(), PhaseTimer()
    with timer("rollouts"):
        taken = run.queue.take(step, run.display.phase)
    ahead = run.queue.under_way if taken.metrics["groups/ahead"] else None
    run.display.phase("learning", ahead=ahead)
    if not ahead:
        run.session.gateway.drop_prefixes()
    with timer("update"):
        calls, batches = run.records.assemble(step, taken.rollouts)
        passes = {
            name: update(run, step, name, batch, parts)
            for name, batch in batches.by_adapter.items()
        }
        whole = batches.whole()
        trained = dict.fromkeys(whole.trained, step)
        run.store.settle(trained=trained, skipped=whole.skipped, calls=calls)
    outcomes = run.store.outcomes(run.run_id, step=step, purpose=Purpose.TRAIN)
    report_step_failures(run, step, taken.rollouts, calls, whole, outcomes)
    row = step_row(step, taken, calls, batches, passes, outcomes, run.records.staleness)
    row |= run.scorer.take_metrics()
    row |= run.prefix_hits.metrics(run.session.gateway.health())
    row |= {"learning_rate": run.learning_rate(step), **seconds_row(timer), **seconds_row(parts)}
    run.guards.after_step(row, calls, taken.rollouts, whole.rewards)
    with timer("checkpoint"):
        token_records.save_step(run.folder, step, calls, batches.by_adapter.values())
        written = run.checkpoint(step, row)
        run.save_versions(step)  # while the checkpoint is written
        run.result(written)
    with timer("publish"):
        run.load_published(step)
    row |= seconds_row(timer)
    run.metrics_log.log(step, row)
    run.timer.add(timer)
    run.session.tell_lost_spans(run.display.note)
    run.display.step(row, run.store.accounting(run.run_id))


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


class TrainingRun:
    """A run, fresh or resumed; constructing it loads the base model.

    Raises:
        RunError: the model cannot be trained; see ``create_clients``.
    """

    def __init__(
        self,
        config: TrainConfig,
        tasks: Sequence[Json],
        eval_tasks: Sequence[Json],
        session: Session,
        display: TrainDisplay,
        rewards: Sequence[RewardFunction] = (),
    ) -> None:
        self.config, self.session, self.display = config, session, display
        self.folder, self.store, self.run_id = session.folder, session.store, session.run_id
        self.timer = PhaseTimer()
        self.steps = steps_of(config, tasks)
        if note := greedy_note(config.evaluation.samples, config.evaluation.temperature):
            display.note(note)
        task_ids = self.store.add_tasks(self.run_id, "train", tasks)
        self.eval_ids = self.store.add_tasks(self.run_id, "eval", eval_tasks)
        self.metrics_log = MetricsLog(config, self.folder, self.store, self.run_id, display.note)
        self._backend = create_clients(config, self.folder.root, display.note)
        self.clients = self._backend.clients
        max_length = config.learning.max_length or self._backend.context_length
        self.scorer = session.scorer(rewards, display.note)
        self.records = StepRecords(config, self.store, max_length)
        self.queue = RolloutQueue(
            session, config, task_ids, steps=self.steps, staleness=self.records.staleness,
            teaches=self.records.teaches, scorer=self.scorer,
        )  # fmt: skip
        self.notes = StepNotes(display.note)
        self.prefix_hits = PrefixHits()
        self.thought_marks = thought_marks(Renderer(self._backend.tokenizer))
        self.saved: dict[str, str] = {}  # path of each adapter's newest version
        self.guards = Guards(
            config, self.folder, self.store, self.run_id, started=session.started,
            learning_rate=self._backend.peak_learning_rate, eval_tasks=len(eval_tasks),
            note=display.note,
        )  # fmt: skip
        session.watch = self.guards.budget.watch

    # ---- within a step

    def learning_rate(self, step: int) -> float:
        learning = self.config.learning
        factor = schedule_factor(learning.schedule, step, self.steps, learning.warmup_steps)
        return self._backend.peak_learning_rate * factor

    def result(self, asked: APIFuture[T]) -> T:
        """Return what a client computes; leases and runners are maintained meanwhile.

        Raises:
            RunError: the backend's service failed.
        """
        try:
            return self.session.result(asked.future())
        except self._backend.failures as error:
            raise RunError(
                f"{self.config.run.backend}: {error}\nThe checkpoints are kept: continue with "
                f"--resume {self.folder.root}"
            ) from error

    def save_versions(self, step: int) -> None:
        """Save each adapter as version ``step``."""
        for name, client in self.clients.items():
            adapter = self.folder.adapter_version(name, step)
            self.saved[name] = self.result(client.save_weights_for_sampler(adapter)).path
            self.folder.share_adapter(adapter, self.config.run.adapter_readers)

    def load_published(self, step: int) -> None:
        """Make the saved adapters those that answer. This empties the sampler's prefix cache."""
        for name, path in self.saved.items():
            self.session.publish(name, step, path, step, self.display.note)
        self.prune()

    def prune(self) -> None:
        """Delete old logs and, if the settings say so, old versions of the adapters."""
        how = self.config.run
        # What prints into a deleted file is lost, and is bounded by nothing.
        unfinished = self.store.unfinished_ids(self.run_id, Purpose.TRAIN)
        self.folder.prune_logs(how.keep_logs, unfinished)
        rollouts = self.config.rollouts.batch_size * self.config.rollouts.group_size
        token_records.prune(self.folder, -(-how.keep_logs // rollouts))
        if how.keep_adapters is not None:
            # Rollouts that run ahead, and the versions that vLLM loads again when it recovers.
            keep = how.keep_adapters + self.config.rollouts.max_staleness
            self.folder.prune_adapters(keep, held_out_of(self.folder))

    # ---- across crashes

    def checkpoint(self, step: int, row: Mapping[str, Any]) -> APIFuture[SavedPath]:
        """Begin to write a checkpoint; training may go on meanwhile."""
        # Before the checkpoint: a store without it has lost its last writes, see ``restore``.
        self.store.log_metrics(self.run_id, step, {"calls": row["calls"]})
        cores = self.config.model.cores
        meta = {
            "run_id": self.run_id,
            "cores": cores,
            "rollouts": self.queue.state(),
            "row": strict(row),
        }
        return self._backend.service.save_checkpoint(
            self.folder.checkpoints, step, meta=meta, keep=self.config.run.keep_checkpoints,
            keep_step=self.guards.best,
        )  # fmt: skip

    def restore(self) -> int:
        """Go back to the newest whole checkpoint, undo what came after it, and return its step.

        A machine that dies may lose the last writes of its store. Checkpoints of steps that the
        store does not know are passed over: these steps are made again.

        Raises:
            RunError: the run has made steps, and none of their checkpoints can be resumed.
        """
        rows = self.store.metrics(self.run_id)
        known = max((at for at, row in rows.items() if "calls" in row or REWARD in row), default=0)
        restored = self._backend.service.restore_checkpoint(self.folder.checkpoints, known)
        found = self.result(restored)
        step, meta = (found.checkpoint.step, found.checkpoint.meta) if found.checkpoint else (0, {})
        faults = {path.name: fault for path, fault in found.torn.items()}
        of_checkpoints = [int(name.rpartition("-")[2]) for name in faults]
        logged = [row["step"] for row in self.folder.read_metrics() if REWARD in row]
        made = [*of_checkpoints, *logged]
        if found.checkpoint is not None:
            self.queue.restore(meta["rollouts"])
        elif made:
            why = "; ".join(f"{name}: {fault}" for name, fault in faults.items()) or "it is empty"
            raise RunError(
                f"{self.folder.root} had come to step {max(made)}, but no checkpoint in "
                f"{self.folder.checkpoints} can be resumed ({why}). The run would begin at step 0 "
                "again, over that history. Bring a checkpoint back, or the store's files with its "
                "-wal, or start a new run, under another --name"
            )
        if any(at > known for at in of_checkpoints):
            self.display.note(
                f"the store has lost its last writes: it knows the run up to step {known}; later "
                "steps are made again"
            )
        for name, fault in faults.items():
            self.display.note(f"checkpoint {name} was passed over: {fault}")
        # An evaluation of this step that was killed is made again.
        evaluated = step in held_out_of(self.folder)
        self.store.cancel(self.run_id, "the run was resumed", after_step=step, evaluated=evaluated)
        self.store.supersede(self.run_id, after_step=step)
        self.store.drop_adapters_after(self.run_id, step)
        token_records.drop_after(self.folder, step)
        self.metrics_log.go_back(step, meta.get("row"))
        if max(made, default=step) > step:
            self.metrics_log.log(step, {"step": step, "went_back_from": max(made)})
        return step

    def give_up_after(self, step: int) -> None:
        """Cancel the rollouts after ``step``; a resumed run makes them again."""
        evaluated = step in self.guards.held_out
        self.store.cancel(self.run_id, "a budget is spent", after_step=step, evaluated=evaluated)
        self.store.supersede(self.run_id, after_step=step)

    # ---- begin and end

    def begin(self, step: int) -> None:
        """Continue after ``step``; return when the gateway answers."""
        if step:
            verify_in_background(self.store, self.run_id, self.display.note)
        self.display.begin(self.steps, step)
        self.display.watch(self.store, self.run_id)
        health = self.session.wait_ready(self.display.note)
        self.guards.begin(step)
        if why := health["sampler"].get("why_not_lean"):
            self.display.note(f"sampled by the model's own modules, not by the lean decoder: {why}")

    def finish(self, step: int, ended: Ending | None) -> Summary:
        self.session.tell_lost_spans(self.display.note, last=True)
        self.queue.close()
        self.scorer.close()
        self.session.pool.begin_stop()  # runners end while the learning curve is drawn
        with self.timer("picture"):
            summary = summarize(self, step, ended)
        self.store.end_run(self.run_id, "finished")
        self.metrics_log.close()
        self._backend.close()
        return summary
