"""Recipes with ``--trainers 2 --shard-base`` make the steps of one trainer, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_data import game, write_lines
from pair_data import write_pairs
from safetensors.torch import load_file

from agentrl.cli.offline import prefer_command, reward_model_command, sft_command
from agentrl.runs.folder import RunFolder
from agentrl_trainer.distributed.ranks import Followers


@pytest.mark.parametrize("command", [sft_command, prefer_command, reward_model_command])
def test_a_spread_base_learns_what_a_whole_one_does(
    command: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, spread = Followers.start, list[bool]()

    def noted(self: Followers) -> Any:
        plan = start(self)
        spread.append(plan.shard)
        return plan

    monkeypatch.setattr(Followers, "start", noted)
    flags = ["--runs", tmp_path, "--rank", 8, "--batch-size", 8, "--epochs", 1, "--every", 2]
    for name, numbers in (("data", range(100, 116)), ("held-out", range(1000, 1004))):
        file = tmp_path / f"{name}.jsonl"
        if command is sft_command:
            write_lines(file, [*map(game, numbers)])
        else:
            write_pairs(file, numbers)
        flags += [f"--{name}", file]
    command(*map(str, [*flags, "--name", "one"]))
    command(*map(str, [*flags, "--name", "two", "--trainers", 2, "--shard-base"]))
    assert spread == [True]
    of_one, of_two = (RunFolder(tmp_path / name) for name in ("one", "two"))
    for metric in ("loss", "grad_norm", "eval/loss"):
        one, two = (
            [row[metric] for row in run.read_metrics() if metric in row] for run in (of_one, of_two)
        )
        assert len(one) == 2
        assert two == pytest.approx(one, rel=1e-4)
    one, two = (load_file(run.adapter / "adapter_model.safetensors") for run in (of_one, of_two))
    for name, value in one.items():
        assert torch.linalg.norm(two[name] - value) <= 1e-3 * torch.linalg.norm(value)
