"""The same quantities in tinker-cookbook.

It wants transformers up to 5.5.4 (0.5.8 does), so it cannot live in the dev extra; ``make test``
installs it all the same, beside ours, which what is called here works with (scripts/lock.py).
AGENTRL_TEST_TINKER_PYTHON names another Python to run it with, one with the transformers it asks
for, say; where there is neither these tests are skipped:

    uv venv /tmp/tinker
    uv pip install --python /tmp/tinker 'tinker>=0.38' 'tinker-cookbook[math-rl]==0.5.8'
    AGENTRL_TEST_TINKER_PYTHON=/tmp/tinker/bin/python pytest tests/trainer/test_tinker_cookbook.py

The losses themselves are computed by Tinker's servers and are in neither package: only their names
can be compared here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from call_records import make, rollout
from peer import Ask, peer, python_with

from agentrl_tracer.schemas import Call, Reward, Rollout
from agentrl_trainer.data.batch_assembly import StepBatch, StepSettings, assemble
from agentrl_trainer.learner.losses import LOSSES

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


# ---- records that both sides read: groups of members, each with turns and a final reward


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 50_000) for _ in range(count)]


def turn(rng: random.Random, prompt: list[int], reward: float | None = None) -> dict[str, Any]:
    count = rng.choice([1, 1, 2, 5])
    return {
        "prompt": prompt,
        "response": tokens(rng, count),
        "logprobs": [-rng.randrange(1, 999) / 128 for _ in range(count)],
        "reward": rng.choice([0.0, 0.0, 0.25, -0.5]) if reward is None else reward,
    }


def conversation(rng: random.Random, root: list[int]) -> list[dict[str, Any]]:
    """Turns that append (now and then nothing), rewrite history, branch off, or ask again."""
    turns = [turn(rng, root)]
    continued: list[list[int]] = []
    for _ in range(rng.randrange(5)):
        last = turns[-1]["prompt"] + turns[-1]["response"]
        how = rng.choice(["append", "append", "append", "rewrite", "branch", "again"])
        prompt = tokens(rng, rng.choice([1, 6]))
        if how == "append":
            prompt = last + tokens(rng, rng.choice([0, 1, 4]))
            continued.append(last)
        elif how == "branch" and continued:
            # From a turn that already goes on elsewhere: the cookbook looks at neighbors only.
            prompt = rng.choice(continued) + tokens(rng, 3)
        elif how == "again":
            prompt = list(turns[-1]["prompt"])
        turns.append(turn(rng, prompt))
    return turns


def groups(seed: int) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)
    made: list[list[dict[str, Any]]] = []
    for size in (1, 2, 4, 8):
        root, finals = tokens(rng, rng.choice([1, 7])), [0.0, 1.0, 2.5, -1.0]
        members = range(size)
        made.append(
            [{"turns": conversation(rng, root), "final": rng.choice(finals)} for _ in members]
        )
    # All members earned the same.
    alike = [{"turns": [turn(rng, tokens(rng, 3), 0.0)], "final": 1.0} for _ in range(3)]
    return [*made, alike]


def ours(made: list[list[dict[str, Any]]]) -> StepBatch:
    """Assemble the same as records of a step, by the function that ``agentrl train`` uses."""
    rollouts: list[Rollout] = []
    calls: list[Call] = []
    rewards: list[Reward] = []
    for g, group in enumerate(made):
        for m, member in enumerate(group):
            name, attempt = f"{g}-{m}", f"{g}-{m}-a"
            rollouts.append(rollout(name, f"group{g}"))
            for t, one in enumerate(member["turns"]):
                call = make(
                    f"{name}-{t}", one["prompt"], one["response"], t, rollout_id=name,
                    attempt_id=attempt, response_logprobs=one["logprobs"], adapter="policy",
                )  # fmt: skip
                calls.append(call)
                rewards.append(
                    Reward(
                        attempt, name, "turn", one["reward"], f"{call.id}-r", response_id=call.id
                    )
                )
            rewards.append(Reward(attempt, name, "final", member["final"], f"{name}-r"))
    return assemble(rollouts, calls, rewards, SETTINGS)


# ---- from turns to datums


@pytest.mark.parametrize("seed", range(12))
def test_datums_are_those_of_assemble_training_data(ask: Ask, seed: int) -> None:
    made = groups(seed)
    theirs = ask("training_data", groups=made)
    assert len(theirs) > 5
    for mine, datum in zip(ours(made).rows, theirs, strict=True):
        assert (mine.tokens[:-1], mine.tokens[1:]) == (datum["model_input"], datum["target_tokens"])
        assert mine.mask[1:] == [on > 0 for on in datum["mask"]]
        sampled = [q if on else 0.0 for q, on in zip(mine.logprobs, mine.mask, strict=True)]
        assert sampled[1:] == datum["logprobs"]
        assert mine.advantages[1:] == pytest.approx(datum["advantages"], rel=1e-6, abs=1e-7)


def test_losses_have_the_names_of_the_sdk(ask: Ask) -> None:
    named = set(ask("losses"))
    # ``custom`` is forward_backward_custom.
    assert named - LOSSES.keys() == {"custom", "stable_reinforce"}
    assert LOSSES.keys() - named == {"dppo"}
