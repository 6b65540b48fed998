"""What the terminal shows at the end of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console

from agentrl.console.output import print_block
from agentrl.console.report import training_report
from agentrl.console.runs import branched_most
from agentrl.runs.folder import RunFolder
from agentrl.runs.summary import Reply, Summary
from agentrl_tracer.schemas import Accounting, PromptKinds


def reported(
    accounting: Accounting, rewards: list[float | None], steps: int = 3, *,
    folder: Path = Path("runs/x"), width: int = 200,
) -> str:  # fmt: skip
    replies, console = [Reply("user: hi", "no", "[yes]")], Console(width=width)
    summary = Summary(RunFolder(folder), steps, rewards, accounting, [(0, 0.5)], replies, {}, {})
    with console.capture() as capture:
        print_block(training_report(summary), console)
    return capture.get()


def test_every_reason_is_counted_the_most_frequent_first() -> None:
    skipped = {"zero_advantage": 5, "evaluation": 4, "truncated": 2, "no_reward": 9}
    said = reported(Accounting(20, 20, 0, skipped, 0), [None, 1.0, None])
    assert "nothing was learned: 0 of 16 calls trained" in said.splitlines()[0]
    positions = [said.index(words) for words in ("9 no_reward", "5 zero_adv", "2 truncated")]
    assert positions == sorted(positions)
    assert "evaluation" not in said
    assert "+1.00 → +1.00" in said
    # An agent that asked nothing is told where to ask.
    assert "OPENAI_BASE_URL" in reported(Accounting(4, 4, 0, {"evaluation": 4}, 0), [1.0])


def test_the_report_of_a_run_that_trained() -> None:
    said = reported(Accounting(4, 4, 3, {"no_reward": 1}, 0), [None, 0.5, 1.0])
    assert said.splitlines()[0].strip() == "trained"
    assert "+0.50 → +1.00 in 3 steps" in said
    assert "50% → 50%" in said
    assert "[yes]" in said
    # Its goal was reached before the first step.
    assert "nothing" not in reported(Accounting(4, 4, 0, {"evaluation": 4}, 0), [], steps=0)


def test_a_narrow_terminal_cuts_no_paths() -> None:
    folder = Path(f"/{'a-long-name/' * 10}run")
    said = reported(Accounting(1, 1, 1, {}, 0), [1.0], 1, folder=folder, width=80)
    assert f"{folder}/adapter\n" in said
    assert f"{folder}/learning_curve.png\n" in said


def test_the_rollouts_that_branched_most_come_first() -> None:
    branched = [Counter(continued=1, first_call=1, history=i) for i in range(1, 23)]
    groups = [PromptKinds(kinds, 1, f"r{i:02}") for i, kinds in enumerate(branched, 1)]
    groups.append(PromptKinds(Counter(continued=7, first_call=1), 1, "straight"))
    assert branched_most(groups) == "; ".join(f"r{i}: {i} history" for i in range(22, 17, -1))
