"""Recognize runs that collapse or game their reward: each alert has a name, a rule and a fix.

Rules compare the median of a metric over the last three steps (*now*) with the first step
(*start*), whose answers the policy gave before its first update. They need four steps.
docs/metrics.md lists the rules and their thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from agentrl.runs.metric_names import REWARD

Row = Mapping[str, Any]

WINDOW = 3
_PREFIX = "alert/"

_ENTROPY_LEFT = 0.1
_ENTROPY_TIMES, _ENTROPY_MORE = 3.0, 0.5
_KL_OF_STEP = 0.3  # nats a token
_KL_REFERENCE = 5.0
_LONGER, _SHORTER = 2.0, 3.0
_LENGTH_PAYS = 0.5
_EMPTY = 1.5  # tokens, the end of the turn among them
_CUT_OFF, _CUT_OFF_RISE = 0.3, 0.2
_REPEATED, _REPEATED_RISE = 0.5, 0.3
_DIFFERENCE, _DIFFERENCE_INT8 = 0.05, 0.2  # nats a token; of a sampler with 8-bit weights
_FALL = 2.5  # standard errors


class Alert(NamedTuple):
    """What looks wrong.

    Attributes:
        metric: its name in metrics.jsonl, ``alert/truncation``, behind the adapter's name where
            several train.
        sentence: what was measured, and what to change.
        collapse: the policy itself has suffered, so that it helps to go back.
    """

    metric: str
    sentence: str
    collapse: bool = True


@dataclass(frozen=True, slots=True)
class _Trend:
    """The metrics of the steps so far."""

    rows: Sequence[Row]
    prefix: str = ""
    int8: bool = False
    """Whether the sampler computes with 8-bit weights."""

    def of(self, name: str) -> tuple[float, float] | None:
        """Return a metric at the start and now; None where it was not measured."""
        start, now = self._numbers(name, self.rows[:1]), self.now(name)
        return (start[0], now) if start and now is not None else None

    def now(self, name: str) -> float | None:
        found = self._numbers(name, self.rows[-WINDOW:])
        return median(found) if found else None

    @property
    def stale(self) -> bool:
        """Whether tokens that other versions sampled have trained."""
        return bool(_Trend(self.rows).now("staleness/max"))

    def _mean(self, name: str, rows: Sequence[Row]) -> float | None:
        found = self._numbers(name, rows)
        return fmean(found) if found else None

    def _numbers(self, name: str, rows: Sequence[Row]) -> list[float]:
        found = [row.get(self.prefix + name) for row in rows]
        return [value for value in found if value is not None and math.isfinite(value)]

    def reward_suffers(self) -> str | None:
        """Say how, if the reward is far below its best, or no better than at the start.

        Of agents with rewards of their own, which may be opponents, the sum says nothing.
        """
        if any(name.startswith(f"{self.prefix}{REWARD}/") for name in self.rows[-1]):
            return None
        ends = range(WINDOW, len(self.rows) + 1)
        means = [self._mean(REWARD, self.rows[end - WINDOW : end]) for end in ends]
        known = [mean for mean in means if mean is not None]
        spread = max(self._numbers("reward/std", self.rows), default=0.0)
        if means[-1] is None or not spread:
            return "no reward varies"
        if means[-1] < max(known) - spread / 2:
            return f"the mean reward fell from {max(known):+.2f} to {means[-1]:+.2f}"
        if means[-1] <= known[0] + spread / 10:
            return f"the mean reward, {means[-1]:+.2f}, is no better than at the start"
        return None


def step_alerts(rows: Sequence[Row], adapters: Sequence[str], *, int8: bool = False) -> list[Alert]:
    """Return the alerts that hold after the newest of a run's steps.

    Args:
        rows: of all steps.
        adapters: their names, where several train.
        int8: whether the sampler computes with 8-bit weights.
    """
    if len(rows) <= WINDOW:
        return []
    found: list[Alert] = []
    for prefix in [f"{name}/" for name in adapters] if len(adapters) > 1 else [""]:
        trend = _Trend(rows, prefix, int8)
        for name, rule in _RULES.items():
            if (sentence := rule(trend)) is not None:
                whose = prefix and f"{prefix.removesuffix('/')}: "
                collapse = rule is not _sampler_trainer_difference
                found.append(Alert(f"{prefix}{_PREFIX}{name}", whose + sentence, collapse))
    return found


def collapse_in(rows: Sequence[Row]) -> str | None:
    """Return the name of an alert in rows of metrics that tells of a collapse."""
    names = [name for row in rows for name in row if f"/{_PREFIX}" in f"/{name}"]
    return next((name for name in names if not name.endswith("/sampler_trainer_difference")), None)


def evaluation_alerts(
    held_out: Mapping[int, float],
    best: int,
    steps: Sequence[Row],
    rollouts: int,
    *,
    staleness: int = 0,
) -> list[Alert]:
    """Return the alerts that hold after the newest evaluation, of so many rollouts.

    Args:
        held_out: accuracies by step.
        best: the best step.
        steps: the rows of all steps.
        staleness: steps by which the policies that answer may be older.
    """
    newest = max(held_out)
    high, low = held_out[best], held_out[newest]
    error = math.sqrt((high * (1 - high) + low * (1 - low)) / rollouts)
    if high - low <= _FALL * max(error, 1 / rollouts):
        return []
    until = [row for row in steps if row["step"] <= best] or steps[:1]
    # Of policies after the best one.
    since = [row for row in steps if row["step"] > best + 1 + staleness]
    if len(since) < WINDOW:
        return []
    then, now = _Trend(until).now(REWARD), _Trend(since).now(REWARD)
    if then is None or now is None or now <= then:
        return []
    return [
        Alert(
            f"{_PREFIX}held_out_falls",
            f"held-out accuracy fell from {high:.0%} (step {best}) to {low:.0%} while the mean "
            f"reward rose from {then:+.2f} to {now:+.2f}: the run overfits its tasks or games its "
            "reward; use the best adapter, and give more tasks, a stricter reward or a lower "
            "learning.learning_rate",
        )
    ]


# ---- rules: each returns its sentence where it holds


def _entropy_collapse(trend: _Trend) -> str | None:
    entropy = trend.of("answers/entropy")
    if entropy is None or entropy[1] > _ENTROPY_LEFT * entropy[0]:
        return None
    suffers = trend.reward_suffers()
    return suffers and (
        f"the answers' entropy fell from {entropy[0]:.2g} to {entropy[1]:.2g} nats a token, and "
        f"{suffers}: answers hardly vary, so there is nothing to choose between; lower "
        "learning.learning_rate or set algorithm.kl.coef"
    )


def _entropy_explosion(trend: _Trend) -> str | None:
    entropy = trend.of("answers/entropy")
    if entropy is None:
        return None
    start, now = entropy
    if now < max(_ENTROPY_TIMES * start, start + _ENTROPY_MORE):
        return None
    suffers = trend.reward_suffers()
    return suffers and (
        f"the answers' entropy rose from {start:.2g} to {now:.2g} nats a token, and {suffers}: "
        "answers become noise; lower learning.learning_rate"
    )


def _kl_explosion(trend: _Trend) -> str | None:
    for name, limit, of in (
        ("kl/reference", _KL_REFERENCE, "the reference"),
        ("last_epoch/sampler_trainer/kl", _KL_OF_STEP, "the policy before the step"),
        ("sampler_trainer/kl" if trend.stale else "", _KL_OF_STEP, "the policy that sampled"),
    ):
        kl = trend.now(name) if name else None
        if kl is not None and kl > limit:
            return (
                f"the policy's KL to {of} is {kl:.2g} nats a token, above {limit:g}: updates are "
                "too large; lower learning.learning_rate or learning.epochs, or raise "
                "algorithm.kl.coef"
            )
    return None


def _length_growth(trend: _Trend) -> str | None:
    tokens, pays = trend.of("answers/tokens"), trend.now("answers/length_pays")
    if tokens is None or pays is None or tokens[1] < _LONGER * tokens[0] or pays < _LENGTH_PAYS:
        return None
    return (
        f"answers grew from {tokens[0]:.0f} to {tokens[1]:.0f} tokens, and within a group the "
        f"longer ones earn more (correlation {pays:.2f}): the reward may pay for length; read some "
        "answers, and reward only what they achieve"
    )


def _length_collapse(trend: _Trend) -> str | None:
    tokens = trend.of("answers/tokens")
    if tokens is None or tokens[1] > tokens[0] / _SHORTER:
        return None
    why = "they are almost empty" if tokens[1] <= _EMPTY else trend.reward_suffers()
    return why and (
        f"answers shrank from {tokens[0]:.0f} to {tokens[1]:.1f} tokens, and {why}; lower "
        "learning.learning_rate, and see whether the reward pays for saying nothing"
    )


def _truncation(trend: _Trend) -> str | None:
    cut_off = trend.of("answers/cut_off")
    if cut_off is None or cut_off[1] < max(_CUT_OFF, cut_off[0] + _CUT_OFF_RISE):
        return None
    return (
        f"the share of answers that are cut off rose from {cut_off[0]:.0%} to {cut_off[1]:.0%}: "
        "answers do not come to an end any more; lower learning.learning_rate, or raise max_tokens "
        "if long answers are right"
    )


def _repeated_answers(trend: _Trend) -> str | None:
    repeated = trend.of("answers/repeated")
    if repeated is None or repeated[1] < max(_REPEATED, repeated[0] + _REPEATED_RISE):
        return None
    return (
        f"{repeated[1]:.0%} of the rollouts of different tasks say exactly the same, "
        f"{repeated[0]:.0%} at the start: the policy ignores its task; see whether the reward pays "
        "for one answer to everything, and lower learning.learning_rate"
    )


def _refused_steps(trend: _Trend) -> str | None:
    if sum(row.get(f"{trend.prefix}step_refused") == 1 for row in trend.rows[-WINDOW:]) < 2:
        return None
    return (
        "updates are refused, because losses or gradients are not finite, so nothing is learned; "
        "see whether a loss of your own divides by zero, and lower learning.learning_rate"
    )


def _sampler_trainer_difference(trend: _Trend) -> str | None:
    difference = trend.now("sampler_trainer/mean_logprob_difference")
    limit = _DIFFERENCE_INT8 if trend.int8 else _DIFFERENCE
    if difference is None or trend.stale or difference <= limit:
        return None
    return (
        f"sampler and trainer differ by {difference:.2g} nats a token, above {limit:g}: they do "
        "not compute the same policy; use the same precision on both sides (model.dtype float32, "
        "sampler.weights model), and set algorithm.correction.mode"
    )


_RULES: dict[str, Callable[[_Trend], str | None]] = {
    "entropy_collapse": _entropy_collapse,
    "entropy_explosion": _entropy_explosion,
    "kl_explosion": _kl_explosion,
    "length_growth": _length_growth,
    "length_collapse": _length_collapse,
    "truncation": _truncation,
    "repeated_answers": _repeated_answers,
    "refused_steps": _refused_steps,
    "sampler_trainer_difference": _sampler_trainer_difference,
}
ALERTS = (*_RULES, "held_out_falls")
"""Their names, without ``alert/``."""
