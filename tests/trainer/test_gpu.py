"""A CUDA GPU computes what the CPU computes: `make gpu`, on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import group, tiny_model
from small_learner import gradients
from small_models import Answer, Asked, lora_b_from, running_engine, save_model, training_row

from agentrl_trainer.checkpoint import latest_checkpoint, restore_rng, save_checkpoint
from agentrl_trainer.inference import SampleParams
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import save_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FAMILIES = ["llama", "qwen3", "gemma2", "gpt_oss", "olmoe"]  # plain, norms, caps, sinks, experts
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save_model(tiny_model(request.param), tmp_path / "base")


def learner(source: str, device: str, dtype: str = "float32") -> Learner:
    """The same weights on every device."""
    made, drawn = (
        Learner(load_base(source, device=where, dtype=dtype), rank=4, alpha=8, adam=ADAM)
        for where in (device, "cpu")
    )
    lora_b_from(5, drawn.model)
    made.load_state_dict(drawn.state_dict())
    return made


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_log_probs_and_gradients(folder: str) -> None:
    cpu, gpu = learner(folder, "cpu"), learner(folder, "cuda")
    assert (gpu.why_not_shared is None) == (cpu.why_not_shared is None)
    for ours, theirs in zip(gpu.forward(group()), cpu.forward(group()), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    losses = [x.forward_backward(group()).loss for x in (gpu, cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    found, expected = gradients(gpu), gradients(cpu)
    assert found.keys() == expected.keys()
    scale = max(float(x.abs().max()) for x in expected.values())
    for name, value in expected.items():
        assert float((found[name].cpu() - value).abs().max()) < 1e-4 * scale, name


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_the_sampler_says_what_the_trainer_computes(folder: str, tmp_path: Path) -> None:
    """Greedy answers of the CPU, and log-probs of the GPU's trainer, with an adapter."""
    trained = learner(folder, "cuda")
    save_adapter(trained.model, "default", tmp_path / "v1")
    prompts = [row.tokens[:4] for row in group()]
    greedy = SampleParams(max_tokens=12, temperature=0)
    answers: dict[str, list[Answer]] = {}
    for device in ("cpu", "cuda"):
        with running_engine(load_base(folder, device=device, dtype="float32")) as engine:
            engine.load_adapter("policy", 1, tmp_path / "v1").result(60)
            asked = [Asked(engine, prompt, greedy, "policy") for prompt in prompts]
            answers[device] = [one.one() for one in asked]
    for prompt, ours, theirs in zip(prompts, answers["cuda"], answers["cpu"], strict=True):
        reported = [token.logprob for token in ours.tokens]
        assert ours.ids == theirs.ids
        assert reported == pytest.approx([token.logprob for token in theirs.tokens], abs=1e-4)
        tokens = prompt + ours.ids
        seen = training_row(tokens, start=len(prompt))
        assert trained.forward([seen])[0][len(prompt) :] == pytest.approx(reported, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    whole, resumed = (learner("agentrl-tiny", "cuda", dtype) for _ in range(2))
    step(whole)
    save_checkpoint(tmp_path, 1, tensors=whole.state_dict(), meta={})
    found = latest_checkpoint(tmp_path).checkpoint
    assert found is not None
    resumed.load_state_dict(found.tensors)
    step(whole)
    step(resumed)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def step(learner: Learner) -> None:
    learner.forward_backward(group())
    learner.optim_step()


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(7)
    save_checkpoint(tmp_path, 1, tensors={}, meta={})
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    found = latest_checkpoint(tmp_path).checkpoint
    assert found is not None
    restore_rng(found.rng)
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_an_adapter_leaves_random_states_as_they_were() -> None:
    torch.manual_seed(7)
    before = torch.cuda.get_rng_state()
    learner("agentrl-tiny", "cuda")
    assert torch.equal(torch.cuda.get_rng_state(), before)
