"""The same quantities in tinker-cookbook.

It wants transformers up to 5.5.4 (0.5.8 does), so it cannot live in the dev extra; ``make test``
installs it all the same, beside ours, which what is called here works with (scripts/lock.py).
AGENTRL_TEST_TINKER_PYTHON names another Python to run it with, one with the transformers it asks
for, say; where there is neither these tests are skipped:

    uv venv /tmp/tinker
    uv pip install --python /tmp/tinker 'tinker>=0.38' 'tinker-cookbook[math-rl]==0.5.8'
    AGENTRL_TEST_TINKER_PYTHON=/tmp/tinker/bin/python pytest tests/trainer/test_tinker_cookbook.py

The cookbook rounds to float32, so the numbers given to both sides are float32 to begin with. The
losses themselves are computed by Tinker's servers and are in neither package: only their names can
be compared here. Where the two differ by design, the test says so and checks the difference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from call_records import make, rollout
from peer import Ask, peer, python_with

from agentrl.cli.eval import score
from agentrl_tracer.schemas import Call, Reward, Rollout, SkipReason
from agentrl_trainer.client import AdamParams, Datum, ModelInput, ServiceClient
from agentrl_trainer.client.rows import to_row
from agentrl_trainer.data.advantages import (
    CreditSettings,
    discounted_returns,
    group_advantages,
    token_advantages,
)
from agentrl_trainer.data.batch_assembly import StepBatch, StepSettings, assemble, normalize_lengths
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.loss_options import KlOptions
from agentrl_trainer.learner.losses import LOSSES, kl_penalty
from agentrl_trainer.learner.optimizers import schedule_factor

PYTHON = python_with("tinker_cookbook", "AGENTRL_TEST_TINKER_PYTHON")
pytestmark = [
    pytest.mark.tinker,
    pytest.mark.timeout(400),  # on a busy machine the import alone can take minutes
    pytest.mark.skipif(
        PYTHON is None,
        reason="no tinker-cookbook here, and AGENTRL_TEST_TINKER_PYTHON names no Python with it",
    ),
]
SETTINGS = StepSettings(adapters=frozenset({"policy"}), max_length=10_000)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    assert PYTHON is not None
    script = Path(__file__).parents[1] / "support" / "tinker_cookbook_formulas.py"
    with peer(PYTHON, script, tmp_path_factory.mktemp("cookbook")) as ask:
        yield ask


def single(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))


def close(found: Any, expected: Any, rel: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=rel,
        atol=1e-7,
    )


# ---- records that both sides read: groups of members, each with turns and a final reward

Turn = dict[str, Any]
Member = dict[str, Any]


def turn(rng: random.Random, prompt: list[int]) -> Turn:
    count = rng.choice([1, 1, 2, 5])
    return {
        "prompt": prompt,
        "response": tokens(rng, count),
        "logprobs": [single(-rng.expovariate(1.0) - 0.01) for _ in range(count)],
        "reward": rng.choice([0.0, 0.0, 0.25, -0.5]),
    }


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 50_000) for _ in range(count)]


def whole(turn: Turn) -> list[int]:
    return turn["prompt"] + turn["response"]


def conversation(rng: random.Random, root: list[int]) -> list[Turn]:
    """Turns that append (now and then nothing), rewrite history, branch off, or ask again."""
    turns = [turn(rng, root)]
    continued: list[Turn] = []
    for _ in range(rng.randrange(5)):
        how = rng.choice(["append", "append", "append", "rewrite", "branch", "again"])
        if how == "append":
            prompt = whole(turns[-1]) + tokens(rng, rng.choice([0, 1, 4]))
            continued.append(turns[-1])
        elif how == "branch" and continued:
            # From a turn that already goes on elsewhere: the cookbook looks at neighbors only.
            prompt = whole(rng.choice(continued)) + tokens(rng, 3)
        elif how == "again":
            prompt = list(turns[-1]["prompt"])
        else:
            prompt = tokens(rng, rng.choice([1, 6]))
        turns.append(turn(rng, prompt))
    return turns


def groups(seed: int) -> list[list[Member]]:
    rng = random.Random(seed)
    made: list[list[Member]] = []
    for size in (1, 2, 4, 8):
        root = tokens(rng, rng.choice([1, 7]))
        group = [
            {"turns": conversation(rng, root), "final": rng.choice([0.0, 1.0, 2.5, -1.0])}
            for _ in range(size)
        ]
        made.append(group)
    # Everybody earned the same, for the same turns.
    alike = [{"turns": [turn(rng, tokens(rng, 3))], "final": 1.0} for _ in range(3)]
    for member in alike:
        member["turns"][0]["reward"] = 0.0
    return [*made, alike]


def total(member: Member) -> float:
    return sum(turn["reward"] for turn in member["turns"]) + member["final"]


def ours(made: list[list[Member]]) -> StepBatch:
    """The same as records of a step, through the function that ``agentrl train`` uses."""
    rollouts: list[Rollout] = []
    calls: list[Call] = []
    rewards: list[Reward] = []
    for g, group in enumerate(made):
        for m, member in enumerate(group):
            name = f"{g}-{m}"
            attempt = f"{name}-a"
            rollouts.append(rollout(name, f"group{g}"))
            for t, turn in enumerate(member["turns"]):
                one = f"{name}-{t}"
                calls.append(
                    make(
                        one, turn["prompt"], turn["response"], t, rollout_id=name,
                        attempt_id=attempt, response_logprobs=turn["logprobs"], adapter="policy",
                    )
                )  # fmt: skip
                rewards.append(
                    Reward(attempt, name, "turn", turn["reward"], f"{one}-r", response_id=one)
                )
            rewards.append(Reward(attempt, name, "final", member["final"], f"{name}-r"))
    return assemble(rollouts, calls, rewards, SETTINGS)


def as_row(theirs: dict[str, Any]) -> TrainingRow:
    """Their datum, as our client API understands it."""
    inputs = {name: values for name, values in theirs.items() if name != "model_input"}
    return to_row(
        Datum(ModelInput.from_ints(theirs["model_input"]), inputs), "policy", "importance_sampling"
    )


def same_rows(found: list[TrainingRow], expected: list[TrainingRow]) -> None:
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    assert [row.mask for row in found] == [row.mask for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        close(mine.logprobs, theirs.logprobs)
        close(mine.advantages, theirs.advantages)


# ---- advantages


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_compute_advantages(ask: Ask, seed: int) -> None:
    rng = random.Random(seed)
    rewards = [[rng.gauss(0, 3) for _ in range(size)] for size in (2, 3, 8, 64)]
    rewards += [[1.0], [0.0, 0.0, 0.0], [1e6, 1e6 + 1.0], [0.0, 0.0, 0.0, 1.0]]
    mine = [group_advantages(group, CreditSettings()) for group in rewards]
    for group, theirs in zip(mine, ask("advantages", rewards=rewards), strict=True):
        close(group.advantages, theirs)
    # A difference by design: what carries no signal is skipped, with its reason. Theirs trains, on
    # zeros, unless the group is filtered out before.
    reasons = [set(group.skipped) for group in mine]
    assert reasons[4:6] == [{SkipReason.SMALL_GROUP}, {SkipReason.ZERO_ADVANTAGE}]
    assert all(why == {None} for why in reasons[:4] + reasons[6:])


# ---- from turns to datums


@pytest.mark.parametrize("seed", range(12))
def test_datums_are_those_of_assemble_training_data(ask: Ask, seed: int) -> None:
    made = groups(seed)
    batch = ours(made)
    theirs = [as_row(datum) for datum in ask("training_data", groups=made)]
    assert len(theirs) > 5
    same_rows(batch.rows, theirs)
    # What we train on is a datum of theirs.
    for mine, datum in zip(batch.rows, ask("training_data", groups=made), strict=True):
        assert (mine.tokens[:-1], mine.tokens[1:]) == (datum["model_input"], datum["target_tokens"])
        sampled = [q if on else 0.0 for q, on in zip(mine.logprobs, mine.mask, strict=True)]
        close(sampled[1:], datum["logprobs"])


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_compute_trajectory_metrics(ask: Ask, seed: int) -> None:
    made = groups(seed)
    batch, theirs = ours(made), ask("trajectory_metrics", groups=made)
    mine = batch.metrics()
    assert mine["reward/mean"] == pytest.approx(theirs["env/all/reward/total"], rel=1e-9)
    mixed = theirs["env/all/by_group/frac_mixed"] * len(made)
    assert mine["groups/used"] == pytest.approx(mixed)
    constant = theirs["env/all/by_group/frac_all_good"] + theirs["env/all/by_group/frac_all_bad"]
    # A group of one is constant for them; for us it has a reason of its own.
    alike = mine["groups/zero_advantage"] + mine["groups/small_group"]
    assert alike == pytest.approx(constant * len(made))
    assert len(batch.trained) + len(batch.skipped) == theirs["env/all/total_turns"]
    assert len(batch.rewards) == theirs["env/all/total_episodes"]
    kept = [group for group in made if len({round(total(one), 9) for one in group}) > 1]
    sampled = ask("trajectory_metrics", groups=kept)["env/all/total_ac_tokens"]
    assert sum(datum.trained for datum in batch.rows) == sampled


# ---- the KL to the sampler, to a reference, to a teacher


def rows(seed: int, lengths: tuple[int, ...] = (2, 3, 9, 40)) -> list[dict[str, Any]]:
    """Sequences of several turns; log-probs and advantages belong to all but the first token."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for length in lengths:
        targets = length - 1
        mask = [1.0 if rng.random() < 0.6 else 0.0 for _ in range(targets)]
        mask[-1] = 1.0
        advantage = single(rng.gauss(0, 1))
        made.append(
            {
                "tokens": tokens(rng, length),
                "mask": mask,
                "logprobs": [single(-rng.expovariate(1.0)) * on for on in mask],
                "advantages": [advantage * on for on in mask],
            }
        )
    return made


