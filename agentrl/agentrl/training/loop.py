"""The training loop: roll out, learn, publish, evaluate, until the steps are done.

``Trainer`` has a method for each stage; a subclass may replace any. It runs over the client API,
whose backends are this machine, verl and Tinker. ``run.TrainingRun`` wires the parts of a run, and
checkpoints and resumes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.guards.budget import BudgetSpentError
from agentrl.process_privacy import private_files
from agentrl.runs import token_records
from agentrl.runs.summary import Ending, Summary
from agentrl.timing import PhaseTimer
from agentrl.training.evaluation import evaluate_if_due
from agentrl.training.metrics import report_step_failures, seconds_row, step_row
from agentrl.training.queue.rollout_queue import StepRollouts
from agentrl.training.run import TrainingRun as TrainingRun
from agentrl.training.session import RunError
from agentrl.training.setup.own_functions import own_estimator
from agentrl.training.update import update
from agentrl_tracer.schemas import Call, Purpose, Rollout
from agentrl_trainer.data.adapter_split import AdapterBatches
from agentrl_trainer.data.batch_assembly import StepBatch
from agentrl_trainer.data.members import Member
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.trajectories import TrajectorySet, build_trajectories
from agentrl_trainer.learner.step_stats import StepStats


class Trainer(TrainingRun):
    """The training of a run, step by step. ``agentrl.train`` makes one; so does ``agentrl train``.

    Each stage is a method. Override one to replace it, and call ``super()`` to add to it:

        sample        queue → the finished groups of rollouts that a step trains on
        assemble      store → trajectories → groups → advantages → each adapter's rows, and why the
                      other calls do not train
        trajectories  the calls of one group member → the token paths that train
        advantages    the rewards of one group → the advantages of its members
        update        an adapter's rows → optimizer steps
        publish       the new adapters → the sampler
        evaluate      held-out tasks → accuracy

    Attributes:
        config: the settings, ``TrainConfig``.
        store: what was recorded, ``agentrl.Store``.
        clients: the ``agentrl.TrainingClient`` of each adapter, by name.
        display: shows progress; ``display.note(text)`` adds a line.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        overridden = type(self).advantages is not Trainer.advantages
        own = self.advantages if overridden else own_estimator(self.config)
        if overridden and self.config.algorithm.estimator == "gae":
            raise RunError(
                f"{type(self).__name__}.advantages: takes the place of the estimator; gae has a "
                "value function beside it: leave algorithm.estimator out"
            )
        self.records.use(own, self.trajectories)

    @private_files()
    def train(self) -> Summary:
        """Train to the end, from the newest checkpoint if the run has one.

        Raises:
            RunError: nothing can be rolled out, for a reason the message gives.
        """
        try:
            step = self.restore()
            if step >= self.steps:
                self.display.note(f"step {step} of {self.steps} is done; a larger --steps goes on")
            self.begin(step)
            self.save_versions(step)
            self.publish(step)
            self.session.add_start(self.timer)
            ended: Ending | None = None
            try:
                self.evaluate(step)
                while step < self.steps and (ended := self.why_end()) is None:
                    self.train_step(step + 1)
                    step += 1
                    self.evaluate(step)
                ended = ended or self.guards.why_collapsed()
                if ended and ended.evaluates and step not in self.guards.held_out:
                    self.evaluate(step, last=True)
            except BudgetSpentError as spent:
                ended = Ending(*spent.args)
                self.give_up_after(step)
            return self.finish(step, ended)
        except KeyboardInterrupt:
            self.metrics_log.close(killed=True)  # the process ends without its trackers' own hooks
            with self.session.farewell():
                self.guards.budget.end()
            raise

    def why_end(self) -> Ending | None:
        """Tell why the run ends before its next step; None: it goes on."""
        return self.guards.why_end() or self.queue.curriculum.why_end()

    def train_step(self, step: int) -> None:
        """Sample groups of rollouts, compute advantages, update and publish each adapter."""
        timer, parts = PhaseTimer(), PhaseTimer()
        with timer("rollouts"):
            taken = self.sample(step)
        ahead = self.queue.under_way if taken.metrics["groups/ahead"] else None
        self.display.phase("learning", ahead=ahead)
        if not ahead:
            self.session.gateways.drop_prefixes()
        with timer("update"):
            calls, batches = self.assemble(step, taken.rollouts)
            passes = {
                name: self.update(step, name, batch, parts)
                for name, batch in batches.by_adapter.items()
            }
            whole = batches.whole()
            self._check_verdicts(step, calls, whole)
            trained = dict.fromkeys(whole.trained, step)
            self.store.settle(trained=trained, skipped=whole.skipped, calls=calls)
            self.queue.curriculum.note(taken.rollouts, whole.rewards)
        outcomes = self.store.outcomes(self.run_id, step=step, purpose=Purpose.TRAIN)
        report_step_failures(self, step, taken.rollouts, calls, whole, outcomes)
        row = step_row(step, taken, calls, batches, passes, outcomes, self.records.staleness)
        row |= self.queue.curriculum.metrics()
        row |= self.scorer.take_metrics()
        row |= self.prefix_hits.metrics(self.session.gateways.sampler_healths())
        row |= {
            "learning_rate": self.learning_rate(step),
            **seconds_row(timer),
            **seconds_row(parts),
        }
        self.guards.after_step(row, calls, taken.rollouts, whole.rewards)
        with timer("checkpoint"):
            token_records.save_step(self.folder, step, calls, batches.by_adapter.values())
            written = self.checkpoint(step, row)
            self.save_versions(step)  # while the checkpoint is written
            self.result(written)
        with timer("publish"):
            self.publish(step)
        row |= seconds_row(timer)
        self.metrics_log.log(step, row)
        self.timer.add(timer)
        self.session.tell_lost_spans(self.display.note)
        self.display.step(row, self.store.accounting(self.run_id))

    def _check_verdicts(self, step: int, calls: Sequence[Call], whole: StepBatch) -> None:
        if lost := {call.id for call in calls} - whole.trained - whole.skipped.keys():
            raise RunError(
                f"{type(self).__name__}: {len(lost)} calls of step {step} neither train nor have a "
                "reason; trajectories and assemble must give each call one of both"
            )

    def sample(self, step: int) -> StepRollouts:
        """Wait for the groups of a step, all of whose rollouts have ended."""
        return self.queue.take(step, self.display.phase)

    def assemble(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Call], AdapterBatches]:
        """Return the rollouts' calls, and what each adapter learns from them.

        Every call is in ``trained`` of one batch, or has its reason in ``skipped``.
        """
        return self.records.assemble(step, rollouts)

    def trajectories(self, calls: Sequence[Call], rules: SkipRules) -> TrajectorySet:
        """Cut the calls of a member into the token paths that train; give the others a reason."""
        return build_trajectories(calls, rules)

    def advantages(
        self, rewards: list[float], members: list[Member]
    ) -> Sequence[float] | Sequence[Sequence[float]]:
        """Compute the advantages of a group's members, in the place of ``algorithm.estimator``.

        Args:
            rewards: what each member earned.
            members: those with a reward: ``rollout``, ``agent``, ``turns`` (the calls that train),
                ``calls`` (all of its attempt) and ``rewards``.

        Returns:
            A number for each member, or a list with one for each of its turns.
        """
        raise RunError(
            f"{type(self).__name__}.advantages: there is nothing below it to call; "
            "algorithm.estimator decides where no subclass has this method"
        )

    def evaluate(self, step: int, *, last: bool = False) -> None:
        """Run the held-out tasks after ``step``, if they are due; ``last``: the run ends here."""
        evaluate_if_due(self, step, last=last)

    def update(self, step: int, name: str, batch: StepBatch, timer: PhaseTimer) -> list[StepStats]:
        """Update one adapter from ``batch.rows``; return the statistics of each epoch.

        Returns nothing for a batch from which nothing was learned; ``batch.refuse`` then says why.
        """
        return update(self, step, name, batch, timer)
