"""vLLM's side of sampling, with its prefix cache, offline. Runs in vLLM's environment.

Each rollout's next call is added as soon as its last one is answered, as agents do.
"""

from __future__ import annotations

from benchmarks.coding_agents.sides import finish, options_of, timed
from benchmarks.coding_agents.workload import results, shared_tokens
from vllm import EngineArgs, LLMEngine, SamplingParams


def main() -> None:
    options, shape = options_of(__doc__)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=options.model, skip_tokenizer_init=True, dtype="float32",
            enforce_eager=options.eager, max_model_len=8192, max_num_seqs=shape.rollouts,
            enable_prefix_caching=True,
        )
    )  # fmt: skip

    def answers(prompts: dict[int, list[int]], left: dict[int, list[list[int]]], size: int) -> int:
        """Answer all prompts and what follows them; returns the tokens from the prefix cache."""
        reused = 0

        def ask(number: int) -> None:
            params = SamplingParams(
                max_tokens=size, min_tokens=size, ignore_eos=True, logprobs=0, detokenize=False,
            )  # fmt: skip
            name = f"{number}.{len(left[number])}"
            engine.add_request(name, {"prompt_token_ids": list(prompts[number])}, params)

        for number in prompts:
            ask(number)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.finished:
                    continue
                number = int(output.request_id.partition(".")[0])
                reused += output.num_cached_tokens or 0
                prompts[number] += output.outputs[0].token_ids
                if left[number]:
                    prompts[number] += left[number].pop(0)
                    ask(number)
        return reused

    answers({0: [*range(32)]}, {0: []}, 8)
    numbers = range(shape.rollouts)
    left = {number: results(shape, number) for number in numbers}
    prompts = {number: shared_tokens(shape) + left[number].pop(0) for number in numbers}
    reused: list[int] = []
    found = timed(lambda: reused.append(answers(prompts, left, shape.answer)))
    sampled = shape.rollouts * shape.calls * shape.answer
    turn = shape.result + shape.answer
    asked = sum(shape.shared + turn * call + shape.result for call in range(shape.calls))
    finish(
        found
        | {
            "sampled_tokens": sampled,
            "computed_tokens": sampled + shape.rollouts * asked - reused[0],
        }
    )


if __name__ == "__main__":
    main()