def scores(seed: int, made: list[dict[str, Any]], spread: float = 0.3) -> list[list[float | None]]:
    """Another model's log-probs of the same sequences; the first token has none."""
    rng = random.Random(seed + 1000)
    return [
        [None, *(single(min(q, -0.01) - abs(rng.gauss(0, spread))) for q in row["logprobs"])]
        for row in made
    ]


def padded(made: list[list[float]]) -> torch.Tensor:
    width = max(map(len, made))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in made], dtype=torch.float64)


def columns(made: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sampler's log-probs, advantages and mask, [rows, longest]."""
    names = ("logprobs", "advantages", "mask")
    sampled, advantages, mask = (padded([row[name] for row in made]) for name in names)
    return sampled, advantages, mask.bool()


@pytest.mark.parametrize("seed", range(4))
def test_kl_and_entropy_are_those_of_compute_kl_sample_train(ask: Ask, seed: int) -> None:
    made = rows(seed)
    others = [[0.0 if lp is None else lp for lp in row[1:]] for row in scores(seed, made)]
    theirs = ask("kl_sample_train", rows=made, training=others)
    sampled, advantages, mask = columns(made)
    lp = padded(others)
    _, sums = LOSSES["importance_sampling"](lp[mask], sampled[mask], advantages[mask], {})
    count = int(sums["tokens"])
    k1 = float(sums["kl_k1"]) / count
    assert k1 == pytest.approx(theirs["optim/kl_sample_train_v1"], rel=1e-6)
    nothing = torch.zeros_like(lp)
    k2 = kl_penalty(lp, sampled, nothing, KlOptions(1.0, "k2", "direct"))
    assert float(k2[mask].mean()) == pytest.approx(theirs["optim/kl_sample_train_v2"], rel=1e-6)
    # They report the sampler's entropy, we the trainer's: apart by the first estimate of the KL.
    entropy = -float(sums["logprob"]) / count
    assert entropy == pytest.approx(theirs["optim/entropy"] + k1, rel=1e-6)
    # The same formula, of the policy after the update.
    after = ask("post_kl", rows=made, scores=scores(seed, made))
    assert k1 == pytest.approx(after["kl_pre_post_v1"], rel=1e-6)


def gradient(
    sampled: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: Any, **more: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of importance sampling on policy, with respect to the log-probs."""
    lp = sampled.clone().requires_grad_()
    columns = {name: column[mask] for name, column in more.items()}
    given = (lp[mask], sampled[mask], advantages[mask])
    loss, sums = LOSSES["importance_sampling"](*given, config, **columns)
    return torch.autograd.grad(loss, lp)[0], sums


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("coef", [0.1, 2.0])
def test_kl_to_a_reference_has_the_gradient_of_incorporate_kl_penalty(
    ask: Ask, seed: int, coef: float
) -> None:
    """Theirs puts the KL into the advantages, ours into the loss. On policy that is the same, up to
    their baseline: they centre the penalty over the batch, which adds coef * KL everywhere."""
    made = rows(seed)
    known = scores(seed, made)
    theirs = ask("kl_penalty", rows=made, scores=known, coef=coef)
    sampled, advantages, mask = columns(made)
    reference = padded([[lp or 0.0 for lp in row[1:]] for row in known])
    config = {"kl_coef": coef, "kl_estimator": "k1"}
    mine, sums = gradient(sampled, advantages, mask, config, reference=reference)
    mean = theirs["metrics"]["kl_policy_base"]
    assert float(sums["kl_reference"]) / int(sums["tokens"]) == pytest.approx(mean, rel=1e-6)

    penalised = padded([datum["advantages"] for datum in theirs["data"]])
    expected, _ = gradient(sampled, penalised, mask, {})
    assert not torch.allclose(mine, expected, atol=1e-3)
    close((mine - coef * mean * mask).tolist(), expected.tolist())


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
def test_discounted_sums_are_theirs(ask: Ask, discount: float) -> None:
    rng = random.Random(5)
    for length in (1, 2, 30):
        rewards = [rng.gauss(0, 1) for _ in range(length)]
        theirs = ask("discounted", values=rewards, discount=discount)
        close(discounted_returns(rewards, discount), theirs, rel=1e-12)
        # Advantages of a value function that predicts 0, with lambda 1.
        mine, _ = token_advantages(rewards, [0.0] * length, discount=discount, trace=1.0)
        close(mine, theirs, rel=1e-12)


def test_a_student_is_taught_what_on_policy_distillation_teaches(
    ask: Ask, recipe: Any, tmp_path: Path
) -> None:
    """Our recipe's datums, by the model that ships, and their reverse KL of the same log-probs."""
    distillation, sft = recipe("distillation"), recipe("sft")
    with ServiceClient(folder=tmp_path) as service:
        tutor = service.create_lora_training_client("agentrl-tiny", rank=4, seed=1, name="teacher")
        sft.fine_tune(tutor, 1, 4, 1e-2)
        teacher = tutor.save_weights_and_get_sampling_client()
        student = service.create_sampling_client(base_model="agentrl-tiny")
        data, divergence = distillation.rollouts(student, teacher, step=1, batch=3, group=2)
        mine = [to_row(datum, "policy", "importance_sampling") for datum in data]
        known = teacher.compute_logprobs_batch([row.tokens for row in mine]).result()
    made = [
        {
            "tokens": row.tokens,
            "mask": [float(on) for on in row.mask[1:]],
            "logprobs": row.logprobs[1:],
            "advantages": [0.0] * (len(row.tokens) - 1),
        }
        for row in mine
    ]
    theirs = ask("distillation", rows=made, scores=known)
    assert divergence == pytest.approx(theirs["metrics"]["teacher_kl"], rel=1e-6)
    assert abs(divergence) > 1e-4
    for row, datum in zip(mine, theirs["data"], strict=True):
        close(row.advantages[1:], datum["advantages"])


# ---- preferences and supervised fine-tuning


def test_supervised_loss_is_compute_mean_nll(ask: Ask, tmp_path: Path) -> None:
    """What training reports, of the model that ships, and theirs of the log-probs it returns."""
    rng = random.Random(6)
    data, given = [], []
    for length in (2, 5, 30):
        row = [rng.randrange(300, 2000) for _ in range(length)]
        weights = [single(rng.choice([0.0, 1.0, 0.25])) for _ in row]
        weights[-1] = 1.0
        data.append(supervised(row, weights))
        given.append(weights[1:])
    total_weight = sum(map(sum, given))
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client("agentrl-tiny", rank=4, seed=0)
        done = client.forward_backward(data, "cross_entropy", normalize_by=total_weight).result()
        client.optim_step(AdamParams(learning_rate=1e-3)).result()
    logprobs = [output["logprobs"].tolist() for output in done.loss_fn_outputs]
    theirs = ask("mean_nll", logprobs=logprobs, weights=given)
    assert done.metrics["loss:sum"] == pytest.approx(theirs, rel=1e-6)
    assert theirs > 1


def supervised(row: list[int], weights: list[float]) -> Datum:
    inputs = {"target_tokens": row[1:], "weights": weights[1:]}
    return Datum(ModelInput.from_ints(row[:-1]), inputs)


@pytest.mark.parametrize("length", [2, 9])
def test_supervised_datums_are_theirs(ask: Ask, length: int) -> None:
    rng = random.Random(length)
    row = tokens(rng, length)
    weights = [0.0] * (length // 2) + [1.0] * (length - length // 2)
    theirs = ask("supervised", tokens=row, weights=weights, reduction="none")
    mine = to_row(supervised(row, weights), "policy", "cross_entropy")
    assert mine.tokens == [*theirs["model_input"], theirs["target_tokens"][-1]]
    assert mine.tokens[1:] == theirs["target_tokens"]
    assert mine.advantages[1:] == theirs["weights"]


def test_the_mean_over_sequences_has_the_weights_of_their_mean_reduction(ask: Ask) -> None:
    """Theirs divides a row's weights by their sum, and sums over rows; ours is the mean over rows,
    in weights whose sum over the step is the number of its tokens."""
    rng = random.Random(9)
    made = [tokens(rng, length) for length in (2, 5, 12)]
    masks = [[0.0] * (len(row) // 2) + [1.0] * (len(row) - len(row) // 2) for row in made]
    datums = [
        TrainingRow(row, [on > 0 for on in mask], [0.0] * len(row), mask)
        for row, mask in zip(made, masks, strict=True)
    ]
    weighted = normalize_lengths(datums, ["a", "b", "c"], "sequence")
    count = sum(datum.trained for datum in datums)
    for row, mask, mine in zip(made, masks, weighted, strict=True):
        theirs = ask("supervised", tokens=row, weights=mask, reduction="mean")
        own = [weight * on for weight, on in zip(mine.extra["weights"][1:], mask[1:], strict=True)]
        close([weight * len(made) / count for weight in own], theirs["weights"])


# ---- settings and evaluation


@pytest.mark.parametrize("steps", [1, 2, 17])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_fall_as_theirs(ask: Ask, name: Any, steps: int) -> None:
    """They count steps from 0, we from 1. Warm-up is ours alone."""
    theirs = ask("schedule", name=name, steps=steps)
    close([schedule_factor(name, step + 1, steps) for step in range(steps)], theirs, rel=1e-12)


def test_pass_at_k_is_theirs(ask: Ask) -> None:
    rng = random.Random(11)
    samples = 8
    rewards = {f"task{t}": [float(rng.random() < t / 6) for _ in range(samples)] for t in range(7)}
    rollouts, emitted = [], []
    for task, outcomes in rewards.items():
        for i, value in enumerate(outcomes):
            name = f"{task}-{i}"
            rollouts.append(replace(rollout(name, task), task_id=task))
            emitted.append(Reward(f"{name}-a", name, "reward", value, name))
    mine = score(rollouts, emitted, 1.0).pass_at
    assert sorted(mine) == [1, 2, 4, 8]
    close(list(mine.values()), ask("pass_at_k", rewards=rewards, ks=list(mine)), rel=1e-12)


def test_losses_have_the_names_of_the_sdk(ask: Ask) -> None:
    named = set(ask("losses"))
    # ``custom`` is forward_backward_custom.
    assert named - LOSSES.keys() == {"custom", "stable_reinforce"}
    assert LOSSES.keys() - named == {"dppo"}
