"""A training run: its parts, how it begins, checkpoints, resumes and ends. The loop is ``loop``'s.

The checkpoint is the last word on a step. Verdicts are written before it, the step's row of metrics
is in it, and the new adapter is published after it. A resumed run undoes what came after its newest
checkpoint (``TrainingRun.restore``). The row is logged last, with the seconds that all of this
took; a run that died before logs the checkpoint's row when it is resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from agentrl.config.checks import greedy_note
from agentrl.config.commands import TrainConfig
from agentrl.config.loading import steps_of
from agentrl.console.live import TrainDisplay
from agentrl.findings import StepNotes, thought_marks
from agentrl.guards.run_guards import Guards
from agentrl.runs import token_records
from agentrl.runs.best_adapter import held_out_of
from agentrl.runs.folder import strict
from agentrl.runs.metric_names import REWARD, WENT_BACK
from agentrl.runs.summary import Ending, Summary
from agentrl.scoring.functions import RewardFunction
from agentrl.timing import PhaseTimer
from agentrl.training.metrics import PrefixHits
from agentrl.training.queue.curriculum import Curriculum
from agentrl.training.queue.rollout_queue import RolloutQueue
from agentrl.training.resume import tell_other_counts, verify_in_background
from agentrl.training.session import RunError, Session
from agentrl.training.setup.clients import create_clients
from agentrl.training.setup.own_functions import add_own_loss
from agentrl.training.step_records import StepRecords
from agentrl.training.summarize import summarize
from agentrl.training.tracking.metrics_log import MetricsLog
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Json, Purpose
from agentrl_trainer.client import APIFuture
from agentrl_trainer.client.types import SavedPath
from agentrl_trainer.learner.optimizers import schedule_factor

T = TypeVar("T")


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
        if config.rollouts.runners < (gateways := config.gateway_count):
            display.note(f"{gateways} gateways: some have no runner; see rollouts.runners")
        if note := greedy_note(config.evaluation.samples, config.evaluation.temperature):
            display.note(note)
        add_own_loss(config)
        task_ids = self.store.add_tasks(self.run_id, "train", tasks)
        self.eval_ids = self.store.add_tasks(self.run_id, "eval", eval_tasks)
        self.metrics_log = MetricsLog(config, self.folder, self.store, self.run_id, display.note)
        self._backend = create_clients(config, self.folder.root, display.note)
        self.clients = self._backend.clients
        max_length = config.learning.max_length or self._backend.context_length
        self.scorer = session.scorer(rewards, display.note)
        self.records = StepRecords(config, self.store, max_length)
        self.queue = RolloutQueue(
            session, config, task_ids, Curriculum(config, tasks), steps=self.steps,
            staleness=self.records.staleness, teaches=self.records.teaches, scorer=self.scorer,
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
        session.watch = self._watch

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
        with self._failures_end_the_run():
            return self.session.result(asked.future())

    def _watch(self) -> None:
        """Give up the rollouts under way if no step can follow.

        Raises:
            BudgetSpentError: a limit is exceeded.
            RunError: a trainer has ended.
        """
        self.guards.budget.watch()
        with self._failures_end_the_run():
            self._backend.service.check()

    @contextlib.contextmanager
    def _failures_end_the_run(self) -> Iterator[None]:
        try:
            yield
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

    def publish(self, step: int) -> None:
        """Make the saved adapters those that answer. This empties the sampler's prefix cache."""
        if self.config.sampler.vllm.sleep:
            torch.cuda.empty_cache()  # vLLM wakes up, and needs what the update took
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
            tell_other_counts(step, meta, self.config, self.display.note)
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
            self.metrics_log.log(step, {"step": step, WENT_BACK: max(made)})
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
        self.guards.budget.end()
        self.queue.close()
        self.scorer.close()
        self.session.pool.begin_stop()  # runners end while the learning curve is drawn
        with self.timer("picture"):
            summary = summarize(self, step, ended)
        if ended is None or not ended.rolls_back:  # else runners elsewhere would leave
            self.store.end_run(self.run_id, "finished")
        self.metrics_log.close()
        self._backend.close()
        return summary
