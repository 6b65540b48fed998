"""The same in TRL: advantages, losses with their gradients, log-probs and metrics.

TRL is in the dev extra, so these tests run where that is installed. AGENTRL_TRL_PYTHON names
another Python to run TRL with; where there is neither they are skipped:

    uv venv /tmp/trl && uv pip install --python /tmp/trl 'trl>=1.16,<2' peft
    AGENTRL_TRL_PYTHON=/tmp/trl/bin/python pytest tests/trainer/test_trl.py

TRL 1.16 has no PPO with a value function, no DPPO, no MaxRL and no credit by turn: those have their
references in test_losses.py and test_advantages.py alone. Where the two differ by design, the test
says so and checks the difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peer import Ask, peer, python_with

from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.data.advantages import Scaling, group_advantages, whiten_groups
from agentrl_trainer.data.batch_assembly import LengthNormalization, normalize_lengths
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import LOSSES

PYTHON = python_with("trl", "AGENTRL_TRL_PYTHON")
pytestmark = [
    pytest.mark.timeout(400),  # on a busy machine the import alone can take minutes
    pytest.mark.skipif(
        PYTHON is None, reason="no TRL here, and AGENTRL_TRL_PYTHON names no Python with it"
    ),
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    assert PYTHON is not None
    script = Path(__file__).parents[1] / "support" / "trl_formulas.py"
    with peer(PYTHON, script, tmp_path_factory.mktemp("trl")) as ask:
        yield ask


def close(found: Any, expected: Any, rel: float = 1e-9) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=rel,
        atol=1e-12,
    )


# ---- advantages


def rewards(seed: int, count: int = 4, size: int = 5) -> list[list[float]]:
    rng = random.Random(seed)
    return [[rng.gauss(group, 2) for _ in range(size)] for group in range(count)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", ["none", "group"])
def test_grpo_advantages_are_trls(ask: Ask, seed: int, scale: str) -> None:
    given = [*rewards(seed), [0.0, 0.0, 0.0, 0.0, 1.0], [2.0] * 5]
    theirs = ask("advantages", trainer="grpo", args={"scale_rewards": scale}, rewards=given)
    how = {"normalize_std": scale == "group", "scaling": Scaling(ddof=1, epsilon=1e-4)}
    mine = [group_advantages(group, **how) for group in given]
    close([group.advantages for group in mine], theirs["advantages"])
    # A difference by design: TRL trains on the zeros of a group in which all earned the same.
    assert {*mine[-1].skipped} == {SkipReason.ZERO_ADVANTAGE}
    assert theirs["metrics"]["frac_reward_zero_std"] == pytest.approx(1 / len(given))


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_missing_reward_leaves_the_group_as_in_trl(ask: Ask, trainer: str) -> None:
    """TRL gives the rollout advantage 0; ours does not train, with a reason."""
    missing = math.nan
    given = [[1.0, missing, 4.0, 0.0], [missing, missing, 2.0, missing], [0.0, 1.0, 1.0, 1.0]]
    args = {"scale_rewards": "none"} if trainer == "grpo" else {}
    theirs = ask("advantages", trainer=trainer, args=args, rewards=given)
    mine = [group_advantages(group, estimator=trainer) for group in given]
    close([[value or 0.0 for value in group.advantages] for group in mine], theirs["advantages"])
    for group, earned in zip(mine, given, strict=True):
        reasons = [why is SkipReason.NO_REWARD for why in group.skipped]
        assert reasons == [math.isnan(reward) for reward in earned]
    assert mine[1].skipped[2] is SkipReason.SMALL_GROUP  # nobody left to compare with


def test_whitening_over_the_step_is_trls(ask: Ask) -> None:
    given = rewards(5)
    args = {"normalize_advantages": True}
    theirs = ask("advantages", trainer="rloo", args=args, rewards=given)["advantages"]
    rloo = [group_advantages(group, estimator="rloo") for group in given]
    mine = whiten_groups(rloo, Scaling(ddof=1, epsilon=1e-4))
    close([group.advantages for group in mine], theirs)
    # With a group in which all earned the same, TRL counts its zeros in the deviation; we do not.
    constant = [*given, [1.0] * 5]
    theirs = ask("advantages", trainer="rloo", args=args, rewards=constant)["advantages"]
    assert abs(theirs[0][0]) > 1.05 * abs(mine[0].advantages[0] or 0.0)
    extended = [*rloo, group_advantages(constant[-1], estimator="rloo")]
    again = whiten_groups(extended, Scaling(ddof=1, epsilon=1e-4))
    close([group.advantages for group in again[:-1]], [group.advantages for group in mine])


# ---- losses

CONSTANT = 16
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
TRL_CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}

# name: TRL's arguments; our loss, its options, and what it is a mean over.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, float | str], LengthNormalization]] = {
    "grpo": ({"loss_type": "grpo", **TRL_CLIP}, "ppo", CLIP, "sequence"),
    "dapo": ({"loss_type": "dapo", **TRL_CLIP}, "ppo", CLIP, "token"),
    "bnpo": ({"loss_type": "bnpo", **TRL_CLIP}, "ppo", CLIP, "token"),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": CONSTANT, **TRL_CLIP},
                "ppo", CLIP, "constant"),
    "two-sided clip": ({"loss_type": "dapo", "delta": 1.5, **TRL_CLIP},
                       "ppo", {**CLIP, "dual_clip_threshold": 1.5}, "token"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.4},
              "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1.4}, "token"),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence",
              "epsilon": 0.05, "epsilon_high": 0.08},
             "gspo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.08}, "sequence"),
    "kl": ({"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False, **TRL_CLIP}, "ppo",
           {**CLIP, "kl_coef": 0.3, "kl_estimator": "k3", "kl_gradient": "direct"}, "token"),
    # TRL differentiates ratio * k3, which comes to the same gradient as ours of any estimator.
    "unbiased kl": (
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True, **TRL_CLIP},
        "ppo", {**CLIP, "kl_coef": 0.3, "kl_gradient": "unbiased"}, "token"),
}  # fmt: skip
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
        "sampled": rows(0.4, logprobs),
        "reference": rows(0.3, logprobs),
        "mask": [[t < length for t in range(width)] for length in LENGTHS],
        "advantages": [1.2, -0.7, -0.9, 0.4],
    }


def value_and_gradient(
    loss: str, config: dict[str, float | str], how: LengthNormalization, **more: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Ours: the loss per token as the learner makes it of ``batch()``, and its sums per token."""
    given = batch() | more
    mask = torch.tensor(given["mask"])
    columns = {
        name: torch.tensor(given[name], dtype=torch.float64)
        for name in ("old", "sampled", "reference")
    }
    lp = torch.tensor(given["logprobs"], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(given["advantages"], dtype=torch.float64)[:, None].expand_as(lp)
    datums = [
        TrainingRow([0] * 10, [False, *row], [0.0] * 10, [0.0] * 10, extra={})
        for row in given["mask"]
    ]
    weighted = normalize_lengths(datums, list("abcd"), how, CONSTANT)
    weights = torch.tensor(
        [d.extra.get("weights", [1.0] * 10)[1:] for d in weighted], dtype=torch.float64
    )
    corrects = config.get("correction", "none") != "none"
    flat = {name: column[mask] for name, column in columns.items()}
    total, sums = LOSSES[loss](
        lp[mask],
        flat["sampled"] if corrects else flat["old"],
        advantages[mask],
        config,
        sequences=torch.arange(len(mask))[:, None].expand_as(mask)[mask],
        weights=weights[mask],
        proximal=flat["old"] if corrects else None,
        reference=flat["reference"],
    )
    value = total / mask.sum()
    value.backward()
    assert lp.grad is not None
    per_token = {name: float(found) / int(mask.sum()) for name, found in sums.items()}
    return value.detach(), lp.grad, per_token


@pytest.mark.parametrize("name", list(CASES))
def test_value_gradient_and_metrics_are_trls(ask: Ask, name: str) -> None:
    args, loss, config, how = CASES[name]
    theirs = ask("loss", args=args, batch=batch())
    value, gradient, per_token = value_and_gradient(loss, config, how)
    assert torch.tensor(theirs["gradient"]).abs().max() > 0.01
    close(gradient, theirs["gradient"])
    if name != "unbiased kl":  # we report the estimator itself, TRL its product with the ratio
        close(value, theirs["loss"])
    if name == "kl":
        assert per_token["kl_reference"] == pytest.approx(theirs["metrics"]["kl"], rel=1e-9)
    # TRL's region counts neither what cispo clips of bad tokens, nor the second side of the clip,
    # and sequences rather than their tokens.
    if loss == "ppo" and name != "two-sided clip":
        clipped = theirs["metrics"]["clip_ratio/region_mean"]
        assert per_token["clipped"] == pytest.approx(clipped, rel=1e-6)
        assert clipped > 0


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.2), (0.8, 1.3), (0.0, 100.0)])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_off_policy_correction_is_trls(
    ask: Ask, level: str, mode: str, low: float, high: float, loss_type: str
) -> None:
    """From rewards and the sampler's log-probs to the gradient: advantages, importance weights of
    the policy before the update, the loss around it, and the KL beside it, which TRL does not
    correct either."""
    earned = [1.0, 0.0, -0.5, 3.0]
    args, loss, config, how = CASES["kl" if loss_type == "dapo" else "cispo"]
    theirs = ask(
        "corrected_loss",
        args={
            **args,
            "scale_rewards": "none",
            "vllm_importance_sampling_mode": f"{level}_{mode}",
            "vllm_importance_sampling_clip_min": low or None,
            "vllm_importance_sampling_clip_max": high,
        },
        batch=batch(),
        rewards=earned,
    )
    bounds = {"correction_low": low, "correction_high": high}
    correction = {"correction": mode, "correction_level": level, **bounds}
    value, gradient, per_token = value_and_gradient(
        loss, {**config, **correction}, how, advantages=group_advantages(earned).advantages
    )
    close(value, theirs["loss"])
    close(gradient, theirs["gradient"])
    assert (per_token["dropped"] > 0) == (high < 100)
    if level == "token":  # the other ones TRL averages over sequences
        mean = theirs["metrics"]["sampling/importance_sampling_ratio/mean"]
        assert per_token["correction"] == pytest.approx(mean, rel=1e-6)
    # The same of the difference between the two engines: ours is reported of the policy at hand,
    # which in a step's first update is the one of before.
    _, _, first = value_and_gradient(loss, {**config, **correction}, how, logprobs=batch()["old"])
    mean = theirs["metrics"]["sampling/sampling_logp_difference/mean"]
    assert first["difference"] == pytest.approx(mean, rel=1e-6)
