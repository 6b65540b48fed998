"""The live panel of a training fits its terminal and shows what the agents do."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console
from store_records import claimed, enqueue

from agentrl.console import live
from agentrl.console.live import TrainDisplay
from agentrl.console.output import plain
from agentrl_tracer.schemas import Accounting, AttemptState, Policies, SkipReason
from agentrl_tracer.store import Store

ROW = {
    "step": 3, "reward/mean": 0.5, "tokens_per_second": 1234.5, "staleness/max": 2,
    "staleness/mean": 1.0, "seconds/overlapped": 4.0,
    "sampler_trainer/max_logprob_difference": 1e-5,
}  # fmt: skip


def frame(console: Console, store: Store, run_id: str) -> tuple[str, list[str]]:
    """Show a run for a while; return all that was printed, and the lines of the last frame."""
    with TrainDisplay(console, "agentrl · hello", since=time.perf_counter() - 100.5) as display:
        display.begin(10, 0)
        display.watch(store, run_id)
        display.note("the agent said \x1b[2J")
        display.phase("rollouts", 5, 64, ahead=lambda: (1, 9))
        skipped = {str(reason): 1000 + at for at, reason in enumerate(SkipReason)}
        calls = 5000 + sum(skipped.values())
        display.step(ROW, Accounting(calls, calls, 5000, skipped, 0))
        display.evaluated(3, 0.25)
        time.sleep(0.3)
        display._live.refresh()  # pyright: ignore[reportPrivateUsage]
        shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return shown, shown[shown.rindex("╭") :].splitlines()


def test_before_the_model_is_loaded_the_steps_are_not_known() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    with TrainDisplay(console, "agentrl · hello", since=time.perf_counter()) as display:
        display._live.refresh()  # pyright: ignore[reportPrivateUsage]
        shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "/…" in shown
    assert "None" not in shown


@pytest.fixture
def run_id(store: Store) -> str:
    """A run with two rollouts running, two that failed before the last step and three after it."""
    made = store.create_run("hello", "train", {}, Policies(on_error="drop"))
    for step, count in ((1, 2), (3, 3)):
        enqueue(store, made, {"n": 7}, count, step=step)
        for at in range(count):
            error = f"Traceback ...\nLookupError: \x1b[2J{at} in [b]step {step}[/b] " + "x" * 999
            store.end_attempt(claimed(store).attempt_id, AttemptState.ERROR, error=error)
    enqueue(store, made, {"question": "Say 8.\n" * 99}, 2, step=4)
    claimed(store)
    claimed(store)
    return made


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (44, 24), (30, 10)])
def test_the_panel_shows_agents_failures_and_the_books_within_the_terminal(
    store: Store, run_id: str, width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(live, "_LOOK_S", 0.05)
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, legacy_windows=False
    )
    shown, lines = frame(console, store, run_id)
    assert len(lines) <= height
    assert "\x1b[2J" not in shown
    assert "\x1b[3" not in shown  # no color
    text = plain("\n".join(lines))
    if width < 80:
        return
    for part in (
        "1:40 elapsed", "step 3/10", "+0.500", "25.0%", "1,234 tokens/s", "2 running",
        'train 0: {"question"', "5000 trained", "1022 superseded",
    ):  # fmt: skip
        assert part in text
    assert text.count("failed, step 3") == 3
    assert "failed, step 1" not in text
