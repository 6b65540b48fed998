"""agentrl's side of ``run.py``: the embedded sampler, with the adapter, from threads' callbacks."""

from __future__ import annotations

import threading

import torch
from benchmarks.sampler.workload import Workload, side_options, time_passes

from agentrl_trainer import inference
from agentrl_trainer.models.devices import on_own_thread
from agentrl_trainer.models.loading import load_base

POLICY = "policy"


def sample(engine: inference.SamplerEngine, asked: Workload) -> list[list[inference.Token]]:
    """Ask everything at once; return the tokens of all answers."""
    answers: list[list[inference.Token]] = [[] for _ in asked.prompts]
    done = threading.Semaphore(0)

    def collect(event: inference.Event, into: list[inference.Token]) -> None:
        if isinstance(event, inference.Finished):
            assert event.reason == "length", event
            done.release()
        else:
            into.append(event)

    asking = zip(asked.prompts, asked.lengths, answers, strict=True)
    for seed, (prompt, length, into) in enumerate(asking):
        params = inference.SampleParams(max_tokens=length, seed=seed)
        engine.submit(
            inference.SampleRequest(prompt, params, POLICY, lambda e, into=into: collect(e, into))
        )
    for _ in answers:
        done.acquire()
    return answers


def main() -> None:
    parser = side_options(__doc__)
    parser.add_argument("--weights", choices=["model", "bfloat16", "int8"], default="model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = on_own_thread(load_base, str(options.folder / "base"), device="cpu", dtype="float32")
    engine = inference.SamplerEngine(base, weights=options.weights)
    engine.start()

    def run(asked: Workload) -> list[int]:
        # A new version: nothing is left in the prefix cache from the run before.
        version = engine.stats().swaps + 1
        engine.load_adapter(POLICY, version, options.folder / "adapter").result()
        return [len(answer) for answer in sample(engine, asked)]

    time_passes(run, options)
    engine.stop()


if __name__ == "__main__":
    main()
