"""The charts of a run's overview, from its metrics (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import quote, urlencode

from agentrl.guards.alerts import ALERTS
from agentrl.history.overview import Span
from agentrl.history.sources import OpenRun
from agentrl.runs.metric_names import HELD_OUT, REWARD
from agentrl.ui.charts import Chart, bars, chart, lines, with_spread
from agentrl_tracer.schemas import Accounting

Metrics = Mapping[int, Mapping[str, float]]

PHASES = ("rollouts", "update", "checkpoint", "publish", "evaluation")
_FAILED = ("error", "timeout", "infrastructure", "lost", "no_reward")
_STD = "reward/std_over_groups"
_MOST_POINTS = 200


_PLANS: dict[str, tuple[str, str, Sequence[str]]] = {
    "length": ("Length of answers", "tokens", ["answers/tokens"]),
    "cut-off": ("Answers cut off, and repeated", "%", ["answers/cut_off", "answers/repeated"]),
    "entropy": ("Entropy per token", "", ["answers/entropy", "entropy"]),
    "kl": ("KL divergence per token", "",
           ["kl/reference", "sampler_trainer/kl", "last_epoch/sampler_trainer/kl"]),
    "clip": ("Clip fraction", "%", ["clip_fraction", "last_epoch/clip_fraction"]),
    "loss": ("Loss", "", ["loss", "eval/loss", "value/loss"]),
    "gradient": ("Norm of the gradient", "", ["grad_norm"]),
    "learning-rate": ("Learning rate", "", ["learning_rate"]),
    "difference": ("Difference of log-probs, sampler to trainer", "",
                   [f"sampler_trainer/{how}_logprob_difference" for how in ("max", "mean")]),
    "staleness": ("Staleness of trained tokens", "versions", ["staleness/mean", "staleness/max"]),
    "groups": ("Groups", "",
               [f"groups/{how}" for how in ("used", "zero_advantage", "small_group", "no_reward")]),
    "failures": ("Failures", "",
                 ["rollouts/failed", "reward/missing", *(f"attempts/{how}" for how in _FAILED)]),
    "speed": ("Tokens sampled per second", "", ["tokens_per_second"]),
}  # fmt: skip
"""Title, unit and metrics of each chart after the first two."""
_LOGARITHMIC = ("difference",)
_UNLESS_ZERO = ("staleness", "failures")
"""Charts that leave out curves which stay zero."""


def metric_names(adapters: Sequence[str]) -> set[str]:
    """Return the metrics that the charts read; ``adapters``: names, where several train."""
    names = {REWARD, _STD, HELD_OUT}
    names |= {name for _, _, own in _PLANS.values() for name in own}
    names |= {f"alert/{name}" for name in ALERTS}
    return names | {f"{one}/{name}" for one in adapters for name in names}


def thinned_metrics(run: OpenRun, names: Collection[str]) -> tuple[Metrics, int]:
    """Return metrics of as many steps as a chart can show, and every how many steps these are."""
    every = -(-(run.store.last_step(run.id) or 1) // _MOST_POINTS)
    return run.store.metrics(run.id, names, every=every), every


def values_of(metrics: Metrics, name: str) -> dict[int, float]:
    """Return a metric by step."""
    return {step: row[name] for step, row in metrics.items() if name in row}


def run_charts(
    path: str, metrics: Metrics, intervals: Mapping[int, tuple[float, float]],
    spans: Sequence[Span], adapters: Sequence[str], shares: Mapping[str, float],
    busy: Mapping[str, float],
) -> list[Chart]:  # fmt: skip
    """Return the charts of the run at ``path``, those without data left out.

    ``shares`` are those of the time by phase, of all steps, and ``busy`` those of the cores.
    """
    mean, std = values_of(metrics, REWARD), values_of(metrics, _STD)
    spread = {
        step: (mean[step] - std[step], mean[step] + std[step]) for step in std if step in mean
    }
    rewards = with_spread("mean", mean, spread)
    rewards |= {one: values_of(metrics, f"{one}/{REWARD}") for one in adapters}
    success = with_spread("success rate", values_of(metrics, HELD_OUT), intervals)
    charts = [
        lines("reward", "Reward of training rollouts, ± standard deviation over groups", rewards,
              href=_rollouts(path, "train")),
        lines("held-out", "Held-out success, 95 % intervals", success, unit="%", style="marked",
              href=_rollouts(path, "eval")),
        *(_planned(key, metrics, adapters) for key in _PLANS),
    ]  # fmt: skip
    found = [one for one in charts if one["rows"]]
    by_phase = ("phases", "Share of time", shares), ("cores", "Share of the cores busy", busy)
    for key, title, values in by_phase:
        if values:
            series = {"share": values}
            found.append(bars(key, f"{title} by phase", series, unit="%", horizontal=True))
    if spans:
        order = sorted(spans, key=lambda span: PHASES.index(span[0]))
        rows = [[lane, label, start, end - start] for lane, start, end, label in order]
        columns = ["phase", "step", "from", "took"]
        found.append(
            chart("timeline", "timeline", "Timeline of the last steps", columns, rows, "s")
        )
    return found


def books(path: str, kept: Accounting) -> Chart:
    """Return the calls of a run as a flow from proxied to trained and to each skip reason."""
    ends = {"trained": kept.trained, **dict(sorted(kept.skipped.items(), key=lambda one: -one[1]))}
    if kept.pending:
        ends["pending"] = kept.pending
    rows: list[list[object]] = [["proxied", "recorded", min(kept.proxied, kept.recorded)]]
    if missing := kept.proxied - kept.recorded:
        start, end = ("proxied", "not recorded") if missing > 0 else ("not counted", "recorded")
        rows.append([start, end, abs(missing)])
    for end, count in ends.items():
        href = f"{path}/calls?{urlencode({'verdict': end})}"
        rows.append(["recorded", {"text": end, "href": href}, count])
    return chart(
        "flow", "books", "Calls from proxied to trained", ["from", "to", "calls"], rows, "calls"
    )


def _rollouts(path: str, purpose: str) -> str:
    where = quote(f"purpose == '{purpose}' and step == ")
    return f"{path}/rollouts?where={where}{{x}}"


def _planned(key: str, metrics: Metrics, adapters: Sequence[str]) -> Chart:
    title, unit, own = _PLANS[key]
    names = [prefix + name for prefix in ("", *(f"{one}/" for one in adapters)) for name in own]
    curves = {name: values_of(metrics, name) for name in names}
    if key in _UNLESS_ZERO:
        curves = {name: points for name, points in curves.items() if any(points.values())}
    return lines(key, title, curves, unit=unit, log=key in _LOGARITHMIC)
