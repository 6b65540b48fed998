"""agentrl's side of sampling: every rollout asks its next call when the last one is answered."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from benchmarks.coding_agents.sides import finish, options_of, timed
from benchmarks.coding_agents.workload import Shape, results, shared_tokens

from agentrl_trainer.inference import Finished, SampleParams, SamplerEngine, SampleRequest, Token
from agentrl_trainer.models.devices import on_own_thread
from agentrl_trainer.models.loading import load_base

KV_TOKENS = 93_000
"""4 GB of SmolLM2-135M's keys and values in float32: what vLLM gets."""


def call(engine: SamplerEngine, prompt: list[int], length: int, seed: int) -> list[int]:
    """Sample one answer, and wait for it."""
    answer: list[int] = []
    done = threading.Event()

    def event(one: Token | Finished) -> None:
        if isinstance(one, Finished):
            assert one.reason == "length", one
            done.set()
        else:
            answer.append(one.token_id)

    engine.submit(SampleRequest(list(prompt), SampleParams(length, seed=seed), None, event))
    done.wait()
    return answer


def rollout(engine: SamplerEngine, shape: Shape, number: int) -> None:
    tokens = shared_tokens(shape)
    for turn, result in enumerate(results(shape, number)):
        tokens += result
        tokens += call(engine, tokens, shape.answer, 100 * number + turn)


def main() -> None:
    options, shape = options_of(__doc__)
    torch.set_num_threads(options.threads)
    base = on_own_thread(load_base, options.model, device="cpu", dtype="float32")
    engine = SamplerEngine(base, kv_tokens=KV_TOKENS)
    engine.start()
    call(engine, list(range(32)), 8, 0)
    before = engine.stats()
    numbers = range(shape.rollouts)
    with ThreadPoolExecutor(shape.rollouts) as agents:
        found = timed(lambda: [*agents.map(lambda n: rollout(engine, shape, n), numbers)])
    after = engine.stats()
    engine.stop()
    sampled = after.generated_tokens - before.generated_tokens
    assert sampled == shape.rollouts * shape.calls * shape.answer
    finish(
        found
        | {
            "sampled_tokens": sampled,
            "computed_tokens": sampled + after.prefill_tokens - before.prefill_tokens,
            "preemptions": after.preemptions,
        }
    )


if __name__ == "__main__":
    main()
