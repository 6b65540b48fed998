"""Compute a step's row of metrics, and report its failures; docs/metrics.md lists the metrics."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.checks import compares_groups
from agentrl.findings import (
    WHERE_THE_MODEL_IS,
    Finding,
    answered,
    cut_off,
    equal_rewards,
    thinking,
)
from agentrl.runs.metric_names import DIFFERENCE
from agentrl.runs.recorded import shown
from agentrl.timing import PhaseTimer
from agentrl.training.queue.rollout_queue import StepRollouts, seconds_of_running
from agentrl.training.queue.staleness import StalenessLimit
from agentrl.training.session import RunError
from agentrl.training.unasked import note_unasked
from agentrl_tracer.schemas import (
    REWARD_RANGE,
    AttemptState,
    Call,
    Outcomes,
    Rollout,
    RolloutState,
    SkipReason,
)
from agentrl_trainer.data.adapter_split import AdapterBatches
from agentrl_trainer.data.batch_assembly import StepBatch
from agentrl_trainer.data.skip_reasons import token_versions
from agentrl_trainer.learner.step_stats import StepStats

if TYPE_CHECKING:
    from agentrl.training.run import TrainingRun

_PRINTED_LINES = 15  # of an attempt's output, where all have failed
_OF_UPDATE = {
    "tokens/trained": "tokens",
    "tokens/total": "tokens_total",
    "tokens/unique": "tokens_unique",
    "tokens/saved_by_sharing": "tokens_saved",
    "tokens/recomputed": "tokens_recomputed",
    "sampler_trainer/mean_logprob_difference": "mean_logprob_difference",
}
_OF_EPOCH = {
    "loss": "loss",
    "entropy": "entropy",
    "ratio/mean": "ratio_mean",
    "ratio/max": "ratio_max",
    "clip_fraction": "clip_fraction",
    "sampler_trainer/kl": "sampler_trainer_kl",
    "grad_norm": "grad_norm",
}
"""Metrics of each epoch, which change as the policy moves, and their fields of ``StepStats``."""
_OPTIONAL = {
    "kl_reference": "kl/reference",
    "correction": "correction/weight",
    "dropped": "correction/cut",
    "value_loss": "value/loss",
    "value_error": "value/error",
}
"""``StepStats.metrics`` has what not every step measures; the metric's name of each."""


def step_row(
    step: int,
    taken: StepRollouts,
    calls: Sequence[Call],
    batches: AdapterBatches,
    passes: Mapping[str, Sequence[StepStats]],
    outcomes: Outcomes,
    staleness: StalenessLimit,
) -> dict[str, Any]:
    """Return the step's metrics; with several adapters, each one's again under its name.

    Args:
        passes: statistics of each adapter's epochs; empty where there was nothing to learn from.
    """
    batch = batches.whole()
    sampled = sum(len(call.response_ids) for call in calls)
    running = seconds_of_running(taken.rollouts)
    ages = [
        step - 1 - version
        for call in calls
        if call.id in batch.trained
        for version in token_versions(call)
    ]
    differences = [epochs[0].max_logprob_difference for epochs in passes.values() if epochs]
    row: dict[str, Any] = {
        "step": step,
        **batch.metrics(),
        **outcomes.metrics(),
        "calls": len(calls),
        "calls/trained": len(batch.trained),
        "tokens/sampled": sampled,
        # By when the rollouts ran, not by how long this step waited for them.
        "tokens_per_second": sampled / running if running else 0.0,
        **staleness.metrics(ages),
        **taken.metrics,
        DIFFERENCE: max(differences, default=0.0),
    }
    for name, epochs in passes.items():
        own = _update_metrics(epochs)
        if len(passes) > 1:
            part = batches.by_adapter[name]
            own = {**part.metrics(), "calls/trained": len(part.trained), **own}
            own = {f"{name}/{key}": value for key, value in own.items()}
        row |= own
    return row


