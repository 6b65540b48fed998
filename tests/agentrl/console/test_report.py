"""What the terminal shows while a run trains and at its end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from agentrl.console.live import TrainDisplay
from agentrl.console.output import print_block
from agentrl.console.report import runs_table, show_run, training_report
from agentrl.runs.folder import RunFolder
from agentrl.runs.summary import Reply, Summary
from agentrl_tracer.schemas import Accounting, Policies, PromptKinds
from agentrl_tracer.store import Store


def printed(what: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def reported(accounting: Accounting, rewards: list[float | None], steps: int = 3) -> str:
    folder = RunFolder(Path("runs/x"))
    replies = [Reply("user: hi", "no", "[yes]")]
    summary = Summary(folder, steps, rewards, accounting, [(0, 0.5)], replies, {}, {})
    return printed(training_report(summary))


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


def test_the_report_of_a_run_that_trained() -> None:
    said = reported(Accounting(4, 4, 3, {"no_reward": 1}, 0), [None, 0.5, 1.0])
    assert said.splitlines()[0].strip() == "trained"
    assert "+0.50 → +1.00 in 3 steps" in said
    assert "50% → 50%" in said
    assert "[yes]" in said
    # Its goal was reached before the first step.
    assert "nothing" not in reported(Accounting(4, 4, 0, {"evaluation": 4}, 0), [], steps=0)


def test_a_narrow_terminal_cuts_neither_paths_nor_names() -> None:
    console = Console(width=80)
    folder = RunFolder(Path(f"/{'a-long-name/' * 10}run"))
    summary = Summary(folder, 1, [1.0], Accounting(1, 1, 1, {}, 0), [], [], {}, {})
    with console.capture() as capture:
        print_block(training_report(summary), console)
    assert f"{folder.adapter}" in capture.get()
    assert f"{folder.picture}" in capture.get()

    metrics = {step: {"reward/mean": step / 100} for step in range(30)}
    names = ["hello", "gsm8k-lr2e5-seed-1"]
    runs = [({"name": n, "kind": "train", "created_at": 0}, "finished", metrics) for n in names]
    for width, curve in ((80, 0), (110, 24)):
        console = Console(width=width)
        with console.capture() as capture:
            print_block(runs_table(runs, width), console)
        lines = capture.get().splitlines()
        assert [line.split()[0] for line in lines] == ["name", *names]
        assert all(sum(one in "▁▂▃▄▅▆▇█" for one in line) == curve for line in lines[1:])
        assert max(map(len, lines)) <= width


def test_the_panel_counts_from_when_the_run_began_and_shows_the_last_step() -> None:
    display = TrainDisplay(Console(), "x", since=time.perf_counter() - 100.5)
    display.begin(9, 0)
    row = {"step": 2, "reward/mean": 0.5, "tokens_per_second": 1234.0}
    row |= {"sampler_trainer/max_logprob_difference": 2e-6}
    display.step(row, Accounting(5, 5, 3, {"no_reward": 2}, 0))
    display.evaluated(2, 0.25)
    shown = printed(display._render())  # pyright: ignore[reportPrivateUsage]
    for part in (
        "1:40 elapsed", "step 2/9", "+0.500", "25.0%", "1,234 tokens/s", "3 trained + 2 no_reward",
    ):  # fmt: skip
        assert part in shown


def test_the_rollouts_that_branched_most_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store.db"))
    store.create_run("r", "train", {}, Policies())
    branched = [Counter(continued=1, first_call=1, history=i) for i in range(1, 23)]
    groups = [PromptKinds(kinds, 1, f"r{i:02}") for i, kinds in enumerate(branched, 1)]
    groups[0] = replace(groups[0], rollouts=5)
    groups.append(PromptKinds(Counter(continued=7, first_call=1), 1, "straight"))
    monkeypatch.setattr(Store, "continuity", Mock(return_value=groups))
    console = Console(width=200)
    with console.capture() as capture:
        [run] = store.runs()
        show_run(console, store, run, "finished", "")
    store.close()
    said = [line.split() for line in capture.get().splitlines()]
    assert ["first", "call", "27"] in said
    first = said.index(["rollouts", "for", "instance", "continued", "branched", "why"]) + 1
    assert said[first] == ["1", "r22", "1", "22", "history", "22"]
    shown = [line[1] for line in said[first:] if line]
    assert shown == [*(f"r{i:02}" for i in range(22, 2, -1)), "6"]
    assert said[-1] == ["and", "6", "rollouts", "more", "that", "branched"]
