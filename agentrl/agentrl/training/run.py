"""Wire the parts of a training run, and begin, checkpoint, resume and end it.

What happens in a step, and in which order, is in ``agentrl.training.loop``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agentrl.config.algorithm import step_settings
from agentrl.config.checks import greedy_note
from agentrl.config.commands import TrainConfig
from agentrl.config.loading import steps_of
from agentrl.console.live import TrainDisplay
from agentrl.runs.folder import strict
from agentrl.runs.metric_names import REWARD
from agentrl.runs.summary import Summary, summarize
from agentrl.timing import PhaseTimer
from agentrl.training.clients import create_clients
from agentrl.training.metrics_log import MetricsLog
from agentrl.training.rollout_queue import RolloutQueue
from agentrl.training.session import RunError, Session
from agentrl.training.staleness import StalenessLimit
from agentrl_tracer.schemas import Call, Json, Rollout, SkipReason
from agentrl_tracer.store import Store
from agentrl_trainer.client import APIFuture
from agentrl_trainer.data.adapter_split import AdapterBatches, AdapterRule, assemble_adapters
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
        self.records = StepRecords(config, self.store, max_length)
        self.queue = RolloutQueue(
            session, config, task_ids, steps=self.steps, staleness=self.records.staleness,
            teaches=self.records.teaches,
        )  # fmt: skip
        self.saved: dict[str, str] = {}  # path of each adapter's newest version

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

    def load_published(self, step: int) -> None:
        """Load the saved adapters into the sampler, which empties its prefix cache."""
        for name, path in self.saved.items():
            self.session.publish(name, step, path, step, self.display.note)

    # ---- across crashes

    def checkpoint(self, step: int, row: Mapping[str, Any]) -> None:
        meta = {"run_id": self.run_id, "rollouts": self.queue.state(), "row": strict(row)}
        saved = self._backend.service.save_checkpoint(
            self.folder.checkpoints, step, meta=meta, keep=self.config.run.keep_checkpoints
        )
        self.result(saved)

    def restore(self) -> int:
        """Go back to the newest whole checkpoint, undo what came after it, and return its step.

        Raises:
            RunError: the run has made steps, and none of their checkpoints is whole.
        """
        found = self.result(self._backend.service.restore_checkpoint(self.folder.checkpoints))
        step, meta = (found.checkpoint.step, found.checkpoint.meta) if found.checkpoint else (0, {})
        faults = {path.name: fault for path, fault in found.torn.items()}
        made = [int(name.rpartition("-")[2]) for name in faults]
        made += [row["step"] for row in self.folder.read_metrics() if REWARD in row]
        if found.checkpoint is not None:
            self.queue.restore(meta["rollouts"])
        elif made:
            why = "; ".join(f"{name}: {fault}" for name, fault in faults.items()) or "it is empty"
            raise RunError(
                f"{self.folder.root} had come to step {max(made)}, but no checkpoint in "
                f"{self.folder.checkpoints} can be resumed ({why}). The run would begin at step 0 "
                "again, over that history. Bring a checkpoint back, or start a new run, under "
                "another --name"
            )
        for name, fault in faults.items():
            self.display.note(f"checkpoint {name} was passed over: {fault}")
        # An evaluation of this step that was killed is made again.
        evaluated = step in self.metrics_log.held_out()
        why = "the run was resumed"
        self.store.cancel(self.run_id, why, after_step=step, evaluated=evaluated)
        self.store.supersede(self.run_id, after_step=step)
        self.store.drop_adapters_after(self.run_id, step)
        self.metrics_log.go_back(step, meta.get("row"))
        return step

    # ---- begin and end

    def begin(self, step: int) -> None:
        """Continue after ``step``; return when the gateway answers."""
        self.display.begin(self.steps, step)
        health = self.session.wait_ready(self.display.note)
        if why := health["sampler"].get("why_not_lean"):
            self.display.note(f"sampled by the model's own modules, not by the lean decoder: {why}")

    def finish(self, step: int) -> Summary:
        self.queue.close()
        self.session.pool.begin_stop()  # runners end while the learning curve is drawn
        with self.timer("picture"):
            summary = summarize(self, step)
        self.store.end_run(self.run_id, "finished")
        self.metrics_log.close()
        self._backend.close()
        return summary


class StepRecords:
    """Reads a step's calls and rewards, and assembles what each adapter learns from them.

    Args:
        max_length: tokens of the longest trajectory to train on.
    """

    def __init__(self, config: TrainConfig, store: Store, max_length: int) -> None:
        how = config.rollouts
        self.staleness = StalenessLimit(how.max_staleness, how.stale or "wait")
        self._store = store
        self._rules = {
            name: AdapterRule(one.agents, one.rewards or None)
            for name, one in config.trained.items()
        }
        self._settings = step_settings(config, adapters=frozenset(), max_length=max_length)

    def assemble(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Call], AdapterBatches]:
        """Return the rollouts' calls, and the batch of each adapter.

        Raises:
            RunError: the rewards do not fit the advantage estimator.
        """
        ids = [rollout.id for rollout in rollouts]
        calls, rewards = self._store.calls(rollout_ids=ids), self._store.rewards(ids)
        settings = replace(self._settings, oldest_version=self.staleness.oldest_version(step))
        try:
            return calls, assemble_adapters(rollouts, calls, rewards, settings, self._rules)
        except ValueError as error:
            raise RunError(f"the step's records cannot be learned from: {error}") from error

    def teaches(self, step: int, group: Sequence[Rollout]) -> bool:
        """Tell whether a finished group fills a step.

        Only a group without variance of rewards does not: one that fails for another reason would
        fail with another task, too.
        """
        batch = self.assemble(step, group)[1].whole()
        return bool(batch.trained) or SkipReason.ZERO_ADVANTAGE not in batch.skipped.values()
