"""``agentrl train``: roll out, learn, publish, evaluate, until the steps are done.

The loop is ``Training.run`` and ``Training._step``; read those two. What must survive a crash is
ordered so that the checkpoint is the last word on a step: verdicts and metrics are written before
it, the new adapter is published after it, and a resumed run undoes what came after the newest one.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.algorithm import REFERENCE, step_settings, update_settings, value_params
from agentrl.config import TrainConfig
from agentrl.display import TrainDisplay
from agentrl.metrics import DIFFERENCE, HELD_OUT, HELD_OUT_REWARD, OPTIONAL, REWARD
from agentrl.picture import draw_learning_curve
from agentrl.run_folder import RunFolder
from agentrl.session import (
    RunError,
    Session,
    failures,
    outcomes_in_words,
    plan_evaluation,
    rollout_seed,
)
from agentrl.trackers import MAY_HOLD_SECRETS, Trackers
from agentrl_tracer.schemas import (
    Call,
    CallState,
    Json,
    NewRollout,
    Outcomes,
    Purpose,
    Rollout,
    SkipReason,
)
from agentrl_trainer.adapters import AdapterBatches, AdapterRule, assemble_adapters
from agentrl_trainer.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
    save_checkpoint,
)
from agentrl_trainer.learner import AdamParams, Learner, StepStats
from agentrl_trainer.model import BaseModel, load_base
from agentrl_trainer.rewards import rollout_rewards
from agentrl_trainer.schedules import schedule_factor
from agentrl_trainer.step import StepBatch
from agentrl_trainer.update import prepare, update


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


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent's model said to one held-out task, before and after."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    folder: RunFolder
    adapter: Path
    steps: int
    reward_first: float
    reward_last: float
    held_out: list[tuple[int, float]]
    replies: list[Reply]
    seconds: dict[str, float]


def default_learning_rate(parameters: int, alpha: float = 32.0) -> float:
    """Adam's learning rate for LoRA, by the size of the base model.

    A power law through two points: 1.5e-3 at 0.85 million parameters, measured on agentrl-tiny, and
    4e-5 at 4 billion, the usual recommendation (ten times that of full fine-tuning).

    The rank does not enter. The update is alpha / rank times the sum of ``rank`` products, and
    Adam moves each of them by the same amount whatever the rank: their mean moves as one of them
    does (Schulman et al., "LoRA Without Regret", 2025, which finds the best rate the same from rank
    4 to 512). Alpha does: with B at zero the first updates are alpha times the rate, so that both
    points, which are of alpha 32, hold for the product.
    """
    small, large = (0.85e6, 1.5e-3), (4e9, 4e-5)
    exponent = math.log(large[1] / small[1]) / math.log(large[0] / small[0])
    return min(5e-3, small[1] * (parameters / small[0]) ** exponent) * 32.0 / alpha


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
        self.base: BaseModel
        self.learner: Learner

    def run(self) -> Summary:
        """Trains to the end; returns what to show.

        Raises:
            RunError: nothing can be rolled out, for a reason the message gives.
        """
        self._load_model()
        step = self._restore()
        self.display.begin(self.steps, step)
        self.session.wait_ready()
        self._publish(step)
        self.clock.spent["start"] = time.perf_counter() - self.session.started
        self._evaluate_if_due(step)
        while step < self.steps and not self._reached_goal():
            step += 1
            self._step(step)
            self._evaluate_if_due(step)
        self.session.begin_stop()  # it takes a moment, in which the picture is drawn
        with self.clock("picture"):
            summary = self._finish(step)
        self.store.end_run(self.run_id, "finished")
        self.trackers.close()
        return summary

    # ---- one step

    def _step(self, step: int) -> None:
        clock = Clock()
        with clock("rollouts"):
            rollouts = self.session.execute(
                self._plan(step), lambda done, total: self.display.phase("rollouts", done, total)
            )
        self.display.phase("learning")
        with clock("update"):
            calls, batches = self._collect(rollouts)
            stats = {name: self._learn(step, batch) for name, batch in batches.by_adapter.items()}
            batch = batches.whole()
            self.store.settle(trained=dict.fromkeys(batch.trained, step), skipped=batch.skipped)
        outcomes = self.store.outcomes(self.run_id, step=step, purpose=Purpose.TRAIN)
        self._tell_failures(rollouts, batch, outcomes)
        row = self._row(step, calls, batches, stats, outcomes, clock)
        self._log(step, row)
        with clock("checkpoint"):
            self._checkpoint(step)
        with clock("publish"):
            self._publish(step)
        for name, seconds in clock.spent.items():
            self.clock.spent[name] = self.clock.spent.get(name, 0.0) + seconds
        self.display.step(row, self.store.accounting(self.run_id))

    def _plan(self, step: int) -> list[NewRollout]:
        """The rollouts of a step: ``group_size`` of each of its tasks."""
        indices = tasks_of_step(step, len(self.tasks), self.config.batch_size, self.config.seed)
        return [
            NewRollout(
                task_id=self.task_ids[task],
                group_id=f"train-{step}-{position}",
                purpose=Purpose.TRAIN,
                step=step,
                index=index,
                seed=rollout_seed(self.config.seed, "train", step, position, index),
                sampling={},
            )
            for position, task in enumerate(indices)
            for index in range(self.config.group_size)
        ]

    def _collect(self, rollouts: Sequence[Rollout]) -> tuple[list[Call], AdapterBatches]:
        ids = [rollout.id for rollout in rollouts]
        calls = self.store.calls(rollout_ids=ids)
        settings = step_settings(
            self.config,
            adapters=frozenset(self.adapters),
            max_length=self.config.max_length or self.base.context_length,
            min_group=self.config.min_group,
            max_tokens=self.config.max_tokens,
        )
        rewards = self.store.rewards(ids)
        try:
            return calls, assemble_adapters(rollouts, calls, rewards, settings, self.adapters)
        except ValueError as error:  # rewards that the estimator cannot take
            raise RunError(f"the step's records cannot be learned from: {error}") from error

    def _learn(self, step: int, batch: StepBatch) -> StepStats | None:
        """Updates one adapter; the statistics are of the first epoch, before any update."""
        if not batch.datums:
            return None
        adam = AdamParams(
            lr=self._learning_rate(step),
            grad_clip_norm=self.config.max_grad_norm,
        )
        settings = update_settings(self.config, epochs=self.config.epochs)
        batch.datums = prepare(self.learner, batch.datums, settings)
        passes = update(self.learner, batch.datums, settings, adam)
        if passes[-1].skipped_non_finite:
            self.display.note("the loss or gradient was not finite: the step was not applied")
            if len(passes) == 1:
                batch.refuse(SkipReason.NON_FINITE_STEP)
        return passes[0]

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
            parameter.numel()
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
        small = batch.metrics()["groups/small_group"]
        if small:
            self.display.note(
                f"{small:.0f} of {len(batch.groups)} groups shrank below min_group: not trained"
            )

    def _row(
        self,
        step: int,
        calls: list[Call],
        batches: AdapterBatches,
        stats: Mapping[str, StepStats | None],
        outcomes: Outcomes,
        clock: Clock,
    ) -> dict[str, Any]:
        """The step in numbers; of several adapters, each one's under its name as well."""
        batch = batches.whole()
        sampled = sum(len(call.response_ids) for call in calls)
        row: dict[str, Any] = {
            "step": step,
            **batch.metrics(),
            **outcomes.metrics(),
            "calls": len(calls),
            "calls/trained": len(batch.trained),
            "tokens/sampled": sampled,
            "tokens_per_second": sampled / clock.spent["rollouts"],
            DIFFERENCE: max((s.max_logprob_difference for s in stats.values() if s), default=0.0),
            "seconds/rollouts": clock.spent["rollouts"],
            "seconds/update": clock.spent["update"],
            "learning_rate": self._learning_rate(step),
        }
        for name, one in stats.items():
            prefix = "" if len(stats) == 1 else f"{name}/"
            if prefix:
                part = batches.by_adapter[name]
                row |= {prefix + key: value for key, value in part.metrics().items()}
                row[prefix + "calls/trained"] = len(part.trained)
            row |= {prefix + key: value for key, value in _update_metrics(one).items()}
        return row

    def _log(self, step: int, row: Mapping[str, Any]) -> None:
        self.folder.append_metrics(row)
        self.store.log_metrics(self.run_id, step, _finite_numbers(row))
        self.trackers.log(step, row)

    # ---- evaluation

    def _evaluate_if_due(self, step: int) -> None:
        due = step % self.config.eval_every == 0 or step == self.steps
        if not self.eval_ids or not due or step in self._held_out():
            return
        with self.clock("evaluation"):
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
        row = {"step": step, HELD_OUT: accuracy, HELD_OUT_REWARD: mean}
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
        self.base = load_base(
            self.config.model,
            device=self.config.device,
            dtype=self.config.dtype,
            load_in_4bit=self.config.load_in_4bit,
        )
        self.learner = Learner(
            self.base,
            adapters=tuple(self.adapters),
            rank=self.config.rank,
            alpha=self.config.alpha,
            seed=self.config.seed,
            token_budget=self.config.micro_batch_tokens,
            gradient_checkpointing=self.config.gradient_checkpointing,
            value=value_params(self.config),
        )
        if self.learner.why_not_shared is not None:
            self.display.note(
                f"shared prefixes are computed for each row anew: {self.learner.why_not_shared}"
            )
        if self.config.kl_reference is not None:
            self.learner.add_reference(REFERENCE, self.config.kl_reference)

    def _restore(self) -> int:
        """Goes back to the newest whole checkpoint, if there is one; returns its step."""
        found = latest_checkpoint(self.folder.checkpoints)
        for torn, fault in found.torn.items():
            self.display.note(f"checkpoint {torn.name} was passed over: {fault}")
        step = 0
        if found.folder is not None:
            checkpoint = load_checkpoint(found.folder)
            self.learner.load_state_dict(checkpoint.tensors)
            restore_rng(checkpoint.rng)
            step = checkpoint.step
        self.store.supersede(self.run_id, after_step=step)
        self.store.cancel(self.run_id, "the run was resumed", after_step=step)
        self.store.drop_adapters_after(self.run_id, step)
        # This step's evaluation is made again as well: it leaves prefixes in the sampler's cache,
        # and what follows shall be what it would have been, to the last bit.
        self.folder.keep_metrics(
            lambda row: row["step"] < step or (row["step"] == step and HELD_OUT not in row)
        )
        return step

    def _checkpoint(self, step: int) -> None:
        save_checkpoint(
            self.folder.checkpoints,
            step,
            tensors=self.learner.state_dict(),
            meta={"run_id": self.run_id},
            keep=self.config.keep_checkpoints,
        )

    def _publish(self, step: int) -> None:
        """Saves each adapter as version ``step`` and swaps it into the sampler."""
        for name in self.adapters:
            path = self.folder.adapter_version(name, step)
            self.learner.save_adapter(name, path)
            self.session.publish(name, step, str(path), step)

    # ---- the end

    def _finish(self, step: int) -> Summary:
        rows = self.folder.read_metrics()
        if self.folder.adapter.exists():
            shutil.rmtree(self.folder.adapter)
        for name in self.adapters:
            final = self.folder.adapter if len(self.adapters) == 1 else self.folder.adapter / name
            shutil.copytree(self.folder.adapter_version(name, step), final)
        draw_learning_curve(rows, f"{self.folder.name}: {self.config.model}", self.folder.picture)
        rewards = [row[REWARD] for row in rows if REWARD in row]
        accounting = self.store.accounting(self.run_id)
        summary = Summary(
            folder=self.folder,
            adapter=self.folder.adapter,
            steps=step,
            reward_first=rewards[0] if rewards else math.nan,
            reward_last=rewards[-1] if rewards else math.nan,
            held_out=sorted(self._held_out().items()),
            replies=self._replies(step),
            seconds={name: round(value, 2) for name, value in self.clock.spent.items()},
        )
        self.folder.write_json(
            self.folder.summary,
            {
                "steps": step,
                "held_out": summary.held_out,
                "reward": rewards,
                "seconds": summary.seconds,
                "calls": {
                    "proxied": accounting.proxied,
                    "recorded": accounting.recorded,
                    "trained": accounting.trained,
                    "skipped": accounting.skipped,
                    "adds_up": accounting.adds_up,
                },
            },
        )
        return summary

    def _replies(self, step: int, count: int = 4) -> list[Reply]:
        """Replies to the same held-out tasks before the first step and after the last."""
        before, after = (self._first_calls(at) for at in (0, step))
        shared = [task for task in self.eval_ids if task in before and task in after]
        return [
            Reply(_prompt(before[task]), _answer(before[task]), _answer(after[task]))
            for task in shared[:count]
        ]

    def _first_calls(self, step: int) -> dict[str, Call]:
        """The first answered call of each evaluation rollout of a step, by task."""
        rollouts = self.store.rollouts(self.run_id, step=step, purpose=Purpose.EVAL)
        by_id = {rollout.id: rollout.task_id for rollout in rollouts}
        found: dict[str, Call] = {}
        for call in self.store.calls(rollout_ids=list(by_id)):
            if call.state is CallState.COMPLETED and call.rollout_id:
                found.setdefault(by_id[call.rollout_id], call)
        return found


