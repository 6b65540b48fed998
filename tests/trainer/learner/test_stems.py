"""Long prefixes that micro-batches share, against one micro-batch of everything."""

from __future__ import annotations

import random
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import transformers as hf
from small_learner import CAPS, OTHER_SIZES, SMALL, VOCAB, assert_same, built, gradients, learner

from agentrl_trainer.data.packing import count_tokens, pack
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner

CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # sums are in another order
LONG: dict[str, Any] = {**SMALL, "max_position_embeddings": 512}
qwen3 = partial(built, hf.Qwen3Config(**LONG))
gemma2 = partial(built, hf.Gemma2Config(**LONG, **CAPS, sliding_window=40))
gpt2 = partial(
    built,
    hf.GPT2Config(vocab_size=VOCAB, **OTHER_SIZES | {"n_positions": 512}, initializer_range=0.3),
)
pytestmark = [pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")]


def rollouts(
    system: int = 90,
    task: int = 70,
    *,
    tasks: int = 2,
    size: int = 3,
    turns: int = 2,
    seen: int = 8,
    said: int = 9,
    adapter: str = "default",
) -> list[TrainingRow]:
    """Conversations that share a system prompt, and those of a group its task."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, VOCAB) for _ in range(count)]

    shared, rows = ids(system), list[TrainingRow]()
    for _ in range(tasks):
        own = ids(task)
        for _ in range(size):
            tokens, mask = [*shared, *own], [False] * (system + task)
            for _ in range(turns):
                tokens += ids(seen + said)
                mask += [False] * seen + [True] * said
            columns = [[draw.gauss(0, 1) if on else 0.0 for on in mask] for _ in range(2)]
            rows.append(TrainingRow(tokens, mask, *columns, adapter=adapter))
    return rows


def of_step(trainer: Learner, rows: list[TrainingRow], loss: str) -> tuple[Any, Any, Any]:
    logprobs = [[0.0] * len(row.tokens) for row in rows]
    stats = trainer.forward_backward(rows, loss, logprobs_into=logprobs)
    return logprobs, gradients(trainer), stats


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo"])
@pytest.mark.parametrize("budget", [60, 100, 200])
@pytest.mark.parametrize("build", [qwen3, gemma2, gpt2])
def test_stems_change_nothing(build: Any, budget: int, loss: str) -> None:
    """Stems in stems, some of whose tokens keep activations beside the largest micro-batch."""
    rows = rollouts()
    expected = of_step(learner(build=build, token_budget=10**6, off_start=True), rows, loss)
    trainer = learner(build=build, token_budget=budget, off_start=True)
    paths = [batch.stem.path() for batch in trainer._pack(rows) if batch.stem]
    assert {len(path) for path in paths} == {1 if budget == 200 else 2}
    found = of_step(trainer, rows, loss)
    assert [*chain(*found[0])] == pytest.approx([*chain(*expected[0])], abs=2e-5)
    assert_same(found[1], expected[1], **CLOSE)
    unshared = [batch.input_ids.numel() for batch in trainer._pack(rows)]
    assert max(unshared) <= budget
    assert found[2].tokens_unique == found[2].tokens_total - found[2].tokens_saved
    stems = {stem for batch in trainer._pack(rows) if batch.stem for stem in batch.stem.path()}
    kept = sum(len(stem.tokens) for stem in stems) - found[2].tokens_recomputed
    assert 0 < kept <= len(stems) * (budget - max(unshared))
    for a, b in zip(trainer.forward(rows), found[0], strict=True):
        assert a == pytest.approx(b, abs=2e-5)


def test_each_adapter_has_its_own_stems() -> None:
    rows = [*rollouts(), *rollouts(adapter="other")]
    names = ("default", "other")
    whole = learner(build=qwen3, adapters=names, token_budget=10**6, off_start=True)
    expected = of_step(whole, rows, "importance_sampling")
    trainer = learner(build=qwen3, adapters=names, token_budget=100, off_start=True)
    assert_same(of_step(trainer, rows, "importance_sampling")[1], expected[1], **CLOSE)


def test_checkpointed_layers_and_long_rows() -> None:
    """The last row is longer than the budget behind its stem: its layers are recomputed."""
    rows = [*rollouts(), *rollouts(tasks=1, size=1, turns=9)]
    expected = of_step(learner(build=qwen3, token_budget=10**6, off_start=True), rows, "gspo")
    for checkpointing in (False, True):
        trainer = learner(
            build=qwen3, token_budget=100, off_start=True, gradient_checkpointing=checkpointing
        )
        assert max(batch.input_ids.numel() for batch in trainer._pack(rows)) > 100
        assert_same(of_step(trainer, rows, "gspo")[1], expected[1], **CLOSE)


def test_half_precision() -> None:
    def half() -> Any:
        return qwen3().to(torch.bfloat16)

    whole, stems = (learner(build=half, token_budget=budget) for budget in (10**6, 100))
    expected, found = (of_step(one, rollouts(), "importance_sampling") for one in (whole, stems))
    assert found[2].tokens_recomputed > 0
    assert [*chain(*found[0])] == pytest.approx([*chain(*expected[0])], abs=0.1)


def test_a_custom_loss_goes_through_stems() -> None:
    def squares(_rows: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([(x * x).sum() for x in logprobs]).sum(), {}

    found: list[Any] = []
    for budget in (10**6, 100):
        trainer = learner(build=qwen3, token_budget=budget, off_start=True)
        trainer.forward_backward_custom(rollouts(), squares)
        found.append(gradients(trainer))
    assert_same(found[1], found[0], **CLOSE)


def test_a_coding_agents_step_computes_each_token_once() -> None:
    """The workload of benchmarks/coding_agents: 8 rollouts of 12 calls, 4,000 tokens shared."""
    rows = rollouts(4000, 0, tasks=1, size=8, turns=12, seen=100, said=100)
    batches = pack(rows, token_budget=4096, enough=1024)
    counts = count_tokens(rows, batches)
    assert counts.fed <= 1.001 * counts.unique
    assert max(batch.input_ids.numel() for batch in batches) < 4096
    groups = rollouts(4000, 500, tasks=4, size=4, turns=12, seen=100, said=100)
    counts = count_tokens(groups, pack(groups, token_budget=4096, enough=1024))
    assert counts.fed <= 1.001 * counts.unique