def _update_metrics(epochs: Sequence[StepStats]) -> dict[str, Any]:
    if not epochs:
        return {}
    first, last = epochs[0], epochs[-1]
    row = {name: getattr(first, field) for name, field in _OF_UPDATE.items()}
    row |= {"step_refused": float(last.skipped_non_finite)}
    for prefix, stats in [("", first), ("last_epoch/", last)][: len(epochs)]:
        row |= {prefix + name: getattr(stats, field) for name, field in _OF_EPOCH.items()}
        row |= {prefix + _OPTIONAL[name]: value for name, value in stats.metrics.items()}
    return row


class PrefixHits:
    """Counts the prompt tokens that the sampler took from its prefix cache, step by step."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}

    def metrics(self, healths: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
        """Return the share since the last call; nothing if no sampler counts it.

        Args:
            healths: of a gateway of each sampler; None while one is not up.
        """
        new = [self._new(number, health) for number, health in enumerate(healths)]
        hits, total = (sum(counts) for counts in zip(*new, strict=True))
        return {"tokens/prompts": total, "tokens/prompts_reused": hits / total} if total else {}

    def _new(self, number: int, health: Mapping[str, Any] | None) -> tuple[int, int]:
        """Return the hits and all prompt tokens of a gateway's sampler since the last call."""
        counted = (health or {}).get("sampler") or {}
        reused, computed = counted.get("reused_tokens"), counted.get("prefill_tokens")
        asked = counted.get("prompt_tokens")  # vLLM's, those from its cache included
        if reused is None or (computed is None and asked is None):
            return 0, 0
        now = int(reused), int(reused + computed if asked is None else asked)
        before = self._before.get(number, (0, 0))
        if now[1] < before[1]:  # the sampler was started again
            before = 0, 0
        self._before[number] = now
        return now[0] - before[0], now[1] - before[1]


def seconds_row(timer: PhaseTimer) -> dict[str, float]:
    return {f"seconds/{phase}": seconds for phase, seconds in timer.spent.items()}


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Keep the numbers of a row, without NaN and infinities."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def count_failures(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Count failed rollouts by the last line of their reason, most frequent first."""
    failed = (rollout for rollout in rollouts if rollout.state is not RolloutState.SUCCEEDED)
    reasons = Counter(_last_line(rollout.reason, rollout.state) for rollout in failed)
    return dict(reasons.most_common())


def _last_line(error: str | None, state: str) -> str:
    """Return the last line of an error; the state where the error is empty."""
    return ((error or "").strip() or state).splitlines()[-1][:200]


def note_failed_rollouts(
    rollouts: Sequence[Rollout], what: str, note: Callable[[str], None]
) -> dict[str, int]:
    """Report the two most frequent failures of some ``what``; return the count of each."""
    problems = count_failures(rollouts)
    for reason, count in list(problems.items())[:2]:
        note(f"{count} of {len(rollouts)} {what} failed: {reason}")
    return problems


def _end_of_output(run: TrainingRun, rollouts: Sequence[Rollout]) -> str:
    """Return the last lines that an attempt has printed; of a command they tell what was wrong."""
    for attempt in run.store.attempts([rollout.id for rollout in rollouts]):
        with contextlib.suppress(OSError):
            printed = Path(attempt.log).read_text(errors="replace") if attempt.log else ""
            if lines := printed.rstrip().splitlines()[-_PRINTED_LINES:]:
                return "\n".join([", the end of one:", *(f"  {line[:200]}" for line in lines)])
    return ""


def _first_error(
    run: TrainingRun, rollouts: Sequence[Rollout], expected: Collection[AttemptState]
) -> str:
    """Return what the first failed attempt said, and where its log is; errors come first."""
    attempts = run.store.attempts([rollout.id for rollout in rollouts])
    for attempt in sorted(attempts, key=lambda one: one.state is not AttemptState.ERROR):
        if attempt.state not in expected:
            said = _last_line(attempt.error, attempt.state)
            log = f" (its output: {shown(Path(attempt.log))})" if attempt.log else ""
            return f", the first: {said}{log}"
    return ""


