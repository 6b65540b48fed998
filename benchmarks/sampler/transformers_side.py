"""transformers' sides of ``run.py``: ``generate``, with PEFT or merged, and continuous batching."""

from __future__ import annotations

import torch
from benchmarks.sampler.workload import Workload, side_options, time_passes
from peft import PeftModel
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


@torch.inference_mode()
def generate(model: torch.nn.Module, asked: Workload) -> list[int]:
    """All requests as one left-padded batch, which runs as long as the longest answer."""
    longest = max(map(len, asked.prompts))
    model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([[0] * (longest - len(p)) + p for p in asked.prompts]),
        attention_mask=torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in asked.prompts]
        ),
        max_new_tokens=max(asked.lengths), do_sample=True, top_k=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return asked.lengths  # cut off from longer ones


def continuous(model: torch.nn.Module, asked: Workload) -> list[int]:
    """Continuous batching with a cache no larger than these requests need."""
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    needed = sum(map(len, asked.prompts)) + sum(asked.lengths)
    batching = ContinuousBatchingConfig(
        block_size=32, num_blocks=needed // 32 + 2 * len(asked.prompts), max_batch_tokens=2048
    )
    found: dict[str, int] = {}
    with model.continuous_batching_context_manager(  # type: ignore[operator]
        generation_config=config, continuous_batching_config=batching
    ) as manager:
        names = [
            manager.add_request(prompt, max_new_tokens=length)
            for prompt, length in zip(asked.prompts, asked.lengths, strict=True)
        ]
        while len(found) < len(names):
            result = manager.get_result(timeout=30)
            if result is None and not manager.is_running():
                raise RuntimeError("continuous batching has ended before its answers")
            if result is not None and result.is_finished():
                found[result.request_id] = len(result.generated_tokens)
    return [found[name] for name in names]


def main() -> None:
    parser = side_options(__doc__)
    parser.add_argument("--how", choices=["peft", "merged", "continuous"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.folder / ("base" if options.how == "peft" else "merged")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if options.how == "peft":
        model = PeftModel.from_pretrained(model, options.folder / "adapter").eval()
    run = continuous if options.how == "continuous" else generate
    time_passes(lambda asked: run(model, asked), options)


if __name__ == "__main__":
    main()
