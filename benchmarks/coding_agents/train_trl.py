"""TRL's side of training: GRPOTrainer's own loss and its gradient, a row for each call.

Times ``--rows`` rows spread over the positions of the calls, one at a time, and scales their
seconds to all rows by tokens.
"""

from __future__ import annotations

import tempfile

import torch
from benchmarks.coding_agents.sides import finish, options_of, spread, timed
from benchmarks.coding_agents.workload import by_call
from benchmarks.trainer.measure import PeakMemory
from benchmarks.trainer.trl_side import inputs, trainer_for


def main() -> None:
    options, shape = options_of(__doc__)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trainer_for(options.model, scratch)
    model = trainer.model.train()
    calls = by_call(shape)
    first = calls[: shape.calls]  # of one rollout: all positions, the last one included
    some = spread(first, options.rows)
    trainer.current_gradient_accumulation_steps = len(calls)
    trained = sum(sum(row.trained) for row in calls)

    def step(row) -> None:
        trainer.compute_loss(model, inputs([row], trained)).backward()
        model.zero_grad(set_to_none=True)

    short = some[0]
    step(type(short)(short.prompt[:64], short.completion, short.trained, short.advantage))
    memory = PeakMemory()
    found = timed(lambda: [step(row) for row in some])
    tokens = sum(len(row.prompt) + len(row.completion) for row in some)
    every = sum(len(row.prompt) + len(row.completion) for row in calls)
    scale = every / tokens
    finish(
        {
            "timed_rows": len(some),
            "timed_seconds": found["seconds"],
            "scaled_by": scale,
            "seconds": found["seconds"] * scale,
            "cpu_seconds": found["cpu_seconds"] * scale,
            "trained_tokens": trained,
            "computed_tokens": every,
            "megabytes_on_top_of_the_model": memory.megabytes(),
        }
    )


if __name__ == "__main__":
    main()
