"""Each alert fires on the run that it is for, at its threshold, and not on healthy ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agentrl.guards.alerts import evaluation_alerts, step_alerts

HEALTHY = {
    "reward/mean": 0.2, "reward/std": 0.4, "answers/tokens": 12.0, "answers/cut_off": 0.02,
    "answers/entropy": 0.5, "answers/repeated": 0.1, "answers/length_pays": -0.3,
    "sampler_trainer/mean_logprob_difference": 1e-6, "sampler_trainer/kl": 1e-12,
    "staleness/max": 0,
}  # fmt: skip
BETTER = {"reward/mean": 0.9}


def rows(now: dict[str, Any], start: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Three steps at the start, four between, three now."""
    first, last = HEALTHY | (start or {}), HEALTHY | (start or {}) | now
    return [{"step": step, **(first if step < 8 else last)} for step in range(1, 11)]


def fired(now: dict[str, Any], start: dict[str, Any] | None = None) -> dict[str, str]:
    return {alert.metric: alert.sentence for alert in step_alerts(rows(now, start), ["policy"])}


@pytest.mark.parametrize(
    ("name", "broken", "healthy", "start"),
    [
        # Hardly any entropy is what a solved task leaves, and no alert.
        ("entropy_collapse", {"answers/entropy": 0.04}, {"answers/entropy": 0.04, **BETTER}, {}),
        ("entropy_collapse", {"answers/entropy": 0.04}, {"answers/entropy": 0.06}, {}),
        ("entropy_explosion", {"answers/entropy": 1.6}, {"answers/entropy": 1.6, **BETTER}, {}),
        ("entropy_explosion", {"answers/entropy": 1.6}, {"answers/entropy": 1.4}, {}),
        (
            "entropy_explosion",
            {"answers/entropy": 0.65},
            {"answers/entropy": 0.55},
            {"answers/entropy": 0.1},
        ),
        ("kl_explosion", {"kl/reference": 6.0}, {"kl/reference": 4.0, **BETTER}, {}),
        (
            "kl_explosion",
            {"last_epoch/sampler_trainer/kl": 0.4},
            {"last_epoch/sampler_trainer/kl": 0.2},
            {},
        ),
        (
            "kl_explosion",
            {"sampler_trainer/kl": 0.4, "staleness/max": 1},
            {"sampler_trainer/kl": 0.2, "staleness/max": 1},
            {},
        ),
        (
            "length_growth",
            {"answers/tokens": 25.0, "answers/length_pays": 0.6},
            {"answers/tokens": 25.0, "answers/length_pays": 0.4},
            {},
        ),
        (
            "length_growth",
            {"answers/tokens": 25.0, "answers/length_pays": 0.6, **BETTER},
            {"answers/tokens": 20.0, "answers/length_pays": 0.9},
            {},
        ),
        ("length_collapse", {"answers/tokens": 3.9}, {"answers/tokens": 3.9, **BETTER}, {}),
        ("length_collapse", {"answers/tokens": 1.2, **BETTER}, {"answers/tokens": 4.1}, {}),
        ("truncation", {"answers/cut_off": 0.35}, {"answers/cut_off": 0.25}, {}),
        (
            "truncation",
            {"answers/cut_off": 0.65},
            {"answers/cut_off": 0.55},
            {"answers/cut_off": 0.4},
        ),
        ("refused_steps", {"step_refused": 1.0}, {"step_refused": 0.0}, {}),
        ("repeated_answers", {"answers/repeated": 0.55}, {"answers/repeated": 0.45}, {}),
        (
            "repeated_answers",
            {"answers/repeated": 0.95},
            {"answers/repeated": 0.85},
            {"answers/repeated": 0.6},
        ),
        (
            "sampler_trainer_difference",
            {"sampler_trainer/mean_logprob_difference": 0.06},
            {"sampler_trainer/mean_logprob_difference": 0.04},
            {},
        ),
        (  # of an older version, the difference is the policy's own way
            "sampler_trainer_difference",
            {"sampler_trainer/mean_logprob_difference": 0.06},
            {"sampler_trainer/mean_logprob_difference": 0.06, "staleness/max": 1},
            {},
        ),
    ],
)
def test_an_alert_fires_beyond_its_threshold_only(
    name: str, broken: dict[str, Any], healthy: dict[str, Any], start: dict[str, Any]
) -> None:
    alerts = fired(broken, start)
    assert list(alerts) == [f"alert/{name}"]
    assert "; " in alerts[f"alert/{name}"]  # what was measured; what to change
    assert fired(healthy, start) == {}


