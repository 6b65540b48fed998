"""Trials of a model: float32's rounding forbids nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import llama

from agentrl_trainer.learner import model_support


@pytest.mark.parametrize(("apart", "refused"), [(2e-4, False), (4e-4, True)])
def test_rounding_does_not_forbid_tries(
    apart: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2-135M after supervised fine-tuning differs by 1e-4."""
    exact = model_support.decoder_states

    def rounded(model: Any, input_ids: torch.Tensor, trie: Any = None) -> torch.Tensor:
        states = exact(model, input_ids, trie)
        return states if trie is None else states + apart * states.abs().max()

    monkeypatch.setattr(model_support, "decoder_states", rounded)
    why = model_support.why_no_tries(llama())
    assert why == ("a trie's hidden states differ from those of rows" if refused else None)
