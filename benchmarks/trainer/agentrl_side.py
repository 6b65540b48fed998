"""agentrl's side of ``run.py``: one case, one pass forward and backward through ``Learner``."""

from __future__ import annotations

import torch
from benchmarks.roof import product_gflops
from benchmarks.trainer.cases import CASES, RANK, Row
from benchmarks.trainer.measure import measured, report, side_options

from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.models.loading import load_base


def training_row(row: Row) -> TrainingRow:
    silent = len(row.prompt)
    return TrainingRow(
        tokens=row.prompt + row.completion,
        mask=[False] * silent + row.trained,
        logprobs=[-10.0] * len(row),
        advantages=[row.advantage] * len(row),
    )


def flops(learner: Learner, fed: int, trained: int) -> float:
    """Of forward and backward, attention left out: a frozen weight of the layers costs 4 a token
    (none for its own gradient), a trained one of the adapter 6, and one of the output head 4 a
    trained token."""
    head = learner.base.model.get_output_embeddings().weight.numel()
    adapter = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    # The output head is the input embedding.
    layers = sum(p.numel() for p in learner.model.parameters()) - adapter - head
    return fed * (4 * layers + 6 * adapter) + trained * 4 * head


def main() -> None:
    options = side_options(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    base = load_base(options.model, device="cpu", dtype="float32")
    learner = Learner(base, rank=RANK)
    rows = [training_row(row) for row in CASES[options.case].rows()]
    logprobs = [[0.0] * len(row.tokens) for row in rows]

    def step(part: list[TrainingRow], into: list[list[float]] | None = None) -> None:
        learner.forward_backward(part, logprobs_into=into)
        learner.discard_gradients()

    found = measured(lambda: step(rows[:2]), lambda: step(rows, logprobs))
    tokens = count_tokens(rows, learner._pack(rows))
    trained = sum(row.trained for row in rows)
    found |= {
        "trained_tokens": trained,
        "computed_tokens": tokens.fed,
        "unique_tokens": tokens.unique,
        "gflops": 1e-9 * flops(learner, tokens.fed, trained) / found["seconds"],
        "product_gflops": product_gflops(),
    }
    columns = zip(rows, logprobs, strict=True)
    report(
        found,
        [lp for row, own in columns for lp, on in zip(own, row.mask, strict=True) if on],
        options.out,
    )


if __name__ == "__main__":
    main()
