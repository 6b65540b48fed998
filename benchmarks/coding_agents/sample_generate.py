"""transformers' side of sampling: ``generate`` for all rollouts' calls of a turn as one batch.

As a plain loop around it does: each call's prompt is computed anew. Times the first and the last
turn, and scales their seconds to all turns by tokens.
"""

from __future__ import annotations

import torch
from benchmarks.coding_agents.sides import finish, options_of, spread, timed
from benchmarks.coding_agents.workload import by_call
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main() -> None:
    options, shape = options_of(__doc__)
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], length: int) -> None:
        ids = torch.tensor(prompts)
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids),
            max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert found.shape[1] == len(prompts[0]) + length

    calls = by_call(shape)
    turns = [[row.prompt for row in calls[turn :: shape.calls]] for turn in range(shape.calls)]
    some = spread(turns, 2)
    generate([[1] * 32], 4)
    found = timed(lambda: [generate(prompts, shape.answer) for prompts in some])

    def size(turns: list[list[list[int]]]) -> int:
        return sum(len(prompt) + shape.answer for prompts in turns for prompt in prompts)

    scale = size(turns) / size(some)
    finish(
        {
            "timed_turns": len(some),
            "timed_seconds": found["seconds"],
            "scaled_by": scale,
            "seconds": found["seconds"] * scale,
            "cpu_seconds": found["cpu_seconds"] * scale,
            "sampled_tokens": shape.rollouts * shape.calls * shape.answer,
            "computed_tokens": size(turns),
        }
    )


if __name__ == "__main__":
    main()
