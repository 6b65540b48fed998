"""The client's datums become rows of the learner, or their mistake is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from client_data import RL_ROW, ROW, reinforced, supervised

from agentrl_trainer.client import Datum, EncodedTextChunk, ModelInput
from agentrl_trainer.client.rows import to_row, to_rows


def test_plain_arrays_of_every_kind_give_the_same() -> None:
    expected = to_row(supervised(weights=[1.0, 0.5] * 3 + [1.0]), "a", "cross_entropy")
    halves = ModelInput(chunks=[EncodedTextChunk(ROW[:3]), EncodedTextChunk(ROW[3:-1])])
    for kind in (list, np.asarray, torch.tensor):
        inputs = {"target_tokens": kind(ROW[1:]), "weights": kind([1.0, 0.5] * 3 + [1.0])}
        assert to_row(Datum(halves, inputs), "a", "cross_entropy") == expected
    half = torch.ones(7, dtype=torch.bfloat16, requires_grad=True)
    read = Datum(ModelInput.from_ints(np.array(ROW[:-1])), {"target_tokens": torch.tensor(ROW[1:])})
    found = to_row(
        replace(read, loss_fn_inputs={**read.loss_fn_inputs, "weights": half}), "a", None
    )
    assert found == to_row(read, "a", None)


def test_a_datum_is_a_row_of_the_learner() -> None:
    assert to_row(reinforced(), "a", "ppo") == RL_ROW


@pytest.mark.parametrize(
    ("datum", "loss", "message"),
    [
        (supervised(), "ppo", r"data\[0\]: loss_fn_inputs lacks .*advantages.*ppo"),
        (reinforced(weights=[1] * 7), "ppo", r"weights are cross_entropy's"),
        (reinforced(advantages=[1.0] * 6), "ppo", r"advantages has 6 values, target_tokens 7"),
        (reinforced(target_tokens=ROW[2:]), "ppo", r"model_input has 7 tokens and target_tokens 6"),
        (reinforced(target_tokens=ROW[:-1]), "ppo", r"target_tokens\[3\] is 41.*shifted by one"),
        (reinforced(target_tokens=[0.5] * 7), "ppo", r"whole numbers"),
        (reinforced(target_tokens=[-100] * 7), "ppo", r"not negative; got -100"),
        (reinforced(target_tokens=[[1] * 7]), "ppo", r"one dimension, not shape \(1, 7\)"),
        (reinforced(advantages=[np.nan] * 7), "ppo", r"advantages\[0\] is nan.*finite"),
        (reinforced(logprobs=[0.5] * 7), "ppo", r"never positive"),
        (reinforced(advantage=[0.5] * 7), "ppo", r"\['advantage'\], but known are"),
        (Datum(ModelInput.from_ints([1])), "cross_entropy", r"lacks target_tokens"),
        (supervised([*ROW[:-1], 10**6]), "cross_entropy", r"token id 1000000 is beyond"),
        (supervised([1] * 5000), "cross_entropy", r"the row has 5000 tokens.*context"),
    ],
)
def test_mistakes_are_named_at_once(datum: Datum, loss: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_rows([datum], "a", loss, vocabulary=1000, context=512)
