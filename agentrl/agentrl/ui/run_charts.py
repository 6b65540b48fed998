"""The charts of a run's overview, from its metrics (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, urlencode

from agentrl.guards.alerts import ALERTS
from agentrl.history.overview import Span, share_by_phase
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.ui.charts import Chart, bars, curve, flow, lines, timeline
from agentrl_tracer.schemas import Accounting

Metrics = Mapping[int, Mapping[str, float]]

PHASES = ("rollouts", "update", "checkpoint", "publish", "evaluation")
_FAILED = ("error", "timeout", "infrastructure", "lost", "no_reward")


class _Plan(NamedTuple):
    key: str
    title: str
    names: Sequence[str]
    unit: str = ""
    log: bool = False
    shared: bool = True
    """False: with several adapters each has its own."""
    unless_zero: bool = False


_PLANS = (
    _Plan("length", "Length of answers", ["answers/tokens"], "tokens"),
    _Plan("cut-off", "Answers cut off, and repeated", ["answers/cut_off", "answers/repeated"], "%"),
    _Plan("entropy", "Entropy per token", ["answers/entropy", "entropy"], shared=False),
    _Plan("kl", "KL divergence per token",
          ["kl/reference", "sampler_trainer/kl", "last_epoch/sampler_trainer/kl"], shared=False),
    _Plan("clip", "Clip fraction", ["clip_fraction", "last_epoch/clip_fraction"], "%",
          shared=False),
    _Plan("loss", "Loss", ["loss", "value/loss"], shared=False),
    _Plan("gradient", "Norm of the gradient", ["grad_norm"], shared=False),
    _Plan("learning-rate", "Learning rate", ["learning_rate"]),
    _Plan("difference", "Difference of log-probs, sampler to trainer",
          [f"sampler_trainer/{how}_logprob_difference" for how in ("max", "mean")],
          log=True, shared=False),
    _Plan("staleness", "Staleness of trained tokens", ["staleness/mean", "staleness/max"],
          "versions", unless_zero=True),
    _Plan("groups", "Groups",
          [f"groups/{how}" for how in ("used", "zero_advantage", "small_group", "no_reward")]),
    _Plan("failures", "Failures",
          ["rollouts/failed", "reward/missing", *(f"attempts/{how}" for how in _FAILED)],
          unless_zero=True),
    _Plan("speed", "Tokens sampled per second", ["tokens_per_second"]),
    _Plan("seconds", "Seconds by phase",
          [f"seconds/{phase}" for phase in (*PHASES, "overlapped")], "s"),
)  # fmt: skip


def metric_names(adapters: Sequence[str]) -> set[str]:
    """Return the metrics that the charts read; ``adapters``: names, where several train."""
    names = {REWARD, "reward/std", HELD_OUT, *(name for plan in _PLANS for name in plan.names)}
    alerts = {f"alert/{name}" for name in ALERTS}
    return names | alerts | {f"{one}/{name}" for one in adapters for name in names | alerts}


def run_charts(
    name: str, metrics: Metrics, intervals: Mapping[int, tuple[float, float]],
    spans: Sequence[Span], adapters: Sequence[str],
) -> list[Chart]:  # fmt: skip
    """Return the charts of run ``name``, those without data left out."""
    where = f"/runs/{quote(name)}/rollouts?where="
    spread = {
        step: (row[REWARD] - row["reward/std"], row[REWARD] + row["reward/std"])
        for step, row in metrics.items()
        if REWARD in row and "reward/std" in row
    }
    rewards = [curve("mean ± standard deviation", _of(metrics, REWARD), spread)]
    own = [f"{one}/{REWARD}" for one in adapters]
    rewards += [curve(one, _of(metrics, one), style="dashed") for one in own]
    accuracy = curve("success rate", _of(metrics, HELD_OUT), intervals, style="marked")
    steps = where + quote("purpose == 'train' and step == ") + "{x}"
    evaluated = where + quote("purpose == 'eval' and step == ") + "{x}"
    charts = [
        lines("reward", "Reward of training rollouts", rewards, href=steps),
        lines("held-out", "Held-out success, 95 % intervals", [accuracy], unit="%", href=evaluated),
        *(_planned(plan, metrics, adapters) for plan in _PLANS),
    ]
    found = [one for one in charts if one["drawn"]["series"]]
    if shares := share_by_phase(metrics, PHASES):
        series = {"name": "share", "values": list(shares.values())}
        title = "Share of time by phase"
        found.append(bars("phases", title, list(shares), [series], unit="%", horizontal=True))
    if spans:
        lanes = [phase for phase in PHASES if any(span[0] == phase for span in spans)]
        found.append(timeline("timeline", "Timeline of the last steps", lanes, spans))
    return found


def books(name: str, kept: Accounting) -> Chart:
    """Return the calls of a run as a flow from proxied to trained and to each skip reason."""
    ends = {"trained": kept.trained, **dict(sorted(kept.skipped.items(), key=lambda one: -one[1]))}
    if kept.pending:
        ends["pending"] = kept.pending
    links = [("proxied", "recorded", float(min(kept.proxied, kept.recorded)))]
    if missing := kept.proxied - kept.recorded:
        start, end = ("proxied", "not recorded") if missing > 0 else ("not counted", "recorded")
        links.append((start, end, abs(missing)))
    links += [("recorded", end, count) for end, count in ends.items()]
    hrefs = {end: f"/runs/{quote(name)}/calls?{urlencode({'verdict': end})}" for end in ends}
    return flow("books", "Calls from proxied to trained", links, hrefs, "calls")


def _of(metrics: Metrics, name: str) -> dict[int, float | None]:
    return {step: row[name] for step, row in metrics.items() if name in row}


def _planned(plan: _Plan, metrics: Metrics, adapters: Sequence[str]) -> Chart:
    prefixes = ["", *([] if plan.shared else (f"{one}/" for one in adapters))]
    names = [prefix + name for prefix in prefixes for name in plan.names]
    found = {name: points for name in names if (points := _of(metrics, name))}
    series = [
        curve(name, points)
        for name, points in found.items()
        if not plan.unless_zero or any(points.values())
    ]
    return lines(plan.key, plan.title, series, unit=plan.unit, log=plan.log)