def report_step_failures(
    run: TrainingRun,
    step: int,
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    batch: StepBatch,
    outcomes: Outcomes,
) -> None:
    """Report what went wrong in a step.

    Raises:
        RunError: every rollout of the step failed.
    """
    note = run.display.note
    expected = (AttemptState.RUNNING, AttemptState.SUCCEEDED, AttemptState.CANCELLED)
    failures = {name: count for name, count in outcomes.attempts.items() if name not in expected}
    words = [
        f"{n} got their reward from {name}" for name, n in sorted(outcomes.policy_rewards.items())
    ]
    if failures:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(failures.items()))
        first = _first_error(run, rollouts, expected)
        words.insert(0, f"{sum(failures.values())} attempts failed ({listed}){first}")
    if words:
        note("; ".join(words))
    problems = note_failed_rollouts(rollouts, "rollouts", note)
    failed = sum(problems.values())
    if failed == len(rollouts):
        said = "; ".join(f"{count}×: {reason}" for reason, count in problems.items())
        hint = "" if calls else f"\nNone of them reached the model: {WHERE_THE_MODEL_IS}."
        raise RunError(
            f"every rollout of the step failed. {said}{hint}"
            f"\nThe agent's output is in {run.folder.logs}{_end_of_output(run, rollouts)}"
        )
    note_unasked(run, [r for r in rollouts if r.id in batch.unasked], len(rollouts), "rollouts")
    if missing := sum(reward is None for reward in batch.rewards.values()) - failed:
        note(f"{missing} of {len(rollouts)} rollouts have no reward")
    if refused := list(batch.skipped.values()).count(SkipReason.REFUSED_REWARD):
        note(f"{refused} calls do not train, because a reward was refused: {REWARD_RANGE}")
    if small := batch.shrunk():
        note(f"{small} of {len(batch.groups)} groups shrank below min_group: not trained")
    run.notes.take(step, _findings(run, rollouts, calls, batch))


def _findings(
    run: TrainingRun, rollouts: Sequence[Rollout], calls: Sequence[Call], batch: StepBatch
) -> dict[str, Finding]:
    """Return what ``agentrl check`` would say of the answers and rewards of a step."""
    config, found = run.config, dict[str, Finding]()
    if mine := [call for call in answered(calls) if call.adapter in config.trained]:
        found["cut off"] = cut_off(mine, config.sampler.max_tokens)
        if run.thought_marks is not None:
            found["thinking"] = thinking(mine, run.thought_marks, wanted=config.sampler.thinking)
    compared = [rewards for rewards in _compared(rollouts, batch) if len(rewards) > 1]
    if compared and compares_groups(config):
        found["equal rewards"] = equal_rewards(compared, config.evaluation.success_reward)
    if batch.unclaimed:
        names = ", ".join(f"{agent} ({n})" for agent, n in batch.unclaimed.most_common())
        found["unclaimed"] = Finding(
            f"rewards for agents that made no call count for nothing: {names}",
            "name the agents in emit_reward as their requests do",
        )
    return found


def _compared(rollouts: Sequence[Rollout], batch: StepBatch) -> Iterable[list[float]]:
    """Return the rewards of each group; agents with rewards of their own are groups of their own,
    in place of the rollout's sum."""
    groups: dict[tuple[str, str], list[float]] = {}
    by_role = {one for earned in batch.of_agents.values() for one in earned}
    known = {"": {one: r for one, r in batch.rewards.items() if one not in by_role}}
    for agent, earned in (known | batch.of_agents).items():
        for rollout in rollouts:
            reward = earned.get(rollout.id)
            if reward is not None and rollout.id not in batch.unasked:
                groups.setdefault((rollout.group_id, agent), []).append(reward)
    return groups.values()
