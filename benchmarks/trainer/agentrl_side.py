"""agentrl's side of ``run.py``: one case, forward and backward."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from cases import CASES, RANK, Row
from measure import report
from transformers import AutoModelForCausalLM

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import BaseModel


def datum(row: Row) -> TrainingRow:
    silent = len(row.prompt)
    length = silent + len(row.completion)
    return TrainingRow(
        tokens=row.prompt + row.completion,
        mask=[False] * silent + row.trained,
        logprobs=[-7.6] * length,
        advantages=[row.advantage] * length,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = model.eval().requires_grad_(False)
    base = BaseModel(
        model=model, tokenizer=cast(Any, None), name="random", device=torch.device("cpu"),
        dtype=torch.float32, context_length=2048, eos_ids=frozenset(),
    )  # fmt: skip
    learner = Learner(base, rank=RANK)
    datums = [datum(row) for row in CASES[options.case]()]
    # Of a few rows only: the peak of memory is to be that of forward and backward.
    few = zip(datums[:2], learner.forward(datums[:2]), strict=True)
    logprobs = [lp for own, lps in few for lp, on in zip(lps, own.mask, strict=True) if on]

    def forward_backward() -> None:
        learner.forward_backward(datums)
        learner.discard_gradients()

    report(
        forward_backward,
        mean_logprob=sum(logprobs) / len(logprobs),
        trained=sum(own.trained for own in datums),
        repeats=options.repeats,
    )


if __name__ == "__main__":
    main()