@pytest.mark.parametrize(("now", "collapsed"), [(0.65, True), (0.75, False)])
def test_a_reward_that_fell_half_a_deviation_from_its_best_has_suffered(
    now: float, collapsed: bool
) -> None:
    steps = rows({"answers/entropy": 0.04, "reward/mean": now})
    for row in steps[3:7]:
        row["reward/mean"] = 0.9
    said = [alert.sentence for alert in step_alerts(steps, ["policy"])]
    assert ["the mean reward fell from +0.90 to +0.65" in one for one in said] == [True] * collapsed


@pytest.mark.parametrize(("difference", "fires"), [(0.19, False), (0.21, True)])
def test_a_sampler_with_8_bit_weights_may_differ_more(difference: float, fires: bool) -> None:
    steps = rows({"sampler_trainer/mean_logprob_difference": difference})
    alerts = step_alerts(steps, ["policy"], int8=True)
    assert [alert.metric for alert in alerts] == ["alert/sampler_trainer_difference"] * fires


def test_one_step_is_no_alert_and_neither_is_a_short_run() -> None:
    broken = rows({"answers/cut_off": 0.35})
    assert step_alerts(broken[:-2], ["policy"]) == []
    assert step_alerts(broken[-3:], ["policy"]) == []


def test_numbers_that_are_missing_or_not_finite_tell_nothing() -> None:
    empty = [{"step": step} for step in range(10)]
    assert step_alerts(empty, ["policy"]) == []
    nothing = dict.fromkeys(HEALTHY, math.nan)
    assert fired(nothing) == {}
    assert fired(dict.fromkeys(HEALTHY), {"answers/entropy": math.nan}) == {}


def test_each_of_several_adapters_has_alerts_of_its_own() -> None:
    both = [
        {f"asker/{name}": value for name, value in broken.items()}
        | {f"answerer/{name}": value for name, value in HEALTHY.items()}
        | {"staleness/max": 0}
        for broken in rows({"answers/cut_off": 0.35})
    ]
    [alert] = step_alerts(both, ["asker", "answerer"])
    assert alert.metric == "asker/alert/truncation"
    assert alert.sentence.startswith("asker: the share of answers that are cut off rose from 2%")
    assert alert.collapse


@pytest.mark.parametrize(
    ("held_out", "now", "says"),
    [
        ({0: 0.1, 5: 0.9, 10: 0.5}, 0.9, "fell from 90% (step 5) to 50%"),
        ({0: 0.1, 5: 0.9, 10: 0.7}, 0.9, None),  # within what 24 tasks cannot tell
        ({0: 0.1, 5: 0.9, 10: 0.5}, 0.1, None),  # the reward fell, too
        ({0: 1.0, 5: 1.0, 10: 0.95}, 0.9, None),
        ({0: 0.6, 5: 0.1}, 0.9, "fell from 60% (step 0) to 10%"),
        ({0: 0.6}, 0.9, None),
        ({0: 0.1, 9: 0.9, 10: 0.1}, 0.9, None),  # the best policy earned the last step's rewards
    ],
)
def test_held_out_falls_while_the_reward_rises(
    held_out: dict[int, float], now: float, says: str | None
) -> None:
    best = max(held_out, key=lambda step: (held_out[step], -step))
    alerts = evaluation_alerts(held_out, best, rows({"reward/mean": now}), 24)
    assert [alert.metric for alert in alerts] == (["alert/held_out_falls"] if says else [])
    assert all(says in alert.sentence for alert in alerts if says)


@pytest.mark.parametrize("staleness", [0, 1])
def test_three_steps_of_later_policies_tell_that_the_reward_rises(staleness: int) -> None:
    for best in (5, 6, 7):
        held_out = {0: 0.1, best: 0.9, 10: 0.1}
        alerts = evaluation_alerts(
            held_out, best, rows({"reward/mean": 0.9}), 24, staleness=staleness
        )
        assert bool(alerts) == (best + staleness <= 6)


def test_one_refused_update_is_no_alert() -> None:
    """Of an adapter that only some steps train."""
    rare = [row for row in rows({}) if row["step"] < 9]
    rare += [{**HEALTHY, "step": 9}, {**HEALTHY, "step": 10, "step_refused": 1.0}]
    assert not step_alerts(rare, ["policy"])
