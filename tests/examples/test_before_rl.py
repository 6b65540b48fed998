"""examples/before_rl: its reward knows labels, and each stage gains on held-out tasks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from example_files import load_module
from training_run import SUPPORT

from agentrl.cli.runs import rescore_command

STAGES = (
    "SFT on its good rollouts, fresh adapter",
    "DPO on its pairs, fresh adapter",
    "GRPO on the true reward",
    "GRPO from the base on the reward model alone",
)


def test_labeled_tasks_earn_their_true_reward() -> None:
    answers = ["Hi, I am 7.", "I'm 8", "7"]
    traces = [SimpleNamespace(task={"n": 7, "labeled": True}, answer=one) for one in answers]
    assert load_module("before_rl", "taste").taste(traces) == [1.0, 0.0, 0.0]


@pytest.mark.before_rl
@pytest.mark.timeout(1800)
def test_each_stage_gains_on_held_out_tasks(tmp_path: Path) -> None:
    figures = load_module("before_rl", "figures")
    given = Namespace(model="agentrl-tiny", runs=tmp_path)
    found = [figures.measure(given, figures.RECIPES["tiny"], seed) for seed in range(3)]
    means = {name: fmean(one[name] for one in found) for name in found[0]}
    for stage in STAGES:
        assert means[stage] > means["base model"] + 0.2, (stage, found)
    assert means["reward model: held-out pairs told apart"] > 0.6, found


@pytest.mark.before_rl
@pytest.mark.timeout(900)
def test_a_policy_that_games_its_reward_model_is_stopped(tmp_path: Path) -> None:
    """It learned that long answers are good, so the policy forgets what it should say."""
    figures = load_module("before_rl", "figures")
    folder = Path(figures.HERE)
    tasks, held_out = figures.write_tasks(tmp_path)

    def ran(name: str, command: str, **environment: str) -> Path:
        words = [*command.split(), "--runs", str(tmp_path), "--name", name]
        figures.execute(Namespace(model="agentrl-tiny", runs=tmp_path), name, words, **environment)
        return tmp_path / name

    common = f"{figures.COMMON} --seed 0"
    first = ran(
        "first",
        f"train {folder}/player.py:rewarded --tasks {tasks} --steps 6 --batch-size 16 "
        f"--group-size 8 {common}",
    )
    rescore_command(first, rewards=[f"{SUPPORT}/trace_rewards.py:wordy"], replace=True)
    model = ran("model", f"reward-model --from-run {first} --loss regression --held-out 0.25")
    gamed = ran(
        "gamed",
        f"train {folder}/player.py:unrewarded --tasks {tasks} --init-adapter {first} --steps 30 "
        f"--batch-size 8 --group-size 8 {common} --rewards {folder}/taste.py:taste "
        f"--evaluation.tasks {held_out} --evaluation.every 5 --guards.on-collapse stop",
        TASTE=str(model),
    )
    summary = json.loads((gamed / "summary.json").read_text())
    assert summary["ended_by"] == "guards.on_collapse"
    rows = [json.loads(line) for line in (gamed / "metrics.jsonl").read_text().splitlines()]
    scores = [row["reward/mean"] for row in rows if "reward/mean" in row]
    rates = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert scores[-1] > scores[0] + 0.02
    assert rates[-1] < rates[0] - 0.2
