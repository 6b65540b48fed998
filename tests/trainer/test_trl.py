"""The same in TRL: advantages, losses with their gradients, log-probs and metrics.

TRL is in the dev extra, so these tests run where that is installed. AGENTRL_TRL_PYTHON names
another Python to run TRL with; where there is neither they are skipped:

    uv venv /tmp/trl && uv pip install --python /tmp/trl 'trl>=1.16,<2' peft
    AGENTRL_TRL_PYTHON=/tmp/trl/bin/python pytest tests/trainer/test_trl.py

TRL 1.16 has no PPO with a value function, no DPPO, no MaxRL and no credit by turn: those have their
references in test_losses.py and test_advantages.py alone, as the off-policy correction has. Where
the two differ by design, the test says so and checks the difference.
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
from agentrl_trainer.data.advantages import CreditSettings, Scaling, group_advantages, whiten_groups
from agentrl_trainer.data.batch_assembly import LengthNormalization, normalize_lengths
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.losses import LOSSES
from agentrl_trainer.learner.preference_losses import mismatched, pair_loss
from agentrl_trainer.learner.reward_head import pair_scores_loss, score_row

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


def close(found: Any, expected: Any) -> None:
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


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
    mine = [group_advantages(group, CreditSettings(**how)) for group in given]
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
    mine = [group_advantages(group, CreditSettings(estimator=trainer)) for group in given]
    close([[value or 0.0 for value in group.advantages] for group in mine], theirs["advantages"])
    for group, earned in zip(mine, given, strict=True):
        reasons = [why is SkipReason.NO_REWARD for why in group.skipped]
        assert reasons == [math.isnan(reward) for reward in earned]
    assert mine[1].skipped[2] is SkipReason.SMALL_GROUP  # no other member to compare with


def test_whitening_over_the_step_is_trls(ask: Ask) -> None:
    given = rewards(5)
    args = {"normalize_advantages": True}
    theirs = ask("advantages", trainer="rloo", args=args, rewards=given)["advantages"]
    rloo = [group_advantages(group, CreditSettings(estimator="rloo")) for group in given]
    mine = whiten_groups(rloo, Scaling(ddof=1, epsilon=1e-4))
    close([group.advantages for group in mine], theirs)
    # With a group in which all earned the same, TRL counts its zeros in the deviation; we do not.
    constant = [*given, [1.0] * 5]
    theirs = ask("advantages", trainer="rloo", args=args, rewards=constant)["advantages"]
    assert abs(theirs[0][0]) > 1.05 * abs(mine[0].advantages[0] or 0.0)
    extended = [*rloo, group_advantages(constant[-1], CreditSettings(estimator="rloo"))]
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
DRAW = torch.Generator().manual_seed(0)
LOGPROBS = -torch.rand(4, 9, dtype=torch.float64, generator=DRAW) - 0.5
OLD, REFERENCE = LOGPROBS + 0.3 * torch.randn(2, 4, 9, dtype=torch.float64, generator=DRAW)
MASK = torch.arange(9) < torch.tensor([9, 4, 7, 1])[:, None]
ADVANTAGES = torch.tensor([1.2, -0.7, -0.9, 0.4], dtype=torch.float64)


def weights(how: LengthNormalization) -> torch.Tensor:
    """The weights of the learner's loss, [rows, longest]."""
    columns = [[0.0] * 10 for _ in range(2)]
    datums = [TrainingRow([0] * 10, [False, *row], *columns) for row in MASK.tolist()]
    weighted = normalize_lengths(datums, list("abcd"), how, CONSTANT)
    found = [row.extra.get("weights", [1.0] * 10)[1:] for row in weighted]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("name", list(CASES))
def test_value_gradient_and_metrics_are_trls(ask: Ask, name: str) -> None:
    args, loss, config, how = CASES[name]
    columns = {
        "logprobs": LOGPROBS, "old": OLD, "reference": REFERENCE, "mask": MASK,
        "advantages": ADVANTAGES,
    }  # fmt: skip
    given = {name: column.tolist() for name, column in columns.items()}
    theirs = ask("loss", args=args, batch=given)
    lp = LOGPROBS.clone().requires_grad_()
    total, sums = LOSSES[loss](
        lp[MASK],
        OLD[MASK],
        ADVANTAGES[:, None].expand_as(lp)[MASK],
        config,
        sequences=torch.arange(4)[:, None].expand_as(MASK)[MASK],
        weights=weights(how)[MASK],
        reference=REFERENCE[MASK],
    )
    value = total / MASK.sum()
    (gradient,) = torch.autograd.grad(value, lp)
    per_token = {name: float(found) / int(MASK.sum()) for name, found in sums.items()}
    assert torch.tensor(theirs["gradient"]).abs().max() > 0.01
    close(gradient, theirs["gradient"])
    if name != "unbiased kl":  # we report the estimator itself, TRL its product with the ratio
        close(value.detach(), theirs["loss"])
    if name == "kl":
        assert per_token["kl_reference"] == pytest.approx(theirs["metrics"]["kl"], rel=1e-9)
    # TRL's region counts neither what cispo clips of bad tokens, nor the second side of the clip,
    # and sequences rather than their tokens.
    if loss == "ppo" and name != "two-sided clip":
        clipped = theirs["metrics"]["clip_ratio/region_mean"]
        assert per_token["clipped"] == pytest.approx(clipped, rel=1e-6)
        assert clipped > 0


