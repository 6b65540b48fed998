"""What the end of a run reports, and that its files are JSON where numbers are missing."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from strict_json import strictly

from agentrl.console.live import TrainDisplay
from agentrl.console.report import training_report
from agentrl.runs.folder import RunFolder
from agentrl.runs.learning_curve import draw_learning_curve
from agentrl.runs.summary import Summary
from agentrl_tracer.schemas import Accounting


def reported(accounting: Accounting, rewards: list[float | None], steps: int = 3) -> str:
    folder = RunFolder(Path("runs/x"))
    summary = Summary(
        folder, folder.adapter, steps, rewards, accounting, held_out=[], replies=[], seconds={}
    )
    console = Console(file=io.StringIO(), width=200)
    console.print(training_report(summary))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_every_reason_is_counted_the_most_frequent_first() -> None:
    skipped = {"zero_advantage": 5, "evaluation": 4, "truncated": 2, "no_reward": 9}
    said = reported(Accounting(20, 20, 0, skipped, 0), [None, 1.0, None])
    assert "nothing was learned: 0 of 16 calls trained" in said.splitlines()[0]
    positions = [said.index(words) for words in ("9 no_reward", "5 zero_adv", "2 truncated")]
    assert positions == sorted(positions)
    assert "evaluation" not in said
    assert "+1.00 → +1.00" in said


def test_an_agent_that_asked_nothing_is_told_where_to_ask() -> None:
    assert "OPENAI_BASE_URL" in reported(Accounting(4, 4, 0, {"evaluation": 4}, 0), [1.0])


def test_what_trained_is_reported_as_before() -> None:
    said = reported(Accounting(4, 4, 3, {"no_reward": 1}, 0), [None, 0.5, 1.0])
    assert said.splitlines()[0].startswith("╭─ trained ─")
    assert "+0.50 → +1.00 in 3 steps" in said
    # Its goal was reached before the first step.
    assert "nothing" not in reported(Accounting(4, 4, 0, {"evaluation": 4}, 0), [], steps=0)


def test_metrics_are_json_and_old_ones_are_mended(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "r", "x")
    folder.metrics.write_text('{"step": 1, "reward/mean": NaN}\n')
    folder.append_metrics({"step": 2, "reward/mean": math.inf, "loss": 0.5})
    expected: list[Any] = [
        {"step": 1, "reward/mean": None},
        {"step": 2, "reward/mean": None, "loss": 0.5},
    ]
    assert folder.read_metrics() == expected
    folder.keep_metrics(lambda row: True)
    assert [strictly(line) for line in folder.metrics.read_text().splitlines()] == expected
    folder.write_json(folder.summary, {"held_out": [(1, math.nan)], "reward": [-math.inf]})
    assert strictly(folder.summary.read_text()) == {"held_out": [[1, None]], "reward": [None]}
    draw_learning_curve(expected, "nothing", folder.picture)
    assert folder.picture.is_file()


def test_the_clock_on_show_counts_from_when_the_run_began() -> None:
    console = Console(file=io.StringIO(), width=100)
    display = TrainDisplay(console, "x", since=time.perf_counter() - 100.5)
    console.print(display._render())  # pyright: ignore[reportPrivateUsage]
    assert "1:40 elapsed" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
