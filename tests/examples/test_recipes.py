"""The recipes in a short form: each runs as it is, learns something, and draws it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from agentrl_trainer.client import ServiceClient
from agentrl_trainer.client.rows import to_row

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.fixture(autouse=True)
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(RECIPES))
    yield
    torch.set_num_threads(threads)


def history(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in lines]


def column(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    import_module("sft").main(steps=4, batch=16, folder=tmp_path)
    losses = column(history(tmp_path / "model-1"), "loss per token")
    assert losses[-1] < 0.7 * losses[0]
    assert (tmp_path / "model-1/sampler_weights/final/adapter_config.json").is_file()


def test_direct_preference_optimisation(tmp_path: Path) -> None:
    import_module("dpo").main(steps=3, batch=4, folder=tmp_path)
    rows = history(tmp_path / "model-1")
    # Before anything was learned the policy is the reference: -log sigmoid(0).
    assert column(rows, "loss")[0] == pytest.approx(0.6931, abs=1e-3)
    assert column(rows, "margin")[-1] > 0.1


def test_the_dpo_loss_is_the_formula_of_the_paper() -> None:
    chosen, rejected = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])
    loss, metrics = import_module("dpo").dpo_loss(0.5, torch.tensor([-2.0, -4.5]))(
        [], [chosen, rejected]
    )
    assert metrics["margin"] == (-3.0 + 3.0) - (-2.0 + 4.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(0.5 * 2.5)))


def test_on_policy_distillation(tmp_path: Path) -> None:
    import_module("distillation").main(steps=5, batch=4, teacher_steps=5, folder=tmp_path)
    found = column(history(tmp_path / "student"), "KL to the teacher")
    assert found[-1] < 0.7 * found[0]


def test_distillation_teaches_log_p_teacher_minus_log_p_student(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path) as service:
        tutor = service.create_lora_training_client("agentrl-tiny", rank=4, seed=1)
        import_module("sft").fine_tune(tutor, 1, 4, 1e-2)
        teacher = tutor.save_weights_and_get_sampling_client()
        student = service.create_sampling_client(base_model="agentrl-tiny")
        data, divergence = import_module("distillation").rollouts(student, teacher, 1, 2, 2)
        known: list[float] = []
        for row in (to_row(datum, "policy", "importance_sampling") for datum in data):
            scores = [one.compute_logprobs(row.tokens).result() for one in (teacher, student)]
            columns = zip(*scores, row.logprobs, row.advantages, strict=True)
            taught = [(a, t - s) for t, s, sampled, a in columns if sampled]
            known += [gap for _, gap in taught]
            assert [a for a, _ in taught] == pytest.approx([gap for _, gap in taught], abs=1e-3)
    assert divergence == pytest.approx(-fmean(known), abs=1e-3)
    assert abs(divergence) > 1e-3


def test_improvement_of_log_p(tmp_path: Path) -> None:
    import_module("delta_logp").main(steps=5, batch=4, folder=tmp_path)
    rewards = column(history(tmp_path / "model-1"), "reward")
    assert rewards[-1] > rewards[0] + 1
