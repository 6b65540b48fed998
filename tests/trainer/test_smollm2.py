"""A real pretrained model: trainer and sampler agree about it, before and after a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import Asked, running_engine

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.inference import SampleParams
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import save_adapter

CLOSE = 1e-4


def test_it_samples_and_learns(smollm2: str, tmp_path: Path) -> None:
    base = load_base("smollm2-135m", device="cpu")
    learner = Learner(load_base("smollm2-135m", device="cpu"), rank=8)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = base.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    greedy = SampleParams(max_tokens=10, temperature=0)
    with running_engine(base) as engine:
        assert engine.strategy == "llama cpu"
        before = Asked(engine, prompt, greedy).one()
        assert "Paris" in base.tokenizer.decode(before.ids)
        row, reported = _row(prompt, before)
        (found,) = learner.forward([row])
        assert found == pytest.approx(reported, abs=CLOSE)

        learner.forward_backward([row])
        learner.optim_step(AdamParams(1e-3))
        save_adapter(learner.model, "default", tmp_path / "v1")
        engine.load_adapter("policy", 1, tmp_path / "v1").result(60)
        after = Asked(engine, prompt, greedy, "policy").one()
        again, reported_after = _row(prompt, after)
        (found,) = learner.forward([again])
        assert found == pytest.approx(reported_after, abs=CLOSE)
    # The answer that was rewarded became likelier, by more than rounding explains.
    assert after.ids == before.ids
    assert sum(reported_after) > sum(reported) + 100 * CLOSE


def _row(prompt: list[int], answer) -> tuple[TrainingRow, list[float]]:
    """The answer as a training row, and its log-probs where the row trains."""
    tokens, silent = [*prompt, *answer.ids], len(prompt)
    logprobs = [0.0] * silent + [token.logprob for token in answer.tokens]
    mask = [at >= silent for at in range(len(tokens))]
    return TrainingRow(tokens, mask, logprobs, [1.0] * len(tokens)), logprobs
