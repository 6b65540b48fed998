"""One run of ``agentrl train`` with all its parts, and how it begins, is kept, and ends.

Knows what is wired to what, and what a checkpoint holds besides weights. What happens in a step,
and in which order, is ``agentrl.training.loop``'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config.commands import TrainConfig
from agentrl.config.tasks import steps_of
from agentrl.console.live import TrainDisplay
from agentrl.runs.folder import strict
from agentrl.runs.metric_names import REWARD
from agentrl.runs.summary import Summary, summarise
from agentrl.timing import PhaseTimer
from agentrl.training.batch import StepRecords, adapter_rules
from agentrl.training.evaluation import HeldOut, greedy_note
from agentrl.training.metrics import step_row
from agentrl.training.metrics_log import Journal
from agentrl.training.rollout_queue import RolloutStream, StepRollouts
from agentrl.training.session import RunError, Session
from agentrl.training.step_notes import note_failures
from agentrl.training.trained import load_trained
from agentrl_tracer.schemas import Call, Json, Purpose
from agentrl_trainer.client import APIFuture
from agentrl_trainer.data.adapters import AdapterBatches
from agentrl_trainer.learner.learner import StepStats
from agentrl_trainer.learner.schedules import schedule_factor

T = TypeVar("T")


class TrainingRun:
    """Fresh or resumed; the base model is loaded when it is made.

    Raises:
        RunError: the model cannot be trained; see ``load_trained``.
    """

    def __init__(
        self,
        config: TrainConfig,
        tasks: Sequence[Json],
        eval_tasks: Sequence[Json],
        session: Session,
        display: TrainDisplay,
    ) -> None:
        self.config, self.session, self.display = config, session, display
        self.folder, self.store, self.run_id = session.folder, session.store, session.run_id
        self.clock = PhaseTimer()
        self.steps = steps_of(config, tasks)
        if note := greedy_note(config.evaluation.samples, config.evaluation.temperature):
            display.note(note)
        task_ids = self.store.add_tasks(self.run_id, "train", tasks)
        self._eval_ids = self.store.add_tasks(self.run_id, "eval", eval_tasks)
        self.journal = Journal(config, self.folder, self.store, self.run_id, display.note)
        self._stream = RolloutStream(
            session,
            task_ids,
            steps=self.steps,
            batch_size=config.rollouts.batch_size,
            group_size=config.rollouts.group_size,
            seed=config.run.seed,
            max_staleness=config.rollouts.max_staleness,
            never_older=config.rollouts.stale in (None, "wait"),
            resample=config.rollouts.resample_zero_variance,
            teaches=lambda step, group: self.records.teach(step, group),
        )
        self.held_out = HeldOut(
            config,
            self._eval_ids,
            session=session,
            display=display,
            journal=self.journal,
            clock=self.clock,
            steps=self.steps,
            swap=self.swap,
        )
        self._rules = adapter_rules(config)
        self._trained = load_trained(config, self._rules, self.folder.root, display.note)
        self.clients = self._trained.clients
        """Training clients by adapter."""
        max_length = config.learning.max_length or self._trained.context_length
        self.records = StepRecords(config, self.store, self._rules, max_length)
        self._saved: dict[str, str] = {}  # by adapter: where its newest version is

    # ---- of a step

    def sample(self, step: int) -> StepRollouts:
        """Waits for the step's groups of rollouts; those of later steps may be under way then."""
        taken = self._stream.take(
            step, lambda done, total: self.display.phase("rollouts", done, total)
        )
        self.display.phase("learning", ahead=self._stream.under_way if taken.ahead else None)
        return taken

    def learning_rate(self, step: int) -> float:
        config = self.config
        factor = schedule_factor(
            config.learning.schedule, step, self.steps, config.learning.warmup_steps
        )
        return self._trained.peak_learning_rate * factor

    def result(self, asked: APIFuture[T]) -> T:
        """What a client computes; runners and leases are looked after meanwhile: rollouts of the
        next steps may be under way.

        Raises:
            RunError: the service of the backend failed.
        """
        try:
            return self.session.upkeep.result(asked.future())
        except self._trained.failures as error:
            raise RunError(
                f"{self.config.run.backend}: {error}\nWhat was checkpointed is there: go on with "
                f"--resume {self.folder.root}"
            ) from error

    def row(
        self,
        step: int,
        *,
        taken: StepRollouts,
        calls: Sequence[Call],
        batches: AdapterBatches,
        passes: Mapping[str, Sequence[StepStats]],
        seconds: Mapping[str, float],
    ) -> dict[str, Any]:
        """The step in numbers. Tells what went wrong in it.

        Raises:
            RunError: every rollout of the step failed.
        """
        outcomes = self.store.outcomes(self.run_id, step=step, purpose=Purpose.TRAIN)
        note_failures(
            taken.rollouts,
            batches.whole(),
            outcomes,
            note=self.display.note,
            logs=self.folder.logs,
        )
        return step_row(
            step,
            taken=taken,
            calls=calls,
            batches=batches,
            passes=passes,
            outcomes=outcomes,
            seconds=seconds,
            learning_rate=self.learning_rate(step),
            max_staleness=self.config.rollouts.max_staleness,
        )

    def publish(self, step: int, saved: Mapping[str, str]) -> None:
        """Makes adapters the ones that answer, as version ``step``.

        Args:
            saved: by adapter, where ``save_weights_for_sampler`` put it.
        """
        self._saved = dict(saved)
        self.swap(step)

    def swap(self, step: int) -> None:
        """Once more, with an empty cache."""
        for name, path in self._saved.items():
            self.session.publish(name, step, path, step, self.display.note)

    # ---- across crashes

    def checkpoint(self, step: int, row: Mapping[str, Any]) -> None:
        meta = {"run_id": self.run_id, "rollouts": self._stream.state(), "row": strict(row)}
        keep = self.config.run.keep_checkpoints
        saved = self._trained.service.save_checkpoint(
            self.folder.checkpoints, step, meta=meta, keep=keep
        )
        self.result(saved)

    def restore(self) -> int:
        """Goes back to the newest whole checkpoint, if there is one, and undoes what came after;
        returns its step.

        Raises:
            RunError: the run has made steps, and no checkpoint of them is whole.
        """
        found = self.result(self._trained.service.restore_checkpoint(self.folder.checkpoints))
        if found.step is None:
            self._check_there_were_none(found.torn)
        for torn, fault in found.torn.items():
            self.display.note(f"checkpoint {torn.name} was passed over: {fault}")
        step = found.step or 0
        self._stream.restore(step, found.meta.get("rollouts"))
        # What a killed evaluation had done of this step is made again.
        evaluated = step in self.journal.held_out()
        why = "the run was resumed"
        self.store.cancel(self.run_id, why, after_step=step, evaluated=evaluated)
        self.store.supersede(self.run_id, after_step=step)
        self.store.drop_adapters_after(self.run_id, step)
        self.journal.go_back(step, found.meta.get("row"))
        return step

    def _check_there_were_none(self, torn: Mapping[Path, str]) -> None:
        """A step's row is logged after its checkpoint is saved."""
        made = [row["step"] for row in self.journal.rows() if REWARD in row]
        made += [int(path.name.rpartition("-")[2]) for path in torn]
        if not made:
            return
        faults = "; ".join(f"{path.name}: {fault}" for path, fault in torn.items())
        raise RunError(
            f"{self.folder.root} had come to step {max(made)}, but nothing in "
            f"{self.folder.checkpoints} can be gone on from ({faults or 'it is empty'}). It would "
            "begin at step 0 again, over that history. Bring a checkpoint back, or start a new "
            "run, under another --name"
        )

    # ---- beginning and end

    def wait_ready(self, step: int) -> None:
        """Returns when the gateway answers."""
        self.display.begin(self.steps, step)
        self.session.wait_ready(self.display.note)
        if why := self.session.why_not_lean:
            self.display.note(f"sampled by the model's own modules, not by the lean decoder: {why}")

    def started(self) -> None:
        self.clock.spent["start"] = time.perf_counter() - self.session.started

    def finish(self, step: int) -> Summary:
        self._stream.close()
        self.session.begin_stop()  # it takes a moment, in which the picture is drawn
        with self.clock("picture"):
            summary = summarise(
                self.folder,
                self.store,
                self.run_id,
                step,
                model=self.config.model.name,
                adapters=self._rules,
                eval_ids=self._eval_ids,
                seconds=self.clock.spent,
            )
        self.store.end_run(self.run_id, "finished")
        self.journal.close()
        self._trained.close()
        return summary
