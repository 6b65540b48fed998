"""agentrl's side of training: one pass forward and backward through ``Learner``."""

from __future__ import annotations

import torch
from benchmarks.coding_agents.sides import finish, options_of, timed
from benchmarks.coding_agents.workload import RANK, Row, rows
from benchmarks.trainer.measure import PeakMemory

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.step_stats import StepStats
from agentrl_trainer.models.loading import load_base


def training_row(row: Row) -> TrainingRow:
    tokens, mask = row.prompt + row.completion, [False] * len(row.prompt) + row.trained
    return TrainingRow(tokens, mask, [-10.0] * len(tokens), [row.advantage] * len(tokens))


def main() -> None:
    options, shape = options_of(__doc__)
    torch.set_num_threads(options.threads)
    learner = Learner(load_base(options.model, device="cpu", dtype="float32"), rank=RANK)
    batch = [training_row(row) for row in rows(shape)]
    small = [training_row(Row(r.prompt[:32], r.completion[-64:], r.trained[-64:], 1.0))
             for r in rows(shape)[:1]]  # fmt: skip
    learner.forward_backward(small)
    learner.discard_gradients()
    memory = PeakMemory()
    steps: list[StepStats] = []
    found = timed(lambda: steps.append(learner.forward_backward(batch)))
    [step] = steps
    finish(
        found
        | {
            "trained_tokens": sum(row.trained for row in batch),
            "computed_tokens": step.tokens_total - step.tokens_saved + step.tokens_recomputed,
            "recomputed_tokens": step.tokens_recomputed,
            "unique_tokens": step.tokens_unique,
            "megabytes_on_top_of_the_model": memory.megabytes(),
        }
    )


if __name__ == "__main__":
    main()
