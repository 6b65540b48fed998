"""The trainer's rows over an API without masks and means: gradients and statistics stay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_trainer.client import AdamParams, RefusedRows, ServiceClient
from agentrl_trainer.client.tinker.rows import (
    check_rows,
    folded,
    loss_of,
    native_config,
    trained_logprobs,
    unweighted,
)
from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.step_stats import step_stats
from agentrl_trainer.models.lora import count_parameters, parameters_in_name

TINY = "agentrl-tiny"


def rows(**extra: float) -> list[TrainingRow]:
    drawn = random.Random(3)
    made: list[TrainingRow] = []
    for length in (7, 12, 9):
        tokens = [drawn.randrange(5, 900) for _ in range(length)]
        mask = [False, *(drawn.random() < 0.6 for _ in range(length - 2)), True]
        made.append(
            TrainingRow(
                tokens=tokens,
                mask=mask,
                # Also where the mask is off: it must have no effect there.
                logprobs=[-drawn.random() * 9 for _ in tokens],
                advantages=[drawn.choice([-1.0, 0.0, 0.5]) for _ in tokens],
                adapter="policy",
            )
        )
    columns = {
        name: [[-drawn.random() * scale for _ in row.tokens] for row in made]
        for name, scale in extra.items()
    }
    return with_extra(made, **columns)


@pytest.mark.parametrize(
    ("loss", "config", "extra", "native"),
    [
        ("importance_sampling", {}, {}, True),
        ("importance_sampling", {}, {"weights": -2.0}, True),
        ("ppo", {"clip_low_threshold": 0.7}, {}, True),
        ("cispo", {"clip_high_threshold": 5.0}, {}, True),
        ("ppo", {"dual_clip_threshold": 3.0}, {}, False),
        ("ppo", {}, {"proximal": 9.0}, False),
        ("dro", {"beta": 0.1}, {}, False),
        ("gspo", {}, {"weights": -2.0}, False),
        ("dppo", {}, {}, False),
        ("cispo", {"kl_coef": 0.1}, {"reference": 9.0}, False),
        ("ppo", {"correction": "mask", "correction_level": "geometric"}, {"proximal": 9.0}, False),
    ],
)
def test_the_update_is_the_learners(
    tmp_path: Path, loss: str, config: dict[str, Any], extra: dict[str, float], native: bool
) -> None:
    """Ours is asked for datums as Tinker would be: it gives sums, and the loss's own options."""
    data = rows(**extra)
    tokens = sum(row.trained for row in data)
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client(TINY, rank=4, seed=1)

        def stepped() -> dict[str, torch.Tensor]:
            client.optim_step(AdamParams(1.0, beta1=0.0, beta2=0.0, eps=1.0)).result()
            return client.local(lambda learner: learner.state_dict()).result()

        client.load_state(client.save_state("before").result().path).result()
        expected = client.forward_backward(data, loss, config, normalize_by=None).result().stats
        weights = stepped()
        client.load_state(tmp_path / client.model_id / "weights" / "before").result()

        own = native_config(loss, config, data)
        assert (own is not None) == native
        seen: list[Any] = []

        def custom(_: Any, logprobs: list[torch.Tensor]) -> Any:
            seen.append(loss_of(data, logprobs, loss, config))
            return seen[0][0] / tokens, {}

        if own is None:
            client.forward_backward_custom([unweighted(row) for row in data], custom).result()
        else:
            sent = [folded(row, tokens) for row in data]
            done = client.forward_backward(sent, loss, own).result()
            custom(None, [torch.from_numpy(row["logprobs"]) for row in done.loss_fn_outputs])
        loss_sum, sums = seen[0]
        found = step_stats(loss_sum.item() / tokens, sums, count_tokens(data), non_finite=False)
        again = stepped()
    assert weights.keys() == again.keys()
    for name in weights:
        assert torch.allclose(weights[name], again[name], rtol=1e-4, atol=1e-6), name
    for name in ("loss", "entropy", "ratio_mean", "ratio_max", "clip_fraction", "tokens"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4), name
    assert found.sampler_trainer_kl == pytest.approx(expected.sampler_trainer_kl, rel=1e-4)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4)
    assert found.tokens_unique == expected.tokens_unique


def test_log_probs_come_back_for_each_row_and_only_where_it_trains() -> None:
    nothing = TrainingRow([1, 2, 3], [False] * 3, [0.0] * 3, [0.0] * 3)
    some = TrainingRow([1, 2, 3], [False, True, False], [0.0] * 3, [0.0] * 3)
    computed = np.asarray([-1.0, -2.0], dtype=np.float32)
    found = trained_logprobs([some, nothing, some], [computed, computed * 2])
    assert [row["logprobs"].tolist() for row in found] == [[-1, 0], [0, 0], [-2, 0]]


def test_what_cannot_be_learned_from_names_its_cause() -> None:
    with pytest.raises(RefusedRows, match="temperature: these answers were sampled at another"):
        check_rows(rows(temperature=-0.7))
    check_rows(rows())
    for name in ("weights", "proximal", "reference"):
        some = rows(**{name: -1.0})
        with pytest.raises(ValueError, match=f"some rows have '{name}' and some have not"):
            check_rows([*some, *rows()])
        check_rows([*some, TrainingRow([1, 2], [False] * 2, [0.0] * 2, [0.0] * 2)])


def test_how_large_a_model_is_that_is_not_here(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        client = service.create_lora_training_client(TINY, rank=8, seed=0)
        model = client.local(lambda learner: learner.base.model).result()
        assert count_parameters(TINY, 8) == sum(p.numel() for p in model.parameters())
    assert count_parameters(str(tmp_path), 8) is None
    names = {
        "Qwen/Qwen3-30B-A3B": 30_000_000_000,
        "meta-llama/Llama-3.2-1B": 1_000_000_000,
        "openai/gpt-oss-20b": 20_000_000_000,
        "a/0.6B-Base": 600_000_000,
        "moonshotai/Kimi-K2": None,
    }
    assert {name: parameters_in_name(name) for name in names} == names
