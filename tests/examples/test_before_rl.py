"""examples/before_rl: its reward knows labels, and each stage gains on held-out tasks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from example_files import load_module

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