def steps_of_one_epoch(tasks: int, batch_size: int) -> int:
    return math.ceil(tasks / batch_size)


def tasks_of_step(step: int, tasks: int, batch_size: int, seed: int) -> list[int]:
    """Which tasks step ``step`` (from 1) trains on: each epoch is a shuffle of its own.

    A function of its arguments alone, so a resumed run goes on where it was.
    """
    orders: dict[int, list[int]] = {}
    chosen: list[int] = []
    for position in range((step - 1) * batch_size, step * batch_size):
        epoch, place = divmod(position, tasks)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}/{epoch}").sample(range(tasks), tasks)
        chosen.append(orders[epoch][place])
    return chosen


def _update_metrics(stats: StepStats | None) -> dict[str, Any]:
    """An adapter's update in numbers; nothing where there was none."""
    if stats is None:
        return {}
    return {
        "tokens/trained": stats.tokens,
        "tokens/total": stats.tokens_total,
        "tokens/unique": stats.tokens_unique,
        "tokens/saved_by_sharing": stats.tokens_saved,
        "loss": stats.loss,
        "entropy": stats.entropy,
        "ratio/mean": stats.ratio_mean,
        "ratio/max": stats.ratio_max,
        "clip_fraction": stats.clip_fraction,
        "sampler_trainer/kl": stats.sampler_trainer_kl,
        "sampler_trainer/mean_logprob_difference": stats.mean_logprob_difference,
        "grad_norm": stats.grad_norm,
        "step_refused": float(stats.skipped_non_finite),
        **{OPTIONAL[name]: value for name, value in stats.metrics.items()},
    }


def _prompt(call: Call) -> str:
    messages = (call.request or {}).get("messages") or [{}]
    return str(messages[-1].get("content", ""))


def _answer(call: Call) -> str:
    choices = (call.response or {}).get("choices") or [{}]
    message = choices[0].get("message", {})
    tools = [tool.get("function", {}) for tool in message.get("tool_calls") or []]
    said = [f"{tool.get('name')}({tool.get('arguments')})" for tool in tools]
    return " ".join(filter(None, [message.get("content"), *said]))


def _finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What a database column takes: numbers, and no NaN."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