# ---- pairs of answers

# our loss: TRL's, and its arguments
PREFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("sigmoid", {"loss_types": ["sigmoid"], "beta": 0.3}),
    "ipo": ("ipo", {"loss_types": ["ipo"], "beta": 0.7}),
    "kto": ("kto", {"beta": 0.2}),
    "orpo": ("orpo", {"beta": 0.4}),
    "simpo": ("simpo", {"beta": 2.0, "simpo_gamma": 0.6}),
}
# Rows of pairs, chosen and rejected in turn.
PAIR_LOGPROBS = torch.cat([LOGPROBS, LOGPROBS + 0.4], 1)[[0, 2, 1, 3]] * 0.7
PAIR_MASK = torch.arange(18) < torch.tensor([18, 5, 3, 11])[:, None]
PAIR_REFERENCE = PAIR_LOGPROBS + 0.1 * torch.randn(4, 18, dtype=torch.float64, generator=DRAW)


@pytest.mark.parametrize("name", list(PREFERENCES))
@pytest.mark.parametrize("kl", [0.8, -0.8])  # TRL's and ours is never negative
def test_preference_losses_are_trls(ask: Ask, name: str, kl: float) -> None:
    theirs_name, args = PREFERENCES[name]
    logprobs = PAIR_LOGPROBS.where(PAIR_MASK, 0.0)
    reference = PAIR_REFERENCE.where(PAIR_MASK, 0.0)
    batch = {
        "chosen": logprobs[0::2], "rejected": logprobs[1::2],
        "chosen_mask": PAIR_MASK[0::2], "rejected_mask": PAIR_MASK[1::2],
        "reference_chosen": reference[0::2].sum(1), "reference_rejected": reference[1::2].sum(1),
        "mismatched": torch.full((4,), -3.0), "reference_mismatched": torch.full((4,), -3.0 - kl),
    }  # fmt: skip
    given = {key: value.tolist() for key, value in batch.items()}
    theirs = ask("preference", loss=theirs_name, args=args, batch=given)
    rows = [
        TrainingRow([0] * 19, [False, *mask], *[[0.0] * 19] * 2, extra={"reference": [0.0, *known]})
        for mask, known in zip(PAIR_MASK.tolist(), reference.tolist(), strict=True)
    ]
    lp = torch.cat([torch.zeros(4, 1, dtype=torch.float64), logprobs], 1).requires_grad_()
    function = pair_loss(name, args["beta"], gamma=args.get("simpo_gamma", 1.0), kl=max(kl, 0.0))
    loss, metrics = function(rows, list(lp * 1.0))
    (gradient,) = torch.autograd.grad(loss, lp)
    # In the learner the log-probs beyond the mask are constants.
    trained = torch.stack([PAIR_MASK[0::2], PAIR_MASK[1::2]])
    ours = torch.stack([gradient[0::2, 1:], gradient[1::2, 1:]]) * trained
    # ORPO's odds and all metrics are float32 in TRL.
    torch.testing.assert_close(loss.item(), theirs["loss"], rtol=1e-6, atol=1e-6)
    expected = torch.tensor(theirs["gradient"], dtype=torch.float64) * trained
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for key, value in metrics.items():
        if key in theirs["metrics"]:
            assert value == pytest.approx(theirs["metrics"][key], abs=1e-6), key
        else:
            assert (name, key) == ("kto", "rewards/accuracies")


def test_mismatched_answers_stand_behind_the_prompts_of_the_next_pair() -> None:
    texts = ([1, 2, 3, 4], [1, 2, 5], [6, 7, 8], [6, 9])
    masks = ([0, 0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1])
    rows = [
        TrainingRow(list(text), [bool(on) for on in mask], *[[-1.0] * len(text)] * 2)
        for text, mask in zip(texts, masks, strict=True)
    ]
    made = mismatched(rows)
    assert [row.tokens for row in made] == [[1, 2, 7, 8], [1, 2, 9], [6, 3, 4], [6, 5]]
    assert [row.trained for row in made] == [1, 1, 2, 1]
    late = [TrainingRow([1] * 5, [False] * 4 + [True], *[[0.0] * 5] * 2)] * 2
    early = [TrainingRow([2] * 5, [False] + [True] * 4, *[[0.0] * 5] * 2)] * 2
    made = mismatched([*late, *early])  # none becomes longer than all
    assert [row.tokens for row in made] == [[1, 1, 1, 1, 2]] * 2 + [[2, 1]] * 2
    assert [len(row.mask) for row in made] == [5, 5, 2, 2]


def test_bradley_terry_is_trls(ask: Ask) -> None:
    chosen, rejected = [1.3, -0.2, 4.0], [0.9, 0.1, -30.0]
    theirs = ask("bradley_terry", chosen=chosen, rejected=rejected)
    both = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    rows = [score_row([1])] * 6
    loss, metrics = pair_scores_loss(rows, list(both.T.flatten().unsqueeze(1)))
    (gradient,) = torch.autograd.grad(loss, both)
    close(loss.detach(), theirs["loss"])
    close(gradient.flatten(), theirs["gradient"])
    for ours, trls in {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}.items():
        assert metrics[ours] == pytest.approx(theirs["metrics"][trls], rel=1e-6)
