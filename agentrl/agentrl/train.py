"""``agentrl train``: roll out, learn, publish, evaluate, until the steps are done.

The loop is ``Training.run`` and ``Training._step``; read those two. What must survive a crash is
ordered so that the checkpoint is the last word on a step: verdicts are written before it, its row
of metrics is in it, the new adapter is published after it, and a resumed run undoes what came after
the newest one. The row is logged last, because it says how long all of that took; where a run died
before, the checkpoint's is logged when it is resumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from agentrl.algorithm import REFERENCE, step_settings, update_settings, value_params
from agentrl.config import TrainConfig
from agentrl.display import TrainDisplay
from agentrl.metrics import HELD_OUT, HELD_OUT_REWARD, REWARD
from agentrl.rollout_stream import (
    RolloutStream,
)
from agentrl.session import (
    RunError,
    Session,
    failures,
    outcomes_in_words,
    plan_evaluation,
)
from agentrl.step_row import finite_numbers, seconds_row, step_row
from agentrl.summary import Summary, summarise
from agentrl.trackers import MAY_HOLD_SECRETS, Trackers
from agentrl_tracer.schemas import (
    Call,
    Json,
    Outcomes,
    Purpose,
    Rollout,
    SkipReason,
)
from agentrl_trainer.adapters import AdapterBatches, AdapterRule, assemble_adapters
from agentrl_trainer.client import AdamParams, APIFuture, ServiceClient, TrainingClient
from agentrl_trainer.learner import StepStats
from agentrl_trainer.model import BaseModel
from agentrl_trainer.rewards import rollout_rewards
from agentrl_trainer.schedules import default_learning_rate, schedule_factor
from agentrl_trainer.step import StepBatch
from agentrl_trainer.update import prepare

T = TypeVar("T")


@dataclass(slots=True)
class Clock:
    """Wall-clock seconds by what they went into."""

    spent: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started

    def add(self, other: Clock) -> None:
        for name, seconds in other.spent.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds


class Training:
    """One run of ``agentrl train``, fresh or resumed."""

    def __init__(
        self,
        config: TrainConfig,
        tasks: Sequence[Json],
        eval_tasks: Sequence[Json],
        session: Session,
        display: TrainDisplay,
    ) -> None:
        self.config = config
        self.session = session
        self.display = display
        self.folder = session.folder
        self.store = session.store
        self.run_id = session.run_id
        self.clock = Clock()
        self.adapters = {
            name: AdapterRule(
                frozenset(one.agents) if one.agents else None,
                frozenset(one.rewards) if one.rewards else None,
            )
            for name, one in config.trained.items()
        }
        self.tasks = tasks
        self.steps = config.steps or steps_of_one_epoch(len(tasks), config.batch_size)
        self.task_ids = self.store.add_tasks(self.run_id, "train", tasks)
        self.eval_ids = self.store.add_tasks(self.run_id, "eval", eval_tasks)
        self.trackers = Trackers(
            config.trackers,
            self.folder,
            config.model_dump(mode="json", exclude=set(MAY_HOLD_SECRETS)),
            display.note,
        )
        self.stream = RolloutStream(
            session,
            self.task_ids,
            steps=self.steps,
            batch_size=config.batch_size,
            group_size=config.group_size,
            seed=config.seed,
            max_staleness=config.max_staleness,
            never_older=config.stale == "wait",
            resample=config.resample_zero_variance,
            teaches=self._teaches,
        )
        self.base: BaseModel
        self.service: ServiceClient
        self.clients: dict[str, TrainingClient]

    def run(self) -> Summary:
        """Trains to the end; returns what to show.

        Raises:
            RunError: nothing can be rolled out, for a reason the message gives.
        """
        self._load_model()
        step = self._restore()
        self.display.begin(self.steps, step)
        self.session.wait_ready(self.display.note)
        if why := self.session.why_not_lean:
            self.display.note(f"sampled by the model's own modules, not by the lean decoder: {why}")
        self._publish(step)
        self.clock.spent["start"] = time.perf_counter() - self.session.started
        self._evaluate_if_due(step)
        while step < self.steps and not self._reached_goal():
            step += 1
            self._step(step)
            self._evaluate_if_due(step)
        self.stream.close()
        self.session.begin_stop()  # it takes a moment, in which the picture is drawn
        with self.clock("picture"):
            summary = summarise(
                self.folder,
                self.store,
                self.run_id,
                step,
                model=self.config.model,
                adapters=self.adapters,
                eval_ids=self.eval_ids,
                seconds=self.clock.spent,
            )
        self.store.end_run(self.run_id, "finished")
        self.trackers.close()
        self.service.close()
        return summary

    # ---- one step

    def _step(self, step: int) -> None:
        clock = Clock()
        with clock("rollouts"):
            taken = self.stream.take(
                step, lambda done, total: self.display.phase("rollouts", done, total)
            )
        rollouts = taken.rollouts
        self.display.phase("learning", ahead=self.stream.under_way if taken.ahead else None)
        parts = Clock()
        with clock("update"):
            calls, batches = self._collect(step, rollouts)
            passes = {
                name: self._learn(step, batch, parts) for name, batch in batches.by_adapter.items()
            }
            batch = batches.whole()
            self.store.settle(trained=dict.fromkeys(batch.trained, step), skipped=batch.skipped)
        outcomes = self.store.outcomes(self.run_id, step=step, purpose=Purpose.TRAIN)
        self._tell_failures(rollouts, batch, outcomes)
        row = step_row(
            step,
            taken=taken,
            calls=calls,
            batches=batches,
            passes=passes,
            outcomes=outcomes,
            seconds=clock.spent | parts.spent,
            learning_rate=self._learning_rate(step),
            max_staleness=self.config.max_staleness,
        )
        with clock("checkpoint"):
            self._checkpoint(step, row)
        with clock("publish"):
            self._publish(step)
        row |= seconds_row(clock.spent)
        self._log(step, row)
        self.clock.add(clock)
        self.display.step(row, self.store.accounting(self.run_id))

    def _collect(self, step: int, rollouts: Sequence[Rollout]) -> tuple[list[Call], AdapterBatches]:
        ids = [rollout.id for rollout in rollouts]
        calls = self.store.calls(rollout_ids=ids)
        settings = step_settings(
            self.config,
            adapters=frozenset(self.adapters),
            max_length=self.config.max_length or self.base.context_length,
            min_group=self.config.min_group,
            max_tokens=self.config.max_tokens,
        )
        if self.config.stale == "drop":
            settings = replace(settings, oldest_version=step - 1 - self.config.max_staleness)
        rewards = self.store.rewards(ids)
        try:
            return calls, assemble_adapters(rollouts, calls, rewards, settings, self.adapters)
        except ValueError as error:  # rewards that the estimator cannot take
            raise RunError(f"the step's records cannot be learned from: {error}") from error

    def _teaches(self, step: int, group: Sequence[Rollout]) -> bool:
        """Whether the rewards of a finished group differ, for one adapter at least. What fails for
        other reasons is not replaced: another task would not mend it."""
        batch = self._collect(step, group)[1].whole()
        return bool(batch.trained) or SkipReason.ZERO_ADVANTAGE not in batch.skipped.values()

    def _learn(self, step: int, batch: StepBatch, clock: Clock) -> list[StepStats]:
        """Updates one adapter. What each epoch saw, the first before any update; the last one may
        not have been applied (``skipped_non_finite``). Nothing where there is nothing to learn."""
        passes: list[StepStats] = []
        if not batch.datums:
            return passes
        client = self.clients[batch.datums[0].adapter]
        adam = AdamParams(self._learning_rate(step), grad_clip_norm=self.config.max_grad_norm)
        settings = update_settings(self.config, epochs=self.config.epochs)
        # What depends on the policy before the update: references, values, advantages of GAE.
        with clock("prepare"):
            batch.datums = self._result(
                client.local(lambda own: prepare(own, batch.datums, settings))
            )
        for epoch in range(settings.epochs):
            with clock("forward_backward"):
                added = client.forward_backward(
                    batch.datums,
                    settings.loss,
                    settings.loss_config,
                    normalize_by=None,  # the tokens of the whole step
                    logprobs=False,
                )
                done = self._result(added)
            with clock("optimizer"):
                stepped = self._result(client.optim_step(adam)).metrics
            refused = bool(stepped["skipped_non_finite"])
            passes.append(
                replace(done.stats, grad_norm=stepped["grad_norm"], skipped_non_finite=refused)
            )
            if refused:
                self.display.note("the loss or gradient was not finite: the step was not applied")
                if not epoch:
                    batch.refuse(SkipReason.NON_FINITE_STEP)
                break
        return passes

    def _result(self, asked: APIFuture[T]) -> T:
        """What is computed on the learner's thread; runners and leases are looked after meanwhile:
        rollouts of the next steps may be under way."""
        return self.session.upkeep.result(asked.future())

    def _learning_rate(self, step: int) -> float:
        peak = self.config.learning_rate or default_learning_rate(
            self._parameters(), self.config.alpha
        )
        return peak * schedule_factor(
            self.config.schedule, step, self.steps, self.config.warmup_steps
        )

    def _parameters(self) -> int:
        """Of the base and one adapter: how many others train beside it is of no account."""
        others = [f".{name}." for name in (*list(self.adapters)[1:], REFERENCE)]
        return sum(
            parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
            for name, parameter in self.base.model.named_parameters()
            if not any(other in name for other in others)
        )

    def _tell_failures(
        self, rollouts: Sequence[Rollout], batch: StepBatch, outcomes: Outcomes
    ) -> None:
        problems = failures(rollouts)
        if note := outcomes_in_words(outcomes):
            self.display.note(note)
        for reason, count in list(problems.items())[:2]:
            self.display.note(f"{count} of {len(rollouts)} rollouts failed: {reason}")
        if sum(problems.values()) == len(rollouts):
            raise RunError(
                "every rollout of the step failed. "
                + "; ".join(f"{count}×: {reason}" for reason, count in problems.items())
                + f"\nThe agent's output is in {self.folder.logs}"
            )
        missing = sum(reward is None for reward in batch.rewards.values()) - sum(problems.values())
        if missing:
            self.display.note(f"{missing} of {len(rollouts)} rollouts emitted no reward")
        if small := batch.shrunk():
            self.display.note(
                f"{small} of {len(batch.groups)} groups shrank below min_group: not trained"
            )

    def _log(self, step: int, row: Mapping[str, Any]) -> None:
        self.folder.append_metrics(row)
        self.store.log_metrics(self.run_id, step, finite_numbers(row))
        self.trackers.log(step, row)

    # ---- evaluation

    def _evaluate_if_due(self, step: int) -> None:
        due = step % self.config.eval_every == 0 or step == self.steps
        if not self.eval_ids or not due:
            return
        if (known := self._held_out().get(step)) is not None:  # before this run was resumed
            self.display.evaluated(step, known)
            return
        clock = Clock()
        with clock("evaluation"):
            rollouts = self.session.execute(
                plan_evaluation(
                    self.eval_ids,
                    step,
                    self.config.eval_samples,
                    self.config.seed,
                    self.config.eval_temperature,
                ),
                lambda done, total: self.display.phase("evaluation", done, total),
            )
            accuracy, mean = self._score(rollouts)
            if not self.config.max_staleness:
                # What it leaves in the sampler's prefix cache would change the last bits of what
                # follows, and a run that is resumed here does not evaluate again.
                self._swap(step)
        self.clock.add(clock)
        row = {"step": step, HELD_OUT: accuracy, HELD_OUT_REWARD: mean, **seconds_row(clock.spent)}
        self._log(step, row)
        self.display.evaluated(step, accuracy)
        for reason, count in list(failures(rollouts).items())[:2]:
            self.display.note(f"{count} of {len(rollouts)} evaluations failed: {reason}")

    def _score(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        """Accuracy and mean reward; a rollout that failed or emitted nothing is no success."""
        ids = [rollout.id for rollout in rollouts]
        calls = self.store.calls(rollout_ids=ids)
        self.store.settle(
            trained={}, skipped=dict.fromkeys((c.id for c in calls), SkipReason.EVALUATION)
        )
        scores = rollout_rewards(rollouts, self.store.rewards(ids)).values()
        earned = [score for score in scores if score is not None]
        successes = sum(score >= self.config.success_reward for score in earned)
        mean = sum(earned) / len(earned) if earned else math.nan
        return successes / len(rollouts), mean

    def _held_out(self) -> dict[int, float]:
        return {row["step"]: row[HELD_OUT] for row in self.folder.read_metrics() if HELD_OUT in row}

    def _reached_goal(self) -> bool:
        goal, held_out = self.config.stop_at, self._held_out()
        return goal is not None and bool(held_out) and held_out[max(held_out)] >= goal

    # ---- state

    def _load_model(self) -> None:
        import torch

        torch.set_num_threads(1)  # gateway and runners want the other cores
        self.service = ServiceClient(
            folder=self.folder.root,
            device=self.config.device,
            dtype=self.config.dtype,
            load_in_4bit=self.config.load_in_4bit,
            token_budget=self.config.micro_batch_tokens,
            gradient_checkpointing=self.config.gradient_checkpointing,
            value=value_params(self.config),
        )
        self.clients = {
            name: self.service.create_lora_training_client(
                self.config.model,
                self.config.rank,
                self.config.seed + index,
                alpha=self.config.alpha,
                name=name,
            )
            for index, name in enumerate(self.adapters)
        }
        client = next(iter(self.clients.values()))
        self.base = client.local(lambda learner: learner.base).result()
        for name, of in self.clients.items():
            if said := of.local(lambda learner, name=name: learner.what_is_trained(name)).result():
                self.display.note(f"{name}: {said}")
        if why := client.local(lambda learner: learner.why_not_shared).result():
            self.display.note(f"shared prefixes are computed for each row anew: {why}")
        if (reference := self.config.kl_reference) is not None:
            client.local(lambda learner: learner.add_reference(REFERENCE, reference)).result()

    def _restore(self) -> int:
        """Goes back to the newest whole checkpoint, if there is one; returns its step."""
        found = self.service.restore_checkpoint(self.folder.checkpoints).result()
        for torn, fault in found.torn.items():
            self.display.note(f"checkpoint {torn.name} was passed over: {fault}")
        step = found.step or 0
        self.stream.restore(step, found.meta.get("rollouts"))
        rows = self.folder.read_metrics()
        self.store.cancel(
            self.run_id,
            "the run was resumed",
            after_step=step,
            # What a killed evaluation had done of this step is made again.
            evaluated=any(row["step"] == step and HELD_OUT in row for row in rows),
        )
        self.store.supersede(self.run_id, after_step=step)
        self.store.drop_adapters_after(self.run_id, step)
        self._restore_metrics(step, rows, found.meta.get("row"))
        return step

    def _restore_metrics(
        self, step: int, rows: Sequence[Mapping[str, Any]], last: Mapping[str, Any] | None
    ) -> None:
        """Each row up to ``step`` once, everywhere. ``last`` is that step's, from its checkpoint:
        without the seconds of what came after, it stands in where the process died before it was
        logged."""
        self.folder.keep_metrics(lambda row: row["step"] <= step)
        self.store.drop_metrics_after(self.run_id, step)
        self.trackers.begin(step if rows else None, rows)
        of_step = [row for row in rows if row["step"] == step]
        for row in of_step:  # it may have died between the file and the store
            self.store.log_metrics(self.run_id, step, finite_numbers(row))
        if last is not None and not any(REWARD in row for row in of_step):
            self._log(step, last)

    def _checkpoint(self, step: int, row: Mapping[str, Any]) -> None:
        saved = self.service.save_checkpoint(
            self.folder.checkpoints,
            step,
            meta={"run_id": self.run_id, "rollouts": self.stream.state(), "row": row},
            keep=self.config.keep_checkpoints,
        )
        self._result(saved)

    def _publish(self, step: int) -> None:
        """Saves each adapter as version ``step`` and swaps it into the sampler."""
        for name, client in self.clients.items():
            path = self.folder.adapter_version(name, step)
            self._result(client.save_weights_for_sampler(path))
        self._swap(step)

    def _swap(self, step: int) -> None:
        """Makes the adapters as saved in ``step`` the ones that answer, with an empty cache."""
        for name in self.clients:
            path = self.folder.adapter_version(name, step)
            self.session.publish(name, step, str(path), step, self.display.note)


def steps_of_one_epoch(tasks: int, batch_size: int) -> int:
    return math.ceil(tasks / batch_size)
