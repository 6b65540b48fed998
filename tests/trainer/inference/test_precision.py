"""Base models in half precision and in 4 bits: what stays in float32, and how two engines agree.

The sampler and the trainer are two engines over the same weights; in fewer bits their sums round
differently, and the correction of off-policy samples (``sampler_trainer_kl``) has to be small.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_learner import one_step
from small_models import Asked, running_engine, training_row

from agentrl_trainer.inference import SampleParams
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import save_adapter
from agentrl_trainer.models.sources import ModelError

MODEL = "agentrl-tiny"
PROMPT = [5, 60, 700, 41, 1200, 9, 33, 87]


def trained(tmp_path: Path, **how: object) -> Learner:
    """A learner three steps away from the base model; its adapter is in ``tmp_path / "v1"``."""
    base = load_base(MODEL, device="cpu", **how)
    learner = Learner(base, rank=4, adam=AdamParams(learning_rate=5e-3))
    row = training_row([*PROMPT, 50, 51, 52, 53], start=len(PROMPT))
    first, *_, last = (one_step(learner, [row], "cross_entropy").loss for _ in range(3))
    assert last < first - 0.1
    assert learner.why_not_shared is None
    # Weights, both moments and step counts.
    assert {value.dtype for value in learner.state_dict().values()} == {torch.float32}
    save_adapter(learner.model, "default", tmp_path / "v1")
    return learner


def differences(learner: Learner, folder: Path, **how: object) -> torch.Tensor:
    """[answer] trainer's log-prob minus sampler's, of an answer sampled with the adapter."""
    with running_engine(load_base(MODEL, device="cpu", **how)) as engine:
        engine.load_adapter("policy", 1, folder).result(30)
        answer = Asked(engine, PROMPT, SampleParams(max_tokens=16, seed=3), "policy").one()
    assert len(answer.tokens) == 16
    (found,) = learner.forward([training_row(PROMPT + answer.ids, start=len(PROMPT))])
    reported = torch.tensor([token.logprob for token in answer.tokens])
    return torch.tensor(found[len(PROMPT) :]) - reported


def test_a_bfloat16_base_samples_what_it_trains(tmp_path: Path) -> None:
    learner = trained(tmp_path, dtype="bfloat16")
    assert learner.base.model.dtype == torch.bfloat16
    apart = differences(learner, tmp_path / "v1", dtype="bfloat16")
    assert 0 < float(apart.abs().mean()) < 0.03
    assert float((apart.exp() - 1 - apart).mean()) < 2e-3


def test_a_base_in_four_bits_samples_what_it_trains(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    learner = trained(tmp_path, load_in_4bit=True)
    apart = differences(learner, tmp_path / "v1", load_in_4bit=True)
    assert float(apart.abs().mean()) < 0.03
    # Not the policy of the base in float32: the test would see it if 4 bits were not used.
    whole = differences(learner, tmp_path / "v1")
    assert float(whole.abs().mean()) > 3 * float(apart.abs().mean())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_a_device_that_is_not_there_is_named(load_in_4bit: bool) -> None:
    if load_in_4bit:
        pytest.importorskip("bitsandbytes")
    with pytest.raises(ModelError, match="device: 'cuda'"):
        load_base(MODEL, device="cuda", load_in_4bit=load_in_4bit)
