"""The same losses in TRL, which the dev extra installs; AGENTRL_TRL_PYTHON names another Python."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_trainer.batches import Datum
from agentrl_trainer.losses import LOSSES
from agentrl_trainer.step import LengthNormalization, normalize_lengths

PYTHON = os.environ.get("AGENTRL_TRL_PYTHON") or (sys.executable if find_spec("trl") else None)
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="no TRL here, and AGENTRL_TRL_PYTHON names no Python with it"
)

CONSTANT = 16
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
TRL_CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}

# name: TRL's arguments; our loss, its options, and what it is a mean over.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, float | str], LengthNormalization]] = {
    "grpo": ({"loss_type": "grpo", **TRL_CLIP}, "ppo", CLIP, "sequence"),
    "dapo": ({"loss_type": "dapo", **TRL_CLIP}, "ppo", CLIP, "token"),
    "bnpo": ({"loss_type": "bnpo", **TRL_CLIP}, "ppo", CLIP, "token"),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": CONSTANT, **TRL_CLIP},
        "ppo",
        CLIP,
        "constant",
    ),
    "two-sided clip": (
        {"loss_type": "dapo", "delta": 1.5, **TRL_CLIP},
        "ppo",
        {**CLIP, "dual_clip_threshold": 1.5},
        "token",
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.4},
        "cispo",
        {"clip_low_threshold": 0.0, "clip_high_threshold": 1.4},
        "token",
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.08,
        },
        "gspo",
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.08},
        "sequence",
    ),
    "kl": (
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False, **TRL_CLIP},
        "ppo",
        {**CLIP, "kl_coef": 0.3, "kl_estimator": "k3", "kl_gradient": "direct"},
        "token",
    ),
    # TRL differentiates ratio * k3, which comes to the same gradient as ours of any estimator.
    "unbiased kl": (
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True, **TRL_CLIP},
        "ppo",
        {**CLIP, "kl_coef": 0.3, "kl_gradient": "unbiased"},
        "token",
    ),
}
LENGTHS = [9, 4, 7, 1]


def batch() -> dict[str, Any]:
    rng = random.Random(0)
    width = max(LENGTHS)

    def rows(spread: float, around: list[list[float]] | None = None) -> list[list[float]]:
        return [
            [
                (around[i][t] if around else -rng.expovariate(1.0) - 0.5) + rng.gauss(0, spread)
                for t in range(width)
            ]
            for i in range(len(LENGTHS))
        ]

    logprobs = rows(0.0)
    return {
        "logprobs": logprobs,
        "old": rows(0.3, logprobs),
        "reference": rows(0.3, logprobs),
        "mask": [[t < length for t in range(width)] for length in LENGTHS],
        "advantages": [1.2, -0.7, -0.9, 0.4],
    }


@cache
def trl() -> dict[str, Any]:
    """All cases in one process: importing TRL takes seconds."""
    cases = [{**batch(), "args": args} for args, *_ in CASES.values()]
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("trl_losses.py"))],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_value_and_gradient_are_trls(name: str) -> None:
    _, loss, config, how = CASES[name]
    given = batch()
    mask = torch.tensor(given["mask"])
    columns = {key: torch.tensor(given[key], dtype=torch.float64) for key in ("old", "reference")}
    lp = torch.tensor(given["logprobs"], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(given["advantages"], dtype=torch.float64)[:, None].expand_as(lp)

    datums = [
        Datum([0] * 10, [False, *row], [0.0] * 10, [0.0] * 10, extra={}) for row in given["mask"]
    ]
    weighted = normalize_lengths(datums, list("abcd"), how, CONSTANT)
    weights = torch.tensor(
        [d.extra.get("weights", [1.0] * 10)[1:] for d in weighted], dtype=torch.float64
    )
    total, _ = LOSSES[loss](
        lp,
        columns["old"],
        advantages,
        mask,
        config,
        weights=weights,
        reference=columns["reference"],
    )
    value = total / mask.sum()
    value.backward()
    expected = trl()[name]
    assert lp.grad is not None
    assert torch.tensor(expected["gradient"]).abs().max() > 0.01
    torch.testing.assert_close(
        lp.grad, torch.tensor(expected["gradient"], dtype=torch.float64), rtol=1e-5, atol=1e-7
    )
    if name != "unbiased kl":  # we report the estimator itself, TRL its product with the ratio
        assert value.item() == pytest.approx(expected["loss"], rel=1e-5)
