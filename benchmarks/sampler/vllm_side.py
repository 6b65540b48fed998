"""vLLM's side of ``run.py``: the same requests, offline. Runs in vLLM's environment."""

from __future__ import annotations

from benchmarks.sampler.workload import Workload, side_options, time_passes
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    parser = side_options(__doc__)
    parser.add_argument("--adapter", action="store_true", help="not merged, but beside the base")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    lora = None
    more = {}
    if options.adapter:
        lora = LoRARequest("policy", 1, str(options.folder / "adapter"))
        more = {"enable_lora": True, "max_lora_rank": 16}
    model = LLM(
        model=str(options.folder / ("base" if options.adapter else "merged")),
        skip_tokenizer_init=True, dtype="float32", enforce_eager=options.eager,
        max_model_len=1024, max_num_seqs=64, enable_prefix_caching=False, **more,
    )  # fmt: skip

    def run(asked: Workload) -> list[int]:
        params = [
            SamplingParams(
                max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in asked.lengths
        ]
        prompts = [{"prompt_token_ids": ids} for ids in asked.prompts]
        answers = model.generate(prompts, params, use_tqdm=False, lora_request=lora)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    time_passes(run, options)


if __name__ == "__main__":
    main()
